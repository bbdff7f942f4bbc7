"""`layer_skip`: the target without some of its layers is the draft model (Draft & Verify, SWIFT).

`slipstream tune` finds the layers that can be skipped and saves them under the target's fingerprint; findings for the
built-in models come with the package. For any other target every second layer of the middle is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.drafters import tuned
from slipstream.drafters.growing.self_draft import SelfDrafter
from slipstream.drafters.growing.tree_growth import GrowthOptions
from slipstream.errors import CorruptFile, OptionError

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


_MOST = 10_000  # layers; a mistyped range must not fill the memory


@dataclass(frozen=True)
class LayerSkipOptions(GrowthOptions):
    """`skip`: the layers to skip, as in `skip=4/7-9/12`; `auto`: those that `slipstream tune` found for this target.
    `nodes` and `draw` are those of `draft_model`.
    """

    skip: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip != "auto":
            parse_layers(self.skip)


class LayerSkipDrafter(SelfDrafter[LayerSkipOptions]):
    """Draft with a subset of the layers."""

    name = "layer_skip"
    summary = "the target without some of its layers"
    helps = "large targets, whose middle layers can be skipped; small ones need all of theirs"
    cost = "one pass over the remaining layers and the LM head per level; no extra memory"
    needs = "`slipstream tune` once per target, to find the layers that can be skipped"
    options_type = LayerSkipOptions

    def __init__(self, options: LayerSkipOptions, target: TargetView) -> None:
        super().__init__(options, target)
        count = target.config.layers
        skipped = self._skipped(count)
        if not skipped or min(skipped) < 0 or max(skipped) >= count or len(skipped) == count:
            raise OptionError(
                f"layer_skip: skip={format_layers(skipped)!r}",
                hint=f"the target has layers 0 to {count - 1}: skip some of them and keep some",
            )
        self._layers = tuple(layer for layer in range(count) if layer not in skipped)

    def _skipped(self, count: int) -> set[int]:
        if self.options.skip != "auto":
            return parse_layers(self.options.skip)
        found = tuned.find(self.name, self.target.fingerprint)
        if found is not None:
            if not isinstance(found.get("skip"), str):
                raise CorruptFile("the finding for this target names no layers", hint="tune again, or give skip=")
            return parse_layers(found["skip"])
        return set(range(count // 4, count - count // 4, 2)) or {count - 1}

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers


def parse_layers(text: str) -> set[int]:
    """`"4/7-9"` -> {4, 7, 8, 9}."""
    layers: set[int] = set()
    for part in text.split("/"):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise OptionError(f"skip={text!r} is not a list of layers", hint="as in skip=4/7-9/12")
        if int(last or first) > _MOST:
            raise OptionError(f"skip={text!r} names a layer that no model has")
        layers.update(range(int(first), int(last or first) + 1))
    return layers


def format_layers(layers: set[int]) -> str:
    """{4, 7, 8, 9} -> `"4/7-9"`."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "/".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
