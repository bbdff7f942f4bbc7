"""The shapes that the kernels of a layer are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

DIGIT_BASE = 128  # base of the digits of 8-bit GEMMs, and offset of a code
DIGIT_LANES = 16  # lanes of the vectors of the VNNI instruction
SQUARE_ROWS = 8  # rows whose digits the matrix unit processes at once: buffers must have room for as many
GROUP = 32  # inputs of a 4-bit matrix that share a scale and an offset
_QUERIES = 12  # queries of a tile; at least those of a row for one KV head


@dataclass(frozen=True)
class Shape:
    """Heads and vectors of a model's layers."""

    heads: int
    kv_heads: int
    size: int  # dimensions of a head
    page: int  # rows of a page of K and V
    lanes: int  # lanes of a vector within a head
    row_lanes: int  # lanes of a vector within a row

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, at most."""
        return max(1, _QUERIES // self.group)
