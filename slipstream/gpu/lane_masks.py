"""Which tokens grammars allow after the nodes of lanes' trees: made by the host, applied on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream.gpu.lanes import Lanes


class LaneMasks:
    """The masks of one round: a short table of rows of bits, and for every node the row that it has."""

    def __init__(self, lanes: Lanes, vocabulary: int) -> None:
        rows, words = lanes.size * (1 + lanes.nodes), -(-vocabulary // 32)
        self._vocabulary = vocabulary
        self._table = torch.full((1 + rows, words), -1, dtype=torch.int32, device=lanes.device)  # line 0 allows all
        self._lines = torch.zeros(rows, dtype=torch.int64, device=lanes.device)
        self._bits = torch.arange(32, dtype=torch.int32, device=lanes.device)
        pinned = lanes.device.startswith("cuda")
        self._table_host = torch.zeros(self._table.shape, dtype=torch.int32, pin_memory=pinned)
        self._lines_host = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._used = 0

    def clear(self) -> None:
        """Begin a new round with nothing masked. The copies of the previous round have ended."""
        self._used = 0
        self._lines_host.zero_()

    def __bool__(self) -> bool:
        return self._used > 0

    def __contains__(self, row: int) -> bool:
        return int(self._lines_host[row]) > 0

    def set(self, row: int, forbidden: npt.NDArray[np.bool_]) -> None:
        """Forbid tokens after a row of the pass, which has no mask yet; they may be fewer than the vocabulary."""
        self._used += 1
        packed = np.packbits(~forbidden, bitorder="little")
        line = self._table_host[self._used].numpy().view(np.uint8)
        line[: len(packed)], line[len(packed) :] = packed, 0
        self._lines_host[row] = self._used

    def send(self) -> None:
        """Queue the copy to the device."""
        part = slice(1, 1 + self._used)
        self._table[part].copy_(self._table_host[part], non_blocking=True)
        self._lines.copy_(self._lines_host, non_blocking=True)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] without what is forbidden."""
        allowed = (self._table[self._lines][..., None] >> self._bits) & 1
        return logits.masked_fill(allowed.flatten(1)[:, : self._vocabulary] == 0, float("-inf"))
