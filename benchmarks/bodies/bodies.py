"""Bodies: big models that compute what a small one computes, to measure large models with real acceptance.

Large weights are not available on every machine, and drafts for random ones are never accepted. A body has the shapes
of a large model, and so its cost, and in float32 the logits of the small model inside it, so that acceptance is the
same.

    llm = LLM(bodies.make("8b"), speculate="suffix")

A body is a checkpoint like any other: weights are made when the loader reads them, one at a time, on the device.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.bodies.placing import SPREAD, Placing
from benchmarks.bodies.shapes import CODES, SHAPES, SIGNALS, BodyShape, layer_order
from slipstream.errors import unknown_choice
from slipstream.models.decoder import Decoder
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.load import choose_device, choose_dtype
from slipstream.models.shapes import expected_shape
from slipstream.text import Tokenizer

_LOUD = 2.0**15  # the largest power of two in every dtype


def make(
    name: str,
    model: str | Path | Checkpoint = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    seed: int = 0,
) -> BodyCheckpoint:
    """The body called `name` (see SHAPES) around a model of plain layers, for `LLM` with the same device and dtype."""
    if name not in SHAPES:
        raise unknown_choice("body", name, list(SHAPES))
    source = open_checkpoint(model) if isinstance(model, str | Path) else model
    device = choose_device(device)
    return BodyCheckpoint(source, name, SHAPES[name], device, choose_dtype(dtype, device), seed)


class BodyCheckpoint:
    """A Checkpoint whose weights are those of a smaller one, placed among zeros and random numbers.

    Extra tokens are twins of real ones: the same embedding, and the same row of the output matrix except for a large
    negative number at the constant signal of the hidden state. So they are always less likely than their twins.
    """

    mtp: tuple[str, ...] = ()

    def __init__(
        self, source: Checkpoint, name: str, shape: BodyShape, device: str, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.source = source
        self.config = shape.around(source.config, source.name)
        self.name = f"{source.name} in a body of {name}"
        self.order = layer_order(source.config.layers, shape.layers)  # which layer of the source each layer is
        self.placing = Placing(source.config, self.config, device, dtype, seed)

    @cached_property
    def source_fingerprint(self) -> str:
        """The small model's fingerprint: what was trained for it can be widened to fit the body."""
        return Decoder(self.source, torch.float32, "cpu").fingerprint

    def tokenizer(self) -> Tokenizer | None:
        """The small model's tokenizer, without the extra tokens."""
        return self.source.tokenizer()

    def weight(self, name: str) -> torch.Tensor:
        """One tensor by canonical name, on the body's device; norms in float32, all others in the body's dtype."""
        tables = {"embed": self._embed, "head": self._head, "norm": self._norm}
        if name in tables:
            return tables[name]()
        _, index, path = name.split(".", 2)
        part = path.rpartition(".")[2]  # the same of every expert
        place, small, big = self.placing, self.source.config, self.config
        if part == "router":
            return self._router(name)
        weight = self._part(self.order[int(index)], part)
        if part in ("attn_norm", "mlp_norm"):
            return place.norm(weight)
        if part == "q":
            return place.queries(name, weight, small, big)
        if part in ("k", "v"):
            return place.keys(name, weight, small, big)
        if part == "o":
            return place.mixed(weight, small, big)
        if part == "down":
            return place.writes(weight, expected_shape(big, name)[1], torch.arange(weight.shape[1]))
        return place.reads(name, weight, expected_shape(big, name)[0], torch.arange(len(weight)))

    def _part(self, layer: int | None, part: str) -> torch.Tensor:
        """A weight of the small model, float32. An idle layer's has no outputs, or no inputs."""
        if layer is not None:
            return self.source.weight(f"layers.{layer}.{part}").float()
        width = self.source.config.hidden_size
        if part in ("attn_norm", "mlp_norm"):
            return torch.ones(width)
        return torch.empty(width, 0) if part in ("o", "down") else torch.empty(0, width)

    @property
    def _twins(self) -> torch.Tensor:
        """The real token of each token or twin, [vocab]."""
        return torch.arange(self.config.vocab_size, device=self.placing.device) % self.source.config.vocab_size

    def _embed(self) -> torch.Tensor:
        place = self.placing
        table = place.padded(self.source.weight("embed"))
        table[:, -SIGNALS:-1] = place.noise("codes", len(table), CODES).sign() * place.signal
        table[:, -1] = place.signal
        return table[self._twins]

    def _head(self) -> torch.Tensor:
        place, tied, real = self.placing, self.source.config.tied_head, self.source.config.vocab_size
        rows = place.noise("head", self.config.vocab_size, place.wide)
        rows[:, : place.narrow] = place.ready(self.source.weight("embed" if tied else "head"))[self._twins]
        rows[:, -SIGNALS:] = 0.0
        rows[real:, -1] = -_LOUD
        return rows

    def _norm(self) -> torch.Tensor:
        weight = self.placing.norm(self.source.weight("norm"))
        weight[-1] = _LOUD
        return weight

    def _router(self, name: str) -> torch.Tensor:
        """Experts by the token's code: another random choice for every token in every layer.

        Hidden states of a real model have much in common. A random router on those would prefer some experts, and a
        pass would read fewer of them than in a model with balanced experts.
        """
        place = self.placing
        rows = place.zeros(self.config.experts, place.wide)
        evened = SPREAD * place.signal * math.sqrt(CODES)
        rows[:, -SIGNALS:-1] = place.noise(name, self.config.experts, CODES) / evened
        return rows
