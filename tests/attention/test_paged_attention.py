"""The paged attention kernel against float64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paged_attention import CASES, Case, errors, every_shape
from slipstream.attention import Segment, Tiles, paged_available, tree_segment
from slipstream.attention.paged import splits
from slipstream.attention.tiles import COMMITTED, COUNT, OPEN, ROW, SLOT, STOP, TABLE, query_block
from slipstream.cache import PageTable
from slipstream.gpu.graphs import bucket
from slipstream.tree import TokenTree
from tests.interpreted import DEVICE


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES + (every_shape() if DEVICE == "cuda" else []), ids=str)
def test_the_kernel_agrees_with_float64(case: Case, fresh_memory_is_nan: None) -> None:
    """Within the tolerance; and the check would notice a window that is off by one."""
    for seed in range(3 if DEVICE == "cuda" else 1):
        error, of_a_wrong_window = errors(case, seed, DEVICE)
        assert error <= 1.0
        assert (of_a_wrong_window is None) == (case.window is None)
        assert of_a_wrong_window is None or of_a_wrong_window > 1.0


def segments() -> list[Segment]:
    tree = TokenTree.chain(1, range(2, 72))
    for node in range(30):
        tree.add(node, 500 + node)
    return [
        tree_segment(PageTable([7, 3, 9]), 300, [1], TokenTree(1)),
        tree_segment(PageTable([5, 1]), 128, list(range(40)), None),
        tree_segment(PageTable([2, 8, 4]), 130, [9, 1], tree),
        tree_segment(PageTable([2, 8, 4]), 130, [9, 1], tree, 50),
    ]


def test_tiles_hold_every_row_once_and_no_row_of_another_sequence() -> None:
    given = segments()
    tiles = Tiles.of(given, 3, "cpu")
    facts = tiles.fields.numpy()
    rows = [int(r) + i for r, count in zip(facts[ROW], facts[COUNT], strict=True) for i in range(count)]
    assert rows == list(range(sum(s.rows for s in given)))
    assert tiles.queries == 64
    assert facts[COUNT].max() <= tiles.queries // 3
    start = 0
    for number, segment in enumerate(given):
        mine = facts[:, facts[TABLE] == number]
        assert mine[COUNT].sum() == segment.rows
        assert (mine[SLOT] - segment.first_slot == mine[ROW] - start).all()
        assert (mine[COMMITTED] == segment.committed).all()
        assert (mine[STOP] == segment.first_slot + segment.rows).all()
        assert tiles.tables[number, : len(segment.table.pages)].tolist() == segment.table.pages
        start += segment.rows


def test_bits_and_positions_say_what_the_segments_say() -> None:
    given = segments()
    tiles = Tiles.of(given, 3, "cpu")
    start = 0
    for number, segment in enumerate(given):
        opened = int(tiles.fields[OPEN][tiles.fields[TABLE] == number][0])
        assert (opened < 0) == segment.causal == (number < 2)
        if not segment.causal:
            count = len(segment.open_positions)
            assert tiles.open_positions[opened : opened + count].tolist() == segment.open_positions.tolist()
            assert tiles.positions[start : start + segment.rows].tolist() == segment.positions.tolist()
            words = tiles.bits[start : start + segment.rows].numpy()
            columns = np.arange(count)
            assert (((words[:, columns // 32] >> (columns % 32)) & 1).astype(bool) == segment.visible).all()
        start += segment.rows


def test_a_causal_segment_sees_what_its_mask_says() -> None:
    for segment in segments()[:2]:
        assert (segment.visible == np.tri(segment.rows, dtype=np.bool_)).all()
        assert (segment.positions == segment.slots).all()


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_a_batch_is_split_the_same_way_with_and_without_padding(kv_heads: int) -> None:
    for count in range(1, 1500):
        assert count <= bucket(count) <= 1.5 * count + 1
        assert splits(count, kv_heads) == splits(bucket(count), kv_heads)
    assert splits(1, kv_heads) == {1: 64, 3: 64, 8: 32}[kv_heads]
    assert splits(1024, kv_heads) == 1


def test_a_program_has_room_for_one_row_of_any_group() -> None:
    assert [query_block(3, rows) for rows in (1, 5, 6, 16, 64)] == [16, 16, 32, 64, 64]
    assert query_block(71, 1) == 128


def test_a_machine_without_a_gpu_never_imports_triton() -> None:
    assert not paged_available("cpu")
    code = "import sys; import slipstream.attention, slipstream.engine.burst; assert 'triton' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
