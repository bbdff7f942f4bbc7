"""Our own CPU kernels besides GEMM: whole passes, attention, small operations, and how they are cached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache, PageTable
from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig
from slipstream.models.layers.linear import int8_kernels_work, native_works
from slipstream.models.layers.rope import RopeTable
from slipstream.models.load import load_model
from slipstream.models.model import PassOutput
from slipstream.models.native_rows import NativeRows
from slipstream.native import compiler
from slipstream.native.machine import machine
from slipstream.native.shape import Shape
from slipstream.native.small import RMSNorms, top_probabilities
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.models.test_families import build

pytestmark = pytest.mark.skipif(machine() is None, reason="no kernels of our own on this machine")
needs_digits = pytest.mark.skipif(not int8_kernels_work(), reason="no kernels for 8-bit products")


# -- whole passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2"])
def test_a_pass_is_a_program_and_computes_what_operations_do(family: str, quantize: str, tmp_path: Path) -> None:
    if quantize != "none" and not int8_kernels_work():
        pytest.skip("no kernels for 8-bit products")
    build(family, tmp_path, hidden_size=64, intermediate_size=128)
    model, _ = load_model(tmp_path, dtype="float32", device="cpu", quantize=quantize)
    assert model.native is not None
    tree = random_tree(np.random.default_rng(3), 20)
    last = model.config.layers - 1

    def run() -> PassOutput:
        cache = PagedCache(4)
        model.add_store(cache, "kv")
        table = cache.open([])
        cache.reserve(table, 200)
        model.forward(cache, "kv", [tree_segment(table, 0, [i % 30 for i in range(150)], None)])
        segment = tree_segment(table, 150, tree.tokens[:1], tree)
        return model.forward(cache, "kv", [segment], layers=[0, last], taps=[0])

    with torch.inference_mode():
        program = run()
        model.native = None
        operations = run()
    for one, other in (
        (program.logits, operations.logits),
        (program.hidden, operations.hidden),
        (program.taps[0], operations.taps[0]),
    ):
        # A norm that rounds differently moves the last of an activation's 13 bits.
        torch.testing.assert_close(one, other, atol=1e-4 if quantize == "none" else 1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_layers_that_programs_are_not_made_for_go_operation_by_operation(family: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    model, _ = load_model(tmp_path, dtype="float32", device="cpu")
    assert model.native is None


# -- attention --------------------------------------------------------------------------------------------------------


def random_tree(generator: np.random.Generator, nodes: int) -> TokenTree:
    tree = TokenTree(1)
    for node in range(nodes - 1):
        tree.add(int(generator.integers(0, node + 1)), node + 2)
    return tree


def reference(segment: Segment, qkv: torch.Tensor, store: LayerStore, shape: Shape, window: int | None) -> torch.Tensor:
    """Attention in float64, from what lies in the pages; q as the kernel left it, turned."""
    pages, heads, group, size = segment.table.pages, shape.heads, shape.group, shape.size
    slots = [*range(segment.committed), *range(segment.committed, segment.first_slot + segment.rows)]
    positions = np.concatenate([np.arange(segment.committed), segment.open_positions])
    lines = [(pages[slot // PAGE_SIZE], slot % PAGE_SIZE) for slot in slots]
    keys = torch.stack([store.keys[page, :, row] for page, row in lines]).double()  # [slots, kv heads, size]
    values = torch.stack([store.values[page, :, row] for page, row in lines]).double()
    seen = np.ones((segment.rows, len(slots)), dtype=bool)
    seen[:, segment.committed :] = segment.visible
    if window is not None:
        seen &= positions[None, :] > segment.positions[:, None] - window
    q = qkv[:, : heads * size].double().view(segment.rows, heads, size)
    result = torch.empty(segment.rows, heads, size, dtype=torch.float64)
    for head in range(heads):
        scores = q[:, head] @ keys[:, head // group].T
        scores[~torch.from_numpy(seen)] = float("-inf")
        result[:, head] = scores.softmax(-1) @ values[:, head // group]
    return result.flatten(1)


SHAPES = [
    Shape(9, 3, 64, PAGE_SIZE, 16, 16),
    Shape(4, 4, 16, PAGE_SIZE, 16, 16),
    Shape(8, 1, 8, PAGE_SIZE, 8, 16),
    Shape(16, 2, 128, PAGE_SIZE, 16, 16),
    Shape(4, 2, 96, PAGE_SIZE, 8, 8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.size}")
@pytest.mark.parametrize("window", [None, 5, 150])
def test_attention_of_trees_and_chains_in_one_pass(shape: Shape, window: int | None) -> None:
    generator = np.random.default_rng(shape.size)
    cache = PagedCache(12)
    data = cache.add_store("kv", 1, 2, shape.kv_heads, shape.size, torch.float32)
    data.fill_(float("nan"))  # whatever is read besides what is there would show
    layer = cache.layers("kv")[0]
    segments = []
    for committed, rows in ((0, 40), (130, 17), (250, 9), (3, 1), (127, 6)):
        table = cache.open([])
        cache.reserve(table, committed + rows)
        fill(layer, table, committed, generator)
        if committed in (130, 127):
            segments.append(tree_segment(table, committed, [1], random_tree(generator, rows)))
        else:
            segments.append(tree_segment(table, committed, list(range(rows)), None))
    config = rope_config(shape)
    rows = NativeRows(segments, shape, RopeTable(config, "cpu"))
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    qkv = torch.from_numpy(generator.standard_normal((sum(s.rows for s in segments), width), dtype=np.float32))
    qkv[:, : shape.heads * shape.size] *= shape.size**-0.5
    before = qkv.clone()
    result = rows.mix(qkv, layer, window)
    assert torch.equal(qkv[:, shape.heads * shape.size :], before[:, shape.heads * shape.size :])
    start = 0
    for segment in segments:
        some = slice(start, start + segment.rows)
        wanted = reference(segment, qkv[some], layer, shape, window)
        torch.testing.assert_close(result[some].double(), wanted, atol=2e-5, rtol=1e-4)
        start += segment.rows


def fill(layer: LayerStore, table: PageTable, rows: int, generator: np.random.Generator) -> None:
    for slot in range(rows):
        both = generator.standard_normal((2, layer.keys.shape[1], layer.keys.shape[3]), dtype=np.float32)
        layer.both[:, table.pages[slot // PAGE_SIZE], :, slot % PAGE_SIZE] = torch.from_numpy(both)


def rope_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=shape.heads * shape.size,
        intermediate_size=8,
        layers=1,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.size,
        context=4096,
    )


def test_a_node_has_the_bits_of_its_path_decoded_alone() -> None:
    shape = SHAPES[0]
    generator = np.random.default_rng(1)
    cache = PagedCache(4)
    cache.add_store("kv", 1, 2, shape.kv_heads, shape.size, torch.float32)
    layer, rope = cache.layers("kv")[0], RopeTable(rope_config(shape), "cpu")
    table = cache.open([])
    committed = 120
    cache.reserve(table, committed + 40)
    fill(layer, table, committed, generator)
    tree = random_tree(generator, 30)
    width = (shape.heads + 2 * shape.kv_heads) * shape.size
    given = torch.from_numpy(generator.standard_normal((30, width), dtype=np.float32))
    together = NativeRows([tree_segment(table, committed, [1], tree)], shape, rope).mix(given.clone(), layer)
    leaf = max(range(30), key=lambda node: tree.depths[node])
    for depth, node in enumerate([0, *tree.path(leaf)]):
        alone = tree_segment(table, committed + depth, [1], TokenTree(1))
        result = NativeRows([alone], shape, rope).mix(given[node : node + 1].clone(), layer)
        assert torch.equal(result[0], together[node])


# -- small operations -------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 8), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_the_likeliest(rows: int, vectors: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-20, 20, (rows, 32 * vectors), generator=generator).float()  # with many ties
    ids, shares = top_probabilities(logits, count)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert ids.tolist() == order.tolist()
    wanted = logits.softmax(-1).gather(1, order)
    torch.testing.assert_close(torch.from_numpy(shares), wanted, atol=1e-6, rtol=1e-4)


def test_norms_of_two_kinds_of_rows() -> None:
    first, second = torch.randn(5, 64), torch.randn(5, 128)[:, :96]
    weights = torch.rand(64), torch.rand(96)
    result = RMSNorms(weights, 1e-5)(first, second)
    wanted = [functional.rms_norm(x, w.shape, w, 1e-5) for x, w in zip((first, second), weights, strict=True)]
    torch.testing.assert_close(result, torch.cat(wanted, 1), atol=1e-6, rtol=1e-5)


# -- compiled once ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How often something was compiled; kept in a folder of its own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    times: list[int] = []
    original = compiler._compiled

    def counted(build: compiler.Build) -> bytes:
        times.append(1)
        return original(build)

    monkeypatch.setattr(compiler, "_compiled", counted)
    return times


def test_code_is_compiled_once(compiled: list[int], tmp_path: Path) -> None:
    first = compiler.library("nothing", lambda module: None)
    assert first["start"]
    compiler.library("nothing", lambda module: None)
    assert len(compiled) == 1
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-9])  # cut short: it would crash
    compiler.library("nothing", lambda module: None)
    assert len(compiled) == 2


def test_compiling_is_announced_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "env"]
    for line in (1, 0):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "SLIPSTREAM_CACHE": str(tmp_path)}
        )
        assert done.stderr.count("\n") == done.stderr.count("compiling CPU kernels") == line


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import torch; from slipstream import gumbel_max; from slipstream.models.layers import linear;"
        "from slipstream.native import machine; from slipstream.commands.env import _own_kernels;"
        "assert machine.machine() is None and not machine.has_amx() and not gumbel_max.kernels_work();"
        "assert not linear.native_works() and not linear.int8_kernels_work();"
        "print(type(linear.make_linear(torch.randn(64, 64))).__module__, _own_kernels())"
    )
    off = {**os.environ, "SLIPSTREAM_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=off)
    assert "native" not in done.stdout and "no (SLIPSTREAM_NATIVE=0)" in done.stdout
    machine.cache_clear()
    monkeypatch.setenv("SLIPSTREAM_NATIVE", "off")
    with refused(OptionError, "SLIPSTREAM_NATIVE", "'off'"):
        machine()
    monkeypatch.setenv("SLIPSTREAM_NATIVE", "1")
    assert machine() is not None


def test_where_nothing_can_be_kept(compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    assert compiler.library("nothing", lambda module: None)["start"]


def test_kernels_run_here() -> None:
    assert native_works()


def test_everything_runs_where_there_is_no_compiler() -> None:
    script = """
import sys
sys.modules["llvmlite"] = None
from slipstream.models.layers.linear import make_linear, native_works
from slipstream.drafters import drafter_names
import slipstream.models.native_layers, slipstream.native.small
import torch
assert not native_works() and len(drafter_names()) > 10
print(type(make_linear(torch.randn(64, 64))).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("PackedLinear", "TiledLinear")
