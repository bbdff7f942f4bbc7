"""Shared by the verbs: how a parameter is described to a command line, and common groups of options.

Nothing here imports torch: `slipstream --help` reads this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from slipstream import checks
from slipstream.errors import OptionError, unknown_choice
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
MAX_TOKENS = 512  # small models may repeat themselves for ever; users can ask for more


@dataclass(frozen=True)
class Described:
    """Metadata of a parameter's `Annotated`: its help, and its names if they differ from the parameter's."""

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    positional: bool = False


TargetName = Annotated[
    str, Described("the target: built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")
]


@dataclass(frozen=True)
class ModelSetup:
    """Model, drafter and memory."""

    model: Annotated[str, Described("built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")] = (
        DEFAULT_MODEL
    )
    speculate: Annotated[
        str | None, Described("drafter: auto (the default), none, ngram:max_n=5,depth=8, or JSON", metavar="DRAFTER")
    ] = None
    speculative_config: Annotated[str | None, Described("the same, in vLLM's format", metavar="JSON")] = None
    profile: Annotated[str | None, Described("what `slipstream tune` recommended", metavar="FILE")] = None
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto"
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto"
    quantize: Annotated[str, Described("weights on a CPU: auto, none, int8 or int4")] = "auto"
    exact: Annotated[bool, Described("on a GPU: batch-invariant kernels, the same bits with any drafter; slower")] = (
        False
    )
    max_model_len: Annotated[
        int | None, Described("longest sequence in tokens, prompt included (default: the model's own)")
    ] = None

    def drafter(self) -> DrafterSpec:
        """The requested drafter; errors are raised before a model is touched."""
        from slipstream.drafters.registry import DEFAULT, parse_speculate
        from slipstream.profiles import read_profile

        if self.profile is not None:
            if self.speculate is not None or self.speculative_config is not None:
                raise OptionError("give either --profile or a drafter, not both")
            return parse_speculate(read_profile(self.profile).speculate)
        if self.speculative_config is None:
            return parse_speculate(DEFAULT if self.speculate is None else self.speculate)
        if self.speculate is not None:
            raise OptionError("give either --speculate or --speculative-config, not both")
        try:
            config = json.loads(self.speculative_config)
        except json.JSONDecodeError as error:
            raise OptionError(f"--speculative-config is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise OptionError("--speculative-config is not a JSON object", hint='as in {"method": "ngram"}')
        return parse_speculate(config)


@dataclass(frozen=True)
class EngineSetup(ModelSetup):
    """The model, its drafter and its engine, for verbs that run the model."""

    verifier: Annotated[
        str, Described("how drafts are verified: match, rejection, block, traversal or typical (lossy)")
    ] = "match"
    threads: Annotated[int | None, Described("CPU threads (default: torch's choice)")] = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and where an answer ends: `SamplingParams` as command-line options."""

    temperature: Annotated[float, Described("0: always the likeliest token")] = 0.0
    top_k: Annotated[int, Described("keep the k likeliest tokens (0: all)")] = 0
    top_p: Annotated[float, Described("keep the likeliest tokens with this total probability")] = 1.0
    min_p: Annotated[float, Described("drop tokens less likely than this share of the likeliest")] = 0.0
    repetition_penalty: Annotated[float, Described("above 1: avoid tokens of prompt and answer")] = 1.0
    presence_penalty: Annotated[float, Described("above 0: avoid tokens of the answer")] = 0.0
    frequency_penalty: Annotated[float, Described("above 0: avoid them in proportion to their count")] = 0.0
    seed: Annotated[int | None, Described("same seed, same answer (default: a fresh one each time)")] = None
    max_tokens: Annotated[
        int | None, Described(f"longest answer in tokens (default: {MAX_TOKENS}; the demo has its own)")
    ] = None
    min_tokens: Annotated[int, Described("shortest answer in tokens")] = 0
    stop: Annotated[tuple[str, ...], Described("end before this text (repeatable)", metavar="TEXT")] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], Described("end at this token (repeatable)", ("--stop-token-id",), "ID")
    ] = ()
    ignore_eos: Annotated[bool, Described("go on after the end-of-answer token")] = False
    n: Annotated[int, Described("number of answers", ("-n",))] = 1
    logprobs: Annotated[int | None, Described("log-probabilities of each token and of so many alternatives")] = None
    logit_bias: Annotated[tuple[str, ...], Described("add to a token's logit (repeatable)", metavar="ID=VALUE")] = ()

    def params(self, max_tokens: int = MAX_TOKENS, seed: int | None = None) -> SamplingParams:
        """The engine's parameters; `max_tokens` and `seed` are the verb's own defaults."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            seed=seed if self.seed is None else self.seed,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )


def require_single_answer(sampling: Sampling | SamplingParams, verb: str) -> None:
    """Refuse options that a verb with one answer at a time cannot honour."""
    if sampling.n != 1:
        raise OptionError(f"{verb} gives one answer at a time: n={sampling.n} is not supported", hint="use run -n")
    if sampling.logprobs is not None:
        raise OptionError(f"{verb} does not show logprobs", hint="use run --json --logprobs")


def adjusted(params: SamplingParams, given: Mapping[str, object]) -> SamplingParams:
    """Parameters with some set by name; OptionError for unknown names and invalid values."""
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise unknown_choice("sampling parameter", name, list(_DEFAULTS))
        checks.require(not isinstance(_DEFAULTS[name], bool) or isinstance(value, bool), name, value, "true or false")
    try:
        return replace(params, **given)  # type: ignore[arg-type]
    except OptionError:
        raise
    except (AttributeError, TypeError, ValueError):
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise OptionError(f"{named} has the wrong type") from None


def _biases(settings: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for setting in settings:
        token, _, value = setting.partition("=")
        try:
            index, bias = int(token), float(value)
        except ValueError:
            raise OptionError(f"--logit-bias {setting!r} is not ID=VALUE", hint="as in --logit-bias 42=-5") from None
        if index in biases:
            raise OptionError(f"--logit-bias names token {index} twice")
        biases[index] = bias
    return biases
