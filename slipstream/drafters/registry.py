"""Names of drafters, and the syntax of their options.

A drafter is found by name in this table or in the entry-point group `slipstream.drafters` of any installed package, so
a third party adds one without an edit here.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from slipstream.drafters.base import Drafter, DraftOptions
from slipstream.drafters.guard.isolation import Isolated, is_plug_in
from slipstream.errors import OptionError, unknown_choice
from slipstream.models.view import TargetView

ENTRY_POINTS = "slipstream.drafters"

# Modules are named by strings: a method's file is imported on first use.
_BUILT_IN = {
    "auto": "slipstream.drafters.composites.auto:AutoDrafter",
    "none": "slipstream.drafters.none:NoDrafter",
    "ngram": "slipstream.drafters.ngram:NgramDrafter",
    "suffix": "slipstream.drafters.suffix:SuffixDrafter",
    "lookahead": "slipstream.drafters.lookahead:LookaheadDrafter",
    "prediction": "slipstream.drafters.prediction:PredictionDrafter",
    "grammar": "slipstream.drafters.grammar:GrammarDrafter",
    "draft_model": "slipstream.drafters.draft_model_distilled:DistilledDrafter",
    "foreign_draft": "slipstream.drafters.foreign_draft:ForeignDraftDrafter",
    "early_exit": "slipstream.drafters.early_exit:EarlyExitDrafter",
    "layer_skip": "slipstream.drafters.layer_skip:LayerSkipDrafter",
    "kangaroo": "slipstream.drafters.kangaroo:KangarooDrafter",
    "eagle3": "slipstream.drafters.eagle3:Eagle3Drafter",
    "medusa": "slipstream.drafters.medusa:MedusaDrafter",
    "mtp": "slipstream.drafters.mtp:MtpDrafter",
    "parallel": "slipstream.drafters.parallel:ParallelDrafter",
    "merge": "slipstream.drafters.composites.merge:MergeDrafter",
    "cascade": "slipstream.drafters.composites.cascade:CascadeDrafter",
}

DEFAULT = "auto"
_JOINED = {"merge": ("", "drafters"), "cascade": ("cascade:", "levels")}  # written as drafters joined by plus

AnyDrafter = Drafter[Any]
Options = typing.TypeVar("Options")


def drafter_names() -> list[str]:
    """All drafter names."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def drafter_class(name: str) -> type[AnyDrafter]:
    """The class of a name."""
    place = _BUILT_IN.get(name)
    if place is None:
        for point in entry_points(group=ENTRY_POINTS):
            if point.name == name:
                return typing.cast(type[AnyDrafter], point.load())
        raise unknown_choice("drafter", name, drafter_names())
    module, _, attribute = place.partition(":")
    return typing.cast(type[AnyDrafter], getattr(importlib.import_module(module), attribute))


@dataclass(frozen=True)
class DrafterSpec:
    """A method and its options as the user gave them, not yet validated."""

    method: str
    options: Mapping[str, object] = field(default_factory=dict)

    def build(self, target: TargetView) -> AnyDrafter:
        """The drafter; unknown or ill-typed options are refused with the valid ones. A plug-in gets a guard."""
        kind, options = self._kind, self.checked()
        drafter = Isolated(kind, options, target) if is_plug_in(kind) else kind(options, target)
        drafter.given = frozenset(self.options)
        return drafter

    def checked(self) -> DraftOptions:
        """The converted options; what can be refused before a model is loaded is refused here."""
        kind: type[DraftOptions] = self._kind.options_type
        return make_options(self.method, kind, self.options)

    @property
    def _kind(self) -> type[AnyDrafter]:
        return drafter_class(self.method).resolve_class(self.options)

    def __str__(self) -> str:
        """The spelling that `parse_speculate` reads."""
        spelled = {
            name: "+".join(str(parse_speculate(part)) for part in value) if isinstance(value, tuple | list) else value
            for name, value in self.options.items()
        }
        if self.method in _JOINED and spelled.keys() == {_JOINED[self.method][1]}:
            prefix, option = _JOINED[self.method]
            return f"{prefix}{spelled[option]}"
        if any("," in str(spelled[name]) for name, value in self.options.items() if isinstance(value, tuple | list)):
            # Where a part's options would end and this drafter's go on, only JSON says.
            listed = {
                n: [str(parse_speculate(part)) for part in v] if isinstance(v, tuple | list) else v
                for n, v in self.options.items()
            }
            return json.dumps({"method": self.method, **listed})
        settings = ",".join(f"{name}={value}" for name, value in spelled.items())
        return f"{self.method}:{settings}" if settings else self.method

    @property
    def model(self) -> str | None:
        """The model that the drafter runs, if any: every drafter calls that option `model`."""
        return str(getattr(self.checked(), "model", "")) or None

    def parts(self) -> Iterator[DrafterSpec]:
        """This drafter and its parts."""
        yield self
        for setting in vars(self.checked()).values():
            if isinstance(setting, tuple):
                for part in setting:
                    if isinstance(part, DrafterSpec):
                        yield from part.parts()


def build_several(specs: Sequence[DrafterSpec], target: TargetView) -> list[AnyDrafter]:
    """The parts of a drafter, each with its own key."""
    drafters = [spec.build(target) for spec in specs]
    for number, drafter in enumerate(drafters):
        drafter.rename(f"{drafter.key}.{number}")
    return drafters


def parse_speculate(value: str | Mapping[str, object] | DrafterSpec | None) -> DrafterSpec:
    """`"suffix"`, `"suffix:depth=8,nodes=16"`, `"suffix+draft_model:model=PATH"`, `"cascade:suffix+draft_model:..."`,
    `"auto:drafters=suffix+eagle3,max_nodes=32"`, a dict with `method`, vLLM's `speculative_config`, or None for plain.
    """
    if value is None:
        spec = DrafterSpec("none")
    elif isinstance(value, DrafterSpec):
        spec = value
    else:
        spec = _from_text(value.strip()) if isinstance(value, str) else _from_mapping(value)
    spec.checked()
    return spec


def _from_text(text: str) -> DrafterSpec:
    if text.startswith("{"):
        return _from_json(text)
    levels = text.removeprefix("cascade:")
    # A '+' joins drafters if a drafter's name follows; otherwise it is part of a value, such as a path.
    names = "|".join(map(re.escape, drafter_names()))
    parts = re.split(rf"\+(?=\s*(?:{names})\s*(?:[:+]|$))", levels)
    if _ends_in_drafters(parts[0]):
        parts = [text]  # what follows belongs to its list
    elif levels != text:
        return DrafterSpec("cascade", {"levels": tuple(_from_text(part.strip()) for part in parts)})
    if len(parts) > 1:
        return DrafterSpec("merge", {"drafters": tuple(_from_text(part.strip()) for part in parts)})
    method, _, rest = text.partition(":")
    if "+" in method:  # one of the names is not a drafter's: name that one
        for name in method.split("+"):
            drafter_class(name.strip())
    options: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        name, equals, setting = part.partition("=")
        if not equals or not name:
            raise OptionError(f"{part!r} is not an option of a drafter", hint="write name=value, as in ngram:max_n=5")
        if name in options:
            raise OptionError(f"option {name!r} is given twice in {text!r}")
        options[name] = setting
    for name in _lists_of_drafters(method.strip()) & options.keys() if options else ():
        options[name] = tuple(_from_text(part.strip()) for part in str(options[name]).split("+"))
    return DrafterSpec(method.strip(), options)


def _ends_in_drafters(text: str) -> bool:
    """Whether the last option of a drafter's text is a list of drafters, as in `auto:drafters=suffix`."""
    method, _, rest = text.partition(":")
    option = rest.rpartition(",")[2].partition("=")[0]
    return bool(option) and option in _lists_of_drafters(method.strip())


def _lists_of_drafters(method: str) -> set[str]:
    """The options of a drafter that are lists of drafters."""
    hints = typing.get_type_hints(drafter_class(method).options_type)
    return {name for name, hint in hints.items() if hint == tuple[DrafterSpec, ...]}


def _from_json(text: str) -> DrafterSpec:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"the drafter's JSON cannot be read: {error}") from None
    return _from_mapping(value)


# vLLM's spelling -> ours. A key in neither table is refused.
_VLLM_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "ngram": {
        "num_speculative_tokens": ("depth", "nodes"),
        "prompt_lookup_max": ("max_n",),
        "prompt_lookup_min": ("min_n",),
    },
    "suffix": {
        "num_speculative_tokens": ("nodes",),
        "suffix_decoding_max_tree_depth": ("depth",),
        "suffix_decoding_min_token_prob": ("min_confidence",),
    },
    "draft_model": {"num_speculative_tokens": ("depth", "nodes")},
    "eagle3": {"num_speculative_tokens": ("depth",), "model": ("checkpoint",)},
    "medusa": {"num_speculative_tokens": ("depth",), "model": ("checkpoint",)},
    "mtp": {"num_speculative_tokens": ("depth",), "model": ("checkpoint",)},
}


def _from_mapping(value: Mapping[str, object]) -> DrafterSpec:
    if not isinstance(value, Mapping):
        raise OptionError(f"a drafter is a name or a mapping with `method`, not {type(value).__name__}")
    options = dict(value)
    method = options.pop("method", None)
    if method is None:
        if "model" not in options:
            raise OptionError("a drafter's mapping needs `method`", hint=f"valid: {', '.join(drafter_names())}")
        method = "draft_model"  # as vLLM reads it
    translated: dict[str, object] = {}
    spellings = _VLLM_KEYS.get(str(method), {})
    for name, setting in options.items():
        for ours in spellings.get(name, (name,)):
            translated[ours] = setting
    if "prompt_lookup_max" in options and "min_n" not in translated:
        translated["min_n"] = translated["max_n"]  # as in vLLM, where a lone maximum sets the minimum too
    return DrafterSpec(str(method), translated)


def make_options(method: str, kind: type[Options], given: Mapping[str, object]) -> Options:
    """Options of a method (or settings of a head) from names and values, which may be strings as on a command line."""
    hints = typing.get_type_hints(kind)
    valid = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in valid:
            raise unknown_choice(f"option of drafter {method!r}:", name, valid)
        settings[name] = _convert(method, name, value, hints[name])
    return kind(**settings)


def _convert(method: str, name: str, value: object, hint: Any) -> object:
    if hint == tuple[DrafterSpec, ...]:
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
            raise OptionError(f"drafter {method!r}: {name}={value!r} is not a list of drafters")
        return tuple(map(parse_speculate, value))
    if hint == tuple[int, ...]:
        return _numbers(method, name, value)
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in accepted:
        if kind is type(None) and (value is None or value == "none"):
            return None
        if kind is bool and (isinstance(value, bool) or str(value).lower() in ("true", "false", "yes", "no", "1", "0")):
            return value if isinstance(value, bool) else str(value).lower() in ("true", "yes", "1")
        if kind in (int, float) and not isinstance(value, bool):
            try:
                number = kind(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if not (kind is int and isinstance(value, float) and number != value):
                return typing.cast(object, number)
        if kind is str and isinstance(value, str):
            return value
    names = " or ".join(getattr(k, "__name__", str(k)) for k in accepted)
    raise OptionError(f"drafter {method!r}: {name}={value!r} is not {names}")


def _numbers(method: str, name: str, value: object) -> tuple[int, ...]:
    """Integers: a list, or `2/15/27` as on a command line."""
    parts = value.split("/") if isinstance(value, str) else value
    try:
        return tuple(int(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise OptionError(f"drafter {method!r}: {name}={value!r} is no list of numbers", hint="as in 2/15/27") from None
