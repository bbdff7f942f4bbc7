"""Drafters trained for a small model, widened to fit a body of it: the same drafts at a large model's cost.

A head is widened weight by weight, like its target. Layers of heads (`HeadLayer`) are recognised by their class, the
other weights by their names; an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.placing import Placing
from slipstream.drafters.heads.head import Frame, Head
from slipstream.drafters.heads.head_checkpoint import Made, Trained
from slipstream.drafters.heads.head_drafter import HeadDrafter, unfilled_head
from slipstream.drafters.heads.head_layer import HeadLayer
from slipstream.drafters.registry import drafter_class
from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig


def widened(drafter: Trained, body: BodyCheckpoint, fingerprint: str) -> Trained:
    """The drafter for a body, with the drafts that it makes for the body's source. `fingerprint`: the loaded body's.

    Weights are on the body's device and in its dtype. MLPs grow with the target's, attention takes the target's shape;
    absolute numbers in the settings (a reduced vocabulary, ranks, shapes of foreign heads) stay.
    """
    kind = drafter_class(drafter.method)
    if not issubclass(kind, HeadDrafter):
        raise OptionError(f"{drafter.method} drafts without a head, so there is nothing to widen")
    if drafter.target.fingerprint != body.source_fingerprint:
        raise OptionError(
            f"the {drafter.method} drafter was trained for {drafter.target.name} ({drafter.target.fingerprint}), and "
            f"this is {body.name} ({body.source_fingerprint})",
        )
    small = _outline(kind, drafter.settings, body.source.config, drafter.vocab)
    settings = _settings(drafter.settings, small, body)
    big = _outline(kind, settings, body.config, drafter.vocab)
    _require_same_states(drafter.method, small, big, body)
    weights = _Widening(small, big, body.placing).all(drafter)
    wanted = {name: weight.shape for name, weight in big.state_dict().items()}
    if wrong := sorted(name for name in wanted.keys() | weights.keys() if _shape(weights, name) != wanted.get(name)):
        raise OptionError(f"the {drafter.method} drafter cannot be widened: {wrong[0]} does not fit the body")
    config = body.config
    return replace(
        drafter,
        settings=settings,
        target=Made(fingerprint, body.name, config.vocab_size, config.hidden_size, config.layers),
        weights=weights,
        provenance={**drafter.provenance, "widened for": body.name},
    )


def _shape(weights: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def _outline(
    kind: type[HeadDrafter[Any]], settings: dict[str, Any], config: ModelConfig, vocab: torch.Tensor
) -> Head:
    """A head without weights: its shapes and what it reads."""

    def unknown(_: object) -> NoReturn:
        raise AssertionError("an outline is never run")

    rows, norm = torch.zeros(()).expand(len(vocab), config.hidden_size), torch.ones(config.hidden_size)
    return unfilled_head(kind, settings, Frame(config, vocab, rows, norm, unknown, unknown))


def _settings(settings: dict[str, Any], small: Head, body: BodyCheckpoint) -> dict[str, Any]:
    """The settings of the head for the body: layers by their new numbers, sizes in proportion."""
    before, after = body.source.config, body.config
    places = [body.order.index(tap) for tap in small.taps]
    changed = dict(settings)
    if "taps" in settings:
        changed["taps"] = tuple(places)
    if "exit" in settings:
        changed["exit"] = places[-1] + 1
    if settings.get("mlp"):
        changed["mlp"] = settings["mlp"] * after.intermediate_size // before.intermediate_size
    if settings.get("norm_eps"):
        changed["norm_eps"] = settings["norm_eps"] * before.hidden_size / after.hidden_size
    return changed


def _require_same_states(method: str, small: Head, big: Head, body: BodyCheckpoint) -> None:
    """Refuse a head that, by its own rule, would read other hidden states of the body than it was trained on."""
    read = [max(layer for layer in body.order[: tap + 1] if layer is not None) for tap in big.taps]
    if read != list(small.taps):
        raise OptionError(
            f"{method} would read layers {read} of {body.source.name} in a body of {body.config.layers} layers, and it "
            f"was trained on {list(small.taps)}"
        )


class _Widening:
    """From the weights of a small head to those of a big one."""

    def __init__(self, small: Head, big: Head, place: Placing) -> None:
        self._place = place
        self._layers = {
            name: (layer, big.get_submodule(name))
            for name, layer in small.named_modules()
            if isinstance(layer, HeadLayer)
        }
        self._ways: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
            "fuse": self._joined,
            "join": self._joined,
            "enter": self._entered,
            "leave": self._left,
            "link": self._linked,
            "gate": self._read,
            "pull": lambda _, weight: place.ready(weight),
            **dict.fromkeys(("bias", "blank", "masks", "rows"), lambda _, weight: place.padded(weight)),
        }

    def all(self, drafter: Trained) -> dict[str, torch.Tensor]:
        """All weights."""
        weights = {}
        for name, weight in drafter.weights.items():
            owner, _, word = name.removesuffix(".weight").rpartition(".")
            if word.isdigit():  # one of a list
                word = owner.rpartition(".")[2]
            if word.endswith(("norm", "norms")):
                weights[name] = self._place.norm(weight)
            elif owner in self._layers:
                weights[name] = self._of_layer(name, weight, *self._layers[owner])
            elif word in self._ways:
                weights[name] = self._ways[word](name, weight)
            else:
                raise OptionError(f"the {drafter.method} drafter cannot be widened: {name} is unknown")
        return weights

    def _inside(self) -> torch.Tensor:
        return torch.arange(self._place.narrow)

    def _joined(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Hidden states side by side -> a hidden state, with zeros in the extra dimensions."""
        place = self._place
        return place.reads(name, weight, place.wide, self._inside(), torch.arange(place.narrow, place.wide))

    def _entered(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A hidden state -> several, one below the other, of which only `_left` reads.

        Other inputs beside the hidden state have passed a norm without a weight that could compensate the width.
        """
        place = self._place
        hidden, *beside = weight.split(place.narrow, 1)
        parts = torch.cat([hidden, *(part * place.root for part in beside)], 1).split(place.narrow)
        made = [place.reads(f"{name} {i}", part, place.wide, self._inside()) for i, part in enumerate(parts)]
        return torch.cat(made)

    def _left(self, _: str, weight: torch.Tensor) -> torch.Tensor:
        """The matrices, one below the other, that make hidden states of those that `_entered` gave."""
        place = self._place
        return torch.cat([place.writes(part, place.wide, self._inside()) for part in weight.split(place.narrow)])

    def _read(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A hidden state -> anything else."""
        return self._place.reads(name, weight, len(weight), torch.arange(len(weight)))

    def _linked(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A hidden state -> anything else, after a norm without a weight that could compensate the width."""
        return self._read(name, weight * self._place.root)

    def _of_layer(self, name: str, weight: torch.Tensor, narrow: HeadLayer, wide: nn.Module) -> torch.Tensor:
        """A matrix of a decoder layer."""
        assert isinstance(wide, HeadLayer)
        place, small, big = self._place, narrow.config, wide.config
        part = name.split(".")[-2]
        middle = wide.down.weight.shape[1]
        if part == "out":
            return place.mixed(weight, small, big, adjacent=True)
        if part == "down":
            return place.writes(weight, middle, torch.arange(weight.shape[1]))
        if part == "gate_up":
            halves = zip(("gate", "up"), weight.chunk(2), strict=True)
            made = [place.reads(f"{name} {half}", rows, middle, torch.arange(len(rows))) for half, rows in halves]
            return torch.cat(made)
        keys = small.kv_heads * small.head_dim
        q, k, v = weight.split([small.heads * small.head_dim, keys, keys])
        return torch.cat(
            [
                place.queries(f"{name} q", q, small, big, adjacent=True),
                place.keys(f"{name} k", k, small, big, adjacent=True),
                place.keys(f"{name} v", v, small, big, adjacent=True),
            ]
        )
