"""Bursts on a CPU: the same code, called instead of captured, with the attention that this machine has."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream import LLM, attention
from slipstream.attention import Attention, BlockAttention, Segment, Tiles
from slipstream.attention.tiles import COMMITTED, COUNT, OPEN, ROW, SLOT, TABLE
from slipstream.cache import PAGE_SIZE, PageTable
from slipstream.engine.burst import make_burst
from slipstream.models.decoder import Decoder


def row_segments(tiles: Tiles) -> list[Segment]:
    """Every row of the tiles as a segment of its own, in the order of the rows."""
    found: dict[int, Segment] = {}
    bits, tables = tiles.bits.numpy(), tiles.tables.tolist()
    for fact in tiles.fields.T.tolist():
        for line in range(fact[COUNT]):
            row, slot = fact[ROW] + line, fact[SLOT] + line
            committed = slot if fact[OPEN] < 0 else fact[COMMITTED]
            columns = np.arange(slot + 1 - committed)
            visible, positions = np.ones((1, len(columns)), dtype=np.bool_), committed + columns
            if fact[OPEN] >= 0:
                visible = ((bits[row, columns // 32] >> (columns % 32)) & 1).astype(np.bool_)[None]
                places = tiles.open_positions.numpy()[fact[OPEN] : fact[OPEN] + len(columns)].astype(np.int64)
                positions = places if len(places) == len(columns) else positions  # of drafts they are not told
            pages = tables[fact[TABLE]][: slot // PAGE_SIZE + 1]
            found[row] = Segment(PageTable(pages), committed, [0], positions, visible, 0)
    # Rows that fill a pass up are in no tile.
    idle = Segment(PageTable([0]), 0, [0], np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=np.bool_), 0)
    return [found.get(row, idle) for row in range(tiles.rows)]


def over_tiles(
    tiles: Tiles,
    heads: int,
    kv_heads: int,
    size: int,
    device: str,
    softcap: float | None = None,
    *,
    exact: bool = False,
) -> Attention:
    """`attention.over_tiles` for a machine without a GPU."""
    return BlockAttention(row_segments(tiles), heads, kv_heads, size, device, softcap)


def burst_on_cpu(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, ahead: bool = True) -> LLM:
    """Let an LLM decode in bursts. Without `ahead` none begins before the last one is done with."""
    monkeypatch.setattr(attention, "over_tiles", over_tiles)
    monkeypatch.setattr(Decoder, "captures", True)
    engine = llm.engine
    engine.burst = make_burst(llm.model, llm.cache, engine.drafter, engine.verifier)
    assert engine.burst is not None
    if not ahead:
        monkeypatch.setattr(engine.burst, "go_ahead", lambda launched: None)
    return llm
