"""The target's choices for many rows of logits at once, on the device that has the logits.

`Sampler.choose` computes one node on request, which is right on a host: a verifier visits few nodes of a tree. On a GPU
every request is a synchronisation. So the rows of all *simple* samplers (greedy, or a temperature and nothing else) are
computed together, with the same noise, bit for bit, and copied to the host once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream import noise
from slipstream.gpu.fused import runs_fused
from slipstream.sampling import Sampler, scale_logits
from slipstream.tree import TokenTree
from slipstream.types import GREEDY_TEMPERATURE

_SLICE = 64  # rows whose noise is made at a time: it is float64 over the whole vocabulary


def choose_rows(
    logits: torch.Tensor, stems: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor, *, sampled: bool
) -> torch.Tensor:
    """The choice after each row, int64 [rows]: what `Sampler.choose` gives for a simple sampler.

    logits [rows, vocab]; stems int64 [2, rows], of the samplers (`noise.halves`); positions int64 [rows], absolute, of
    the chosen tokens; temperatures float32 [rows]. `sampled`: whether any row is not greedy. There is no host
    synchronisation, so that this can be captured.
    """
    fused = runs_fused(logits)
    if not (sampled or fused):
        return logits.argmax(dim=-1)
    keys = noise.fold(noise.fold(stems, positions), noise.MATCH) if sampled else stems  # greedy rows need none
    if fused:  # greedy rows too: a library's argmax uses one program per row, which is slow
        from slipstream.gpu.sampling_kernels import draw

        return draw(logits, keys, temperatures)
    return _draw(logits, keys, temperatures)


def _draw(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The choice after each row; keys int64 [2, rows], of this position."""
    greedy = temperatures < GREEDY_TEMPERATURE
    divisors = torch.where(greedy, 1.0, temperatures)[:, None]
    drawn = [
        noise.gumbel_rows(keys[:, first : first + _SLICE], logits.shape[1])
        .add_(scale_logits(logits[first : first + _SLICE], divisors[first : first + _SLICE]))
        .argmax(dim=-1)
        for first in range(0, len(logits), _SLICE)
    ]
    return torch.where(greedy, logits.argmax(dim=-1), torch.cat(drawn))


def choose_trees(
    samplers: Sequence[Sampler], trees: Sequence[TokenTree], logits: torch.Tensor
) -> list[list[int] | None]:
    """For each tree the choices after all its nodes, or None if the sampler is not simple.

    logits [nodes of all trees, vocab], tree after tree.
    """
    rows: list[int] = []
    stems: list[int] = []
    positions: list[int] = []
    temperatures: list[float] = []
    start = 0
    for sampler, tree in zip(samplers, trees, strict=True):
        nodes = len(tree)
        if sampler.simple:
            rows.extend(range(start, start + nodes))
            stems.extend([sampler.stem] * nodes)
            positions.extend(sampler.position + depth for depth in tree.depths)
            temperatures.extend([sampler.params.temperature] * nodes)
        start += nodes
    device = logits.device
    chosen = iter(())
    if rows:
        chosen = iter(
            choose_rows(
                logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=device)],
                noise.halves(stems).to(device),
                torch.tensor(positions, device=device),
                torch.tensor(temperatures, dtype=torch.float32, device=device),
                sampled=max(temperatures) >= GREEDY_TEMPERATURE,
            ).tolist()
        )
    return [
        [next(chosen) for _ in range(len(tree))] if sampler.simple else None
        for sampler, tree in zip(samplers, trees, strict=True)
    ]
