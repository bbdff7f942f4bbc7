"""The frozen target as a teacher: whole texts in one dense pass, for hidden states and probabilities.

The layers are the decoder's own (`Decoder.run_`); only attention differs, because nothing is cached: each row attends
to the rows before it in its own text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from slipstream.cache import LayerStore
from slipstream.drafters.heads.head import Lesson, Rows
from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.model import Model

_SLICE = 1 << 26  # elements of [rows, vocabulary] logits that exist at one time


class Teacher:
    """The frozen target of a head in training."""

    def __init__(self, model: Model) -> None:
        if not isinstance(model, Decoder):
            raise OptionError(
                f"{model.name} runs through transformers, which exposes no hidden states to learn from",
                hint="train for a model of a family that runs natively: docs/models.md",
            )
        self._model = model

    def lesson(
        self,
        tokens: torch.Tensor,
        prompt_lens: torch.Tensor,
        vocab: torch.Tensor,
        taps: Sequence[int],
        lengths: torch.Tensor | None = None,
        rows: Rows | None = None,
    ) -> Lesson:
        """Read texts [batch, length], of which the first `prompt_lens` [batch] tokens are not the target's own.

        `vocab`: the draft tokens. `lengths` [batch]: tokens of each text, followed by padding (default: no padding).
        `rows`: the rows to learn from, if known; otherwise a GPU is synchronised. All other rows have probabilities of
        0 and no best token.
        """
        learn = own_words(tokens, prompt_lens, lengths)
        rows = rows or Rows.of(learn.flatten().nonzero()[:, 0])
        hidden, tapped = self._read(tokens, taps)
        probabilities, best = self._judged(hidden, rows.places, vocab)

        def reread(other: torch.Tensor) -> torch.Tensor:
            every = torch.arange(other.numel(), device=other.device)
            return self._judged(self._read(other, ())[0], every, vocab)[0]

        return Lesson(tokens, learn, tapped, probabilities, best, reread, rows)

    def _read(self, tokens: torch.Tensor, taps: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The residual stream [batch, length, width] after the last layer, and after those requested."""
        model = self._model
        rows = _WholeTexts(tokens, model.config)
        stores = [_NOWHERE] * model.config.layers
        # A head may request another reading in the middle of a training step, inside autocast.
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            x = model.embed(tokens.flatten())
            tapped = model.run_(x, rows, rows.attend, stores, range(model.config.layers), taps)
        return x.view(*tokens.shape, -1), {layer: hidden.view(*tokens.shape, -1) for layer, hidden in tapped.items()}

    def _judged(
        self, hidden: torch.Tensor, wanted: torch.Tensor, vocab: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [batch, length, draft tokens] of the rows at `wanted`, and each row's first choice."""
        model = self._model
        shape = hidden.shape[:2]
        probabilities = hidden.new_zeros(shape.numel(), len(vocab))
        best = torch.full((shape.numel(),), -1, device=hidden.device)
        place = torch.full((model.config.vocab_size,), -1, device=hidden.device)
        place[vocab] = torch.arange(len(vocab), device=hidden.device)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            flat = hidden.flatten(0, 1)
            for rows in wanted.split(max(1, _SLICE // model.config.vocab_size)):
                logits = model.head(flat[rows])
                # Over the whole vocabulary, not just the draft tokens.
                logarithms = functional.log_softmax(logits, -1, dtype=torch.float32)
                probabilities[rows] = logarithms[:, vocab].exp().to(probabilities.dtype)
                best[rows] = place[logits.argmax(-1)]
        return probabilities.view(*shape, -1), best.view(shape)


def own_words(tokens: torch.Tensor, prompt_lens: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Where the next token exists and is part of the target's answer, [batch, length]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None, :]
    ends = torch.full_like(prompt_lens, tokens.shape[1]) if lengths is None else lengths
    return (positions >= prompt_lens[:, None] - 1) & (positions < ends[:, None] - 1)


class _WholeTexts:
    """The rows of texts [batch, length], one text after the other, in the form that the decoder expects."""

    def __init__(self, tokens: torch.Tensor, config: ModelConfig) -> None:
        self._batch, self._length = tokens.shape
        self._config = config
        self._line = torch.arange(self._length, device=tokens.device)
        self.positions = self._line.repeat(self._batch)
        self.highest = self._length - 1
        self.places: tuple[torch.Tensor, torch.Tensor] | None = None  # nothing is cached

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """K and V are read in place."""

    def attend(self, qkv: torch.Tensor, layer: LayerStore, window: int | None) -> torch.Tensor:
        """[rows, width of qkv] -> [rows, heads * size]; q is scaled, and divided by the soft cap if there is one."""
        config = self._config
        parts = qkv.view(self._batch, self._length, -1, config.head_dim).transpose(1, 2)
        q, k, v = parts.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        if config.attention_softcap is not None:
            mixed = self._capped(q, k, v, config.attention_softcap, window)
        elif window is None or window >= self._length:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        else:
            seen = self._seen(window)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(self._batch * self._length, -1)

    def _seen(self, window: int | None) -> torch.Tensor:
        """The attention mask, [length, length]."""
        back = self._line[:, None] - self._line[None, :]
        return (back >= 0) & (back < (self._length if window is None else window))

    def _capped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, window: int | None
    ) -> torch.Tensor:
        group = self._config.heads // self._config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.tanh(q.float() @ k.float().transpose(-1, -2)) * cap
        weights = torch.softmax(scores.masked_fill_(~self._seen(window), float("-inf")), -1)
        return weights.to(v.dtype) @ v


_NOWHERE = LayerStore(torch.empty(2, 0))  # whole texts cache nothing
