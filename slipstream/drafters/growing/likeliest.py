"""The likeliest children of nodes by a draft's logits, with the probability that the target chooses them.

When sampling, the noise by which the target will choose is known: it is added, so that draft and target coincide as
often as possible.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from slipstream import gumbel_max, noise
from slipstream.sampling import Sampler

Candidates = list[list[tuple[int, float]]]  # per parent: tokens and the probability that the target chooses them


def likeliest_children(
    sampler: Sampler,
    logits: torch.Tensor,
    paths: Seq[Seq[int]],
    count: int,
    ids: torch.Tensor | None = None,
    *,
    noisy: bool = True,
) -> Candidates:
    """The `count` likeliest tokens after each path, given a row of logits for each.

    `ids`: the columns' tokens, int64 ascending, unless they are the whole vocabulary; the sampler must not adjust
    logits then. `noisy`: the target will choose by noise; a verifier that compares p and q does not.
    """
    count = min(count, logits.shape[1])
    if sampler.simple:
        found = _by_kernel(sampler, logits, paths, count, ids, noisy)
        if found is None and sampler.params.greedy:
            found = _by_library(torch.softmax(logits.float(), -1), count, ids)
        if found is not None and sampler.constraint is None:
            return found
        if found is not None:  # what a grammar refuses is chosen again
            return [
                children
                if all(sampler.stands(path, token) for token, _ in children)
                else _of_row(sampler, row, path, count, ids, noisy)
                for children, row, path in zip(found, logits, paths, strict=True)
            ]
    return [_of_row(sampler, row, path, count, ids, noisy) for row, path in zip(logits, paths, strict=True)]


def _by_kernel(
    sampler: Sampler, logits: torch.Tensor, paths: Seq[Seq[int]], count: int, ids: torch.Tensor | None, noisy: bool
) -> Candidates | None:
    """All rows in one call, if there is a kernel."""
    scores: torch.Tensor | None = logits
    if not sampler.params.greedy:
        keys = [sampler.noise_key(path) for path in paths]
        scores = gumbel_max.perturbed(logits, sampler.params.temperature, keys, ids) if noisy else None
    found = None if scores is None else gumbel_max.likeliest(scores, count)
    if found is None:
        return None
    columns, shares = np.minimum(found[0], logits.shape[1] - 1), found[1]  # there is no column for NaN, or for nothing
    rows = zip((columns if ids is None else ids.numpy()[columns]).tolist(), shares.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != 0.0] for row in rows]


def _by_library(probabilities: torch.Tensor, count: int, ids: torch.Tensor | None) -> Candidates:
    top = torch.topk(probabilities, count)
    tokens = top.indices if ids is None else ids[top.indices]
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), top.values.tolist(), strict=True)]


def _of_row(
    sampler: Sampler, row: torch.Tensor, path: Seq[int], count: int, ids: torch.Tensor | None, noisy: bool
) -> list[tuple[int, float]]:
    """One row by torch's operations, with every parameter that a request may have."""
    if sampler.params.greedy:
        scores = sampler.adjusted(row, path).float()
    else:
        support = sampler.support(row, path)
        if support.ids is not None:
            ids = support.ids if ids is None else ids[support.ids]
        scores = support.logits.double()
        if noisy:
            scores += noise.gumbel(sampler.noise_key(path), len(scores) if ids is None else ids, str(scores.device))
    return _by_library(torch.softmax(scores, dim=0)[None], min(count, len(scores)), ids)[0]
