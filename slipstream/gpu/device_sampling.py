"""The target's choices for many rows of logits at once, on the device that has the logits.

`Sampler.choose` computes one node on request, which is right on a host: a verifier visits few nodes of a tree. On a GPU
every request is a synchronisation. So the rows of all samplers that need nothing but the logits and a few numbers
(temperature, min-p, top-k, top-p) are computed together, with the same noise, bit for bit. Penalties, masks and the
rest change the logits before: `adjustments.py`.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from slipstream import noise
from slipstream.gpu.fused import runs_fused
from slipstream.sampling import Sampler, scale_logits, token_weights
from slipstream.tree import TokenTree
from slipstream.types import GREEDY_TEMPERATURE, SamplingParams

_SLICE = 64  # rows whose noise is made at a time: it is float64 over the whole vocabulary
_ALL_TOKENS = 1 << 31  # a top-k that cuts nothing


class RowCuts(NamedTuple):
    """min-p, top-k and top-p of each row. Neutral values leave all tokens."""

    min_ps: torch.Tensor  # float32 [rows]: logarithms; -inf leaves all
    top_ks: torch.Tensor  # int64 [rows]; the size of the vocabulary or more leaves all
    top_ps: torch.Tensor  # float64 [rows]; 1 leaves all

    @staticmethod
    def neutral(rows: int, device: str) -> RowCuts:
        """Nothing is cut."""
        return RowCuts.of([None] * rows).to(device)

    @staticmethod
    def of(each: Iterable[SamplingParams | None]) -> RowCuts:
        """The cuts of each row's parameters, on the host; None: nothing is cut."""
        cuts = [(0.0, 0, 1.0) if p is None else (p.min_p, p.top_k, p.top_p) for p in each]
        return RowCuts(
            torch.log(torch.tensor([min_p for min_p, _, _ in cuts], dtype=torch.float32)),
            torch.tensor([top_k or _ALL_TOKENS for _, top_k, _ in cuts], dtype=torch.int64),
            torch.tensor([top_p for _, _, top_p in cuts], dtype=torch.float64),
        )

    def to(self, device: str | torch.device) -> RowCuts:
        """These cuts on another device."""
        return RowCuts(*(part.to(device) for part in self))


def match_keys(stems: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The keys of the noise that decides at these positions, int64 [2, rows].

    stems int64 [2, rows], of the samplers (`noise.halves`); positions int64 [rows], absolute, of the chosen tokens.
    """
    if runs_fused(stems):
        from slipstream.gpu.kernels.sampling_kernels import match_keys as fused

        return fused(stems, positions)
    return noise.fold(noise.fold(stems, positions), noise.MATCH)


def choose_rows(
    logits: torch.Tensor,
    stems: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    sampled: bool,
    cuts: RowCuts | None = None,
) -> torch.Tensor:
    """The choice after each row, int64 [rows]: what `Sampler.choose` gives for logits that are already adjusted.

    logits [rows, vocab]; stems and positions are those of `match_keys`; temperatures float32 [rows]. `sampled`:
    whether any row is not greedy; without `cuts` no row has any. There is no host synchronisation, so that this can be
    captured.
    """
    fused = runs_fused(logits)
    if not (sampled or fused):
        return logits.argmax(dim=-1)
    keys = match_keys(stems, positions) if sampled else stems  # greedy rows need none
    if not fused:
        return _draw(logits, keys, temperatures, cuts)
    if sampled and cuts is not None:
        from slipstream.gpu.kernels.cut_kernels import draw_cut

        return draw_cut(logits, keys, temperatures, *cuts)
    from slipstream.gpu.kernels.sampling_kernels import draw  # greedy rows too: a library's argmax is slow for few rows

    return draw(logits, keys, temperatures)


def _draw(
    logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, cuts: RowCuts | None = None
) -> torch.Tensor:
    """The choice after each row; keys int64 [2, rows], of this position."""
    greedy = temperatures < GREEDY_TEMPERATURE
    divisors = torch.where(greedy, 1.0, temperatures)[:, None]
    drawn = []
    for first in range(0, len(logits), _SLICE):
        part = slice(first, first + _SLICE)
        scaled = scale_logits(logits[part], divisors[part])
        perturbed = noise.gumbel_rows(keys[:, part], logits.shape[1]).add_(scaled)
        if cuts is not None:
            perturbed.masked_fill_(~_left(scaled, RowCuts(*(values[part] for values in cuts))), -math.inf)
        drawn.append(perturbed.argmax(dim=-1))
    return torch.where(greedy, logits.argmax(dim=-1), torch.cat(drawn))


def _left(scaled: torch.Tensor, cuts: RowCuts) -> torch.Tensor:
    """Whether min-p, top-k and top-p leave a token, bool [rows, vocab]: `Sampler.cut` for many rows, by sorting."""
    min_ps, top_ks, top_ps = (values[:, None] for values in cuts)
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    best = values[:, :1]
    left = (values >= best + min_ps) & (torch.arange(values.shape[1], device=values.device) < top_ks)
    weights = torch.where(left, token_weights(values, best), 0)
    sums = weights.cumsum(1)
    needed = torch.ceil(top_ps * sums[:, -1:].double()).long()
    left &= (sums - weights < needed) | (top_ps >= 1.0)
    return torch.zeros_like(left).scatter_(1, ids, left)


def _together(sampler: Sampler) -> bool:
    """Whether its choices need only the logits and a few numbers. Cuts count what a grammar leaves, which varies."""
    return not sampler.params.adjusts and (sampler.constraint is None or not sampler.params.cuts)


def choose_trees(
    samplers: Sequence[Sampler], trees: Sequence[TokenTree], logits: torch.Tensor
) -> list[list[int] | None]:
    """For each tree the choices after all its nodes, before any grammar; None if they depend on more than the row.

    logits [nodes of all trees, vocab], tree after tree.
    """
    rows: list[int] = []
    stems: list[int] = []
    positions: list[int] = []
    temperatures: list[float] = []
    params: list[SamplingParams] = []
    start = 0
    for sampler, tree in zip(samplers, trees, strict=True):
        nodes = len(tree)
        if _together(sampler):
            rows.extend(range(start, start + nodes))
            stems.extend([sampler.stem] * nodes)
            positions.extend(sampler.position + depth for depth in tree.depths)
            temperatures.extend([sampler.params.temperature] * nodes)
            params.extend([sampler.params] * nodes)
        start += nodes
    device = logits.device
    chosen = iter(())
    if rows:
        cuts = RowCuts.of(params).to(device) if any(p.cuts for p in params) else None
        chosen = iter(
            choose_rows(
                logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=device)],
                noise.halves(stems).to(device),
                torch.tensor(positions, device=device),
                torch.tensor(temperatures, dtype=torch.float32, device=device),
                sampled=max(temperatures) >= GREEDY_TEMPERATURE,
                cuts=cuts,
            ).tolist()
        )
    return [
        [next(chosen) for _ in range(len(tree))] if _together(sampler) else None
        for sampler, tree in zip(samplers, trees, strict=True)
    ]
