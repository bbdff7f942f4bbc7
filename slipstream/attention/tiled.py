"""The base of both attentions on a GPU: how they are built, and the constants that their kernels are compiled with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from slipstream.attention.segment import Segment
from slipstream.attention.tiles import Tiles
from slipstream.cache import PAGE_SIZE

_BLOCK_BYTES = 16_384  # bytes of the keys that a program holds at a time
_MOST_COLUMNS, _LEAST_COLUMNS = 64, 16


class TiledAttention:
    """Attention of one pass on a GPU: built once, then called for every layer."""

    def __init__(
        self,
        segments: Sequence[Segment],
        heads: int,
        kv_heads: int,
        size: int,
        device: str,
        softcap: float | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        """`tiles`: the rows as they were laid out before, in place of segments."""
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._size = size
        self._padded = 1 << (size - 1).bit_length()
        self._softcap = softcap
        self._tiles = Tiles.of(list(self._cut(segments)), self._group, device) if tiles is None else tiles
        self._prepare()

    def _cut(self, segments: Sequence[Segment]) -> Iterable[Segment]:
        """The segments in the form that tiles are made from."""
        return segments

    def _prepare(self) -> None:
        """Prepare what the kernel needs once per pass; the tiles exist already."""
        raise NotImplementedError

    def _constants(self, q: torch.Tensor, window: int | None) -> dict[str, int | bool | str]:
        """The constants that both `attend` kernels are compiled with."""
        return {
            "KV_HEADS": self._kv_heads,
            "GROUP": self._group,
            "SIZE": self._size,
            "PADDED": self._padded,
            "PAGE": PAGE_SIZE,
            "BLOCK_N": block_columns(self._padded * q.dtype.itemsize),
            "WINDOWED": window is not None,
            "CAPPED": self._softcap is not None,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }


def block_columns(row_bytes: int) -> int:
    """Columns per `tl.dot`: fewer where the heads are wide. A power of two, so that pages are whole blocks."""
    columns = _MOST_COLUMNS
    while columns > _LEAST_COLUMNS and columns * row_bytes > _BLOCK_BYTES:
        columns //= 2
    return columns
