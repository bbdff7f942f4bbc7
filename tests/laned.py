"""Bursts on a CPU: the same code, called instead of captured, with the attention that this machine has."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream import LLM, attention
from slipstream.attention import Attention, BlockAttention, Segment, Tiles
from slipstream.attention.tiles import COMMITTED, COUNT, OPEN, ROW, SLOT, TABLE
from slipstream.cache import PAGE_SIZE, PageTable
from slipstream.engine.burst import Burst
from slipstream.models.decoder import Decoder


def tile_segments(tiles: Tiles) -> list[Segment]:
    """The tiles as segments, in the order of their rows: tiles of one sequence that go on from each other are one."""
    segments: list[Segment] = []
    facts = sorted((fact for fact in tiles.fields.T.tolist() if fact[COUNT]), key=lambda fact: int(fact[ROW]))
    row = 0
    while facts:
        run = [facts.pop(0)]
        while facts and _goes_on(run[-1], facts[0]):
            run.append(facts.pop(0))
        segments += [_idle()] * (run[0][ROW] - row)  # rows that fill a pass up are in no tile
        segments.append(_segment(tiles, run))
        row = run[-1][ROW] + run[-1][COUNT]
    return segments + [_idle()] * (tiles.rows - row)


def _goes_on(fact: list[int], other: list[int]) -> bool:
    alike = all(fact[which] == other[which] for which in (TABLE, COMMITTED, OPEN))
    return alike and all(fact[which] + fact[COUNT] == other[which] for which in (ROW, SLOT))


def _segment(tiles: Tiles, run: list[list[int]]) -> Segment:
    fact, count = run[0], sum(fact[COUNT] for fact in run)
    rows, slots = fact[ROW] + np.arange(count), fact[SLOT] + np.arange(count)
    committed = fact[SLOT] if fact[OPEN] < 0 else fact[COMMITTED]
    columns = np.arange(slots[-1] + 1 - committed)
    visible, positions = columns <= (slots - committed)[:, None], committed + columns
    if fact[OPEN] >= 0:
        visible &= ((tiles.bits.numpy()[rows][:, columns // 32] >> (columns % 32)) & 1).astype(np.bool_)
        places = tiles.open_positions.numpy()[fact[OPEN] : fact[OPEN] + len(columns)].astype(np.int64)
        positions = places if len(places) == len(columns) else positions  # of drafts they are not told
    pages = tiles.tables[fact[TABLE]].tolist()[: slots[-1] // PAGE_SIZE + 1]
    return Segment(PageTable(pages), committed, [0] * count, positions, visible, 0)


def _idle() -> Segment:
    return Segment(PageTable([0]), 0, [0], np.zeros(1, dtype=np.int64), np.ones((1, 1), dtype=np.bool_), 0)


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
    return BlockAttention(tile_segments(tiles), heads, kv_heads, size, device, softcap)


def burst_on_cpu(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, ahead: bool = True) -> LLM:
    """Let an LLM decode in bursts. Without `ahead` none begins before the last one is done with."""
    monkeypatch.setattr(attention, "over_tiles", over_tiles)
    monkeypatch.setattr(Decoder, "captures", True)
    llm.engine.set_runners()
    burst = burst_of(llm)
    if not ahead:
        monkeypatch.setattr(burst, "go_ahead", lambda launched: None)
    return llm


def burst_of(llm: LLM) -> Burst:
    """The bursts of the default drafter, which has some."""
    burst = llm.burst
    assert burst is not None
    return burst
