"""The paged attention kernel: is it correct, and how much of the memory bandwidth does it reach?

    python -m benchmarks.paged_attention            # on a GPU: check, then time
    python -m benchmarks.paged_attention --check    # check alone
    TRITON_INTERPRET=1 python -m benchmarks.paged_attention --check --device cpu    # without a GPU

The check compares with float64 on random trees, chains and chunks of prompts, in random pages. Rows that must not be
read are NaN, and so is unwritten output. The times count the K and V that a pass must read at least once.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np
import torch

from slipstream.attention import LaneTiles, PagedAttention, Segment, tree_segment
from slipstream.attention.tiles import tile_arrays
from slipstream.cache import PAGE_SIZE, LayerStore, PageTable
from slipstream.tree import TokenTree

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Case:
    """A model's shape, and the segments of the pass: any of "trees", "levels", "pieces" and "lone" tokens, or "even"
    trees, all of one size.
    """

    heads: int
    kv_heads: int
    size: int
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    segments: tuple[str, ...] = ("trees", "levels", "pieces", "lone")
    contexts: tuple[int, ...] = (0, 5, 127, 128, 300)


# What the interpreter can do in a minute; it does not support bfloat16.
CASES = [
    Case(9, 3, 64, contexts=(5, 128, 300)),
    Case(4, 2, 16, window=40, contexts=(0, 127, 200)),
    Case(4, 1, 32, softcap=5.0, contexts=(128, 250)),
    Case(4, 2, 96, "float16", window=130, softcap=20.0, contexts=(64, 200)),
    Case(6, 2, 64, segments=("lone",), contexts=(0, 1, 63, 64, 127, 128, 129, 255, 256, 500)),
    Case(2, 1, 64, window=70, segments=("lone",), contexts=(1, 69, 70, 71, 400)),
    Case(4, 2, 16, segments=("pieces",), contexts=(0, 128, 260)),
    Case(6, 2, 64, segments=("even",), contexts=(0, 1, 63, 100, 129, 255, 300)),
    Case(4, 2, 16, window=40, segments=("even",), contexts=(3, 64, 127, 200)),
]


def random_tree(chooser: random.Random, nodes: int) -> TokenTree:
    tree = TokenTree(0)
    while len(tree) <= nodes:
        tree.add(chooser.randrange(max(0, len(tree) - 8), len(tree)), len(tree))
    return tree


def random_segment(chooser: random.Random, ride: str, context: int, table: PageTable) -> Segment:
    if ride == "lone":
        return tree_segment(table, context, [1], TokenTree(1))
    if ride == "pieces":
        return tree_segment(table, context, [1] * chooser.choice([2, 30, 100]), None)
    if ride == "even":
        return tree_segment(table, context, [1], random_tree(chooser, 63))
    tree = random_tree(chooser, chooser.choice([3, 20, 100, 191]))
    pending = [1] * chooser.choice([1, 1, 7])
    first = chooser.randrange(1, len(tree)) if ride == "levels" else 0
    return tree_segment(table, context, pending, tree, first)


class Pass:
    """One pass over random pages: the kernel's result, and the result in float64."""

    def __init__(self, case: Case, seed: int, device: str) -> None:
        self.case, self.device = case, device
        chooser = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-(context + 256) // PAGE_SIZE) for context in case.contexts]
        pages = list(range(sum(needed) + 3))
        chooser.shuffle(pages)
        tables = [PageTable([pages.pop() for _ in range(count)]) for count in needed]
        self.segments = [
            random_segment(chooser, chooser.choice(case.segments), context, table)
            for context, table in zip(case.contexts, tables, strict=True)
        ]
        dtype = DTYPES[case.dtype]
        both = torch.full((2, sum(needed) + 3, case.kv_heads, PAGE_SIZE, case.size), float("nan"))
        for segment in self.segments:
            for slot in range(segment.first_slot + segment.rows):
                row = torch.randn(2, case.kv_heads, case.size, generator=generator)
                both[:, segment.table.pages[slot // PAGE_SIZE], :, slot % PAGE_SIZE] = row
        self.layer = LayerStore(both.to(device, dtype))
        rows = sum(s.rows for s in self.segments)
        width = (case.heads + 2 * case.kv_heads) * case.size
        q = torch.randn(rows, width, generator=generator) * 2 * case.size**-0.5
        self.q = q.to(device, dtype)

    def answer(self) -> torch.Tensor:
        """[rows, heads * size], by the kernel."""
        case = self.case
        tiles = None
        if case.segments in (("lone",), ("even",)):  # set up as in a burst
            trees = case.segments == ("even",)
            arrays = [torch.from_numpy(array).to(self.device) for array in tile_arrays(self.segments, 16)]
            group, rows = case.heads // case.kv_heads, self.segments[0].rows
            lanes = LaneTiles(arrays[1].contiguous(), rows, group, open_rows=trees)
            committed = torch.tensor([s.committed for s in self.segments], device=self.device)
            tiles = lanes.after(committed, arrays[4], arrays[2]) if trees else lanes.after(committed)
        attention = PagedAttention(
            self.segments, case.heads, case.kv_heads, case.size, self.device, case.softcap, tiles
        )
        return attention(self.q, self.layer, case.window)

    def truth(self, window: int | None) -> torch.Tensor:
        """The same in float64, from what a segment says about its rows."""
        case = self.case
        answers, start = [], 0
        for segment in self.segments:
            stop = segment.first_slot + segment.rows
            pages = torch.tensor(segment.table.pages)[torch.arange(stop) // PAGE_SIZE]
            keys, values = self.layer.both.double().cpu()[:, pages, :, torch.arange(stop) % PAGE_SIZE].unbind(1)
            seen = np.ones((segment.rows, stop), dtype=np.bool_)
            seen[:, segment.committed :] = segment.visible
            places = np.concatenate([np.arange(segment.committed), segment.open_positions])
            if window is not None:
                seen &= places[None, :] > segment.positions[:, None] - window
            q = self.q[start : start + segment.rows, : case.heads * case.size].double().cpu()
            q = q.view(segment.rows, case.kv_heads, -1, case.size)
            scores = torch.einsum("rhgd,chd->rhgc", q, keys)
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores)
            scores.masked_fill_(~torch.from_numpy(seen)[:, None, None], float("-inf"))
            answers.append(torch.einsum("rhgc,chd->rhgd", scores.softmax(-1), values).flatten(1))
            start += segment.rows
        return torch.cat(answers)


def errors(case: Case, seed: int, device: str) -> tuple[float, float | None]:
    """The largest difference over the tolerance (1 or less is correct), and the same with a wrong window."""
    one = Pass(case, seed, device)
    answer = one.answer().double().cpu()

    def difference(window: int | None) -> float:
        worst = (answer - one.truth(window)).abs().max().item()
        return float("inf") if math.isnan(worst) else worst / TOLERANCE[case.dtype]

    return difference(case.window), None if case.window is None else difference(case.window + 1)


def check(cases: list[Case], seeds: int, device: str) -> None:
    """Print a line of JSON for each case."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    for case in cases:
        found = [errors(case, seed, device) for seed in range(seeds)]
        slipped = [wrong for _, wrong in found if wrong is not None]
        result = {"error": max(right for right, _ in found), "error of a wrong window": min(slipped, default=None)}
        print(json.dumps(asdict(case) | result), flush=True)
    torch.use_deterministic_algorithms(False)


def every_shape() -> list[Case]:
    """All head sizes, types, windows and caps: for a GPU."""
    shapes = product((64, 96, 128, 256), DTYPES, (None, 100), (None, 20.0))
    contexts = (0, 5, 127, 128, 300, 3000)
    return [Case(8, 2, size, dtype, window, cap, contexts=contexts) for size, dtype, window, cap in shapes]


def milliseconds(attention: PagedAttention, q: torch.Tensor, layers: list[LayerStore]) -> float:
    """Time of one call without launches: a graph over several layers, so that the GPU's cache does not hold the K/V."""
    for layer in layers:
        attention(q, layer, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            attention(q, layer, None)
    times: list[float] = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(layers))
    return statistics.median(times)


def time_shape(name: str, heads: int, kv_heads: int, size: int, batch: int, rows: int, context: int) -> None:
    pages = -(-(context + rows) // PAGE_SIZE)
    read = batch * (context + rows) * kv_heads * size * 4  # K and V in bfloat16
    copies = max(2, min(30, 400_000_000 // read))
    stores = torch.randn(copies, 2, batch * pages, kv_heads, PAGE_SIZE, size, dtype=torch.bfloat16, device="cuda")
    chooser = random.Random(0)
    segments = []
    for number in range(batch):
        table = PageTable(list(range(number * pages, (number + 1) * pages)))
        segments.append(tree_segment(table, context, [1], random_tree(chooser, rows - 1)))
    q = torch.randn(batch * rows, (heads + 2 * kv_heads) * size, dtype=torch.bfloat16, device="cuda")
    attention = PagedAttention(segments, heads, kv_heads, size, "cuda")
    took = milliseconds(attention, q, [LayerStore(both) for both in stores])
    print(f"{name:12} batch {batch:5} rows {rows:3} context {context:6}: {took:8.4f} ms {read / took / 1e6:7.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    cases = CASES + every_shape() if arguments.device == "cuda" else CASES
    check(cases, arguments.seeds, arguments.device)
    if arguments.check:
        return
    shapes = {"SmolLM2-135M": (9, 3, 64), "8B": (32, 8, 128)}
    for name, shape in shapes.items():
        for rows, context in product((1, 16, 64), (512, 2048, 8192, 32_768)):
            time_shape(name, *shape, 1, rows, context)
        time_shape(name, *shape, 1024, 1, 512)


if __name__ == "__main__":
    main()
