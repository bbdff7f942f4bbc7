"""Log-probabilities of the tokens that rounds emit, computed on the device: `sampling.logprobs` for many rows.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slipstream.gpu.fused import runs_fused
from slipstream.gpu.lanes import Lanes, path_rows
from slipstream.sampling import log_total, token_weights
from slipstream.sequence import Sequence

TOPS = 20  # likeliest tokens per position, at most
_NONE = -1  # in place of a number of tokens: not even the token's own is wanted


class LaneScores:
    """The log-probabilities of the rounds of lanes of one size, in the lines of their results."""

    def __init__(self, lanes: Lanes, lines: int) -> None:
        self._lanes = lanes
        self.wanted = torch.full((lanes.size,), _NONE, dtype=torch.int64, device=lanes.device)
        shape = lines, lanes.size, lanes.depth + 1, 1 + TOPS
        # The token's own first, then the likeliest; beside them the token's rank, and their ids.
        self.values = torch.zeros(shape, dtype=torch.float32, device=lanes.device)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=lanes.device)
        self._places = torch.arange(lanes.depth + 1, device=lanes.device)

    def fill(self, sequences: Mapping[int, Sequence | None]) -> None:
        """Set lanes up for these sequences; None: a free lane."""
        for lane, sequence in sequences.items():
            asked = None if sequence is None else sequence.params.logprobs
            self.wanted[lane] = _NONE if asked is None else asked

    def note(self, logits: torch.Tensor, chosen: torch.Tensor, path: torch.Tensor, line: torch.Tensor) -> None:
        """Write line `line` [1]: of the tokens chosen after the roots and after the nodes of the accepted paths.

        logits [lanes * (1 + nodes), vocabulary], raw; chosen int64 [lanes, 1 + nodes]; path int64 [lanes, depth], 0
        after its end.
        """
        nodes = torch.nn.functional.pad(path, (1, 0))
        tokens = chosen.gather(1, nodes)
        read = (nodes > 0) | (self._places == 0)
        wanted = torch.where(read, self.wanted[:, None], _NONE)
        rows = path_rows(path, self._lanes.nodes)
        values, ids = score_rows(logits, rows.flatten(), tokens.flatten(), wanted.flatten())
        for lines, found in ((self.values, values), (self.ids, ids)):
            lines.index_copy_(0, line, found.view_as(lines[:1]))


def score_rows(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `rows` [n] of logits, the log-probability of a token and those of the `wanted` [n] likeliest.

    Returns float32 [n, 1 + TOPS] and int64 [n, 1 + TOPS]: the token's own with its rank, then the likeliest with their
    ids, as many as wanted; the rest is undefined, and all of it where less than none is wanted.
    """
    if runs_fused(logits):
        from slipstream.gpu.kernels.score_kernels import score_rows as kernel

        return kernel(logits, rows, tokens, wanted, TOPS)
    scores = logits[rows].float()
    order = scores.sort(dim=1, descending=True, stable=True)
    best = order.values[:, :1]
    whole = log_total(token_weights(scores, best).sum(1, keepdim=True), best)
    rank = 1 + (order.indices == tokens[:, None]).long().argmax(1, keepdim=True)
    count = min(TOPS, scores.shape[1])
    values = torch.cat([scores.gather(1, tokens[:, None]), order.values[:, :count]], 1)
    ids = torch.cat([rank, order.indices[:, :count]], 1)
    room = (0, TOPS - count)
    pad = torch.nn.functional.pad
    return pad((values.double() - whole).float(), room), pad(ids, room)
