"""Our own kernels for a CPU: they compute what they say, and a row's bits do not depend on its company."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache, PageTable
from slipstream.models.config import ModelConfig
from slipstream.models.linear import digits_work, native_works
from slipstream.models.load import load_model
from slipstream.models.model import PassOutput
from slipstream.models.native_rows import NativeRows
from slipstream.models.quantized import Int8Linear, Int8Matrix, _on_grids, int4_linear, int8_linear
from slipstream.models.rope import RopeTable
from slipstream.native import compiler, kernels, matrix_unit
from slipstream.native.linear import DigitLinear, FloatLinear, NativeLinear, NibbleLinear
from slipstream.native.machine import Machine, machine
from slipstream.native.shape import GROUP, Shape
from slipstream.native.small import RootMean, likeliest
from slipstream.tree import TokenTree
from tests.test_families import build

pytestmark = pytest.mark.skipif(machine() is None, reason="no kernels of our own on this machine")
needs_digits = pytest.mark.skipif(not digits_work(), reason="no instruction for 8-bit products")


@pytest.fixture(params=[None, Machine(8, 5, digits=False), Machine(4, 8, digits=False)], ids=["own", "8", "4"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Kernels as other processors get them, too: their vectors are shorter."""
    if request.param is not None:
        monkeypatch.setattr(kernels, "machine", lambda: request.param)
    for cached in (kernels.products, kernels.layers):
        cached.cache_clear()
    yield kernels.here().lanes
    for cached in (kernels.products, kernels.layers):
        cached.cache_clear()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (70, 48), (960, 576), (33, 1540)])
def test_a_float_product_is_the_product(lanes: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    product = FloatLinear(weight, bias)
    for rows in (1, 2, 7, 8, 9, 23):
        x = torch.randn(rows, inputs, generator=generator)
        wanted = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(product(x).double(), wanted, atol=2e-4, rtol=1e-5)


def test_rows_of_a_float_product_do_not_depend_on_their_company(lanes: int) -> None:
    product, x = FloatLinear(torch.randn(200, 96)), torch.randn(40, 96)
    together = product(x)
    for start, stop in ((0, 1), (3, 5), (7, 19), (11, 40), (39, 40)):
        assert torch.equal(product(x[start:stop]), together[start:stop])


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(5, 300)
    product = FloatLinear(torch.randn(64, 100))
    assert torch.equal(product(wide[:, 100:200]), product(wide[:, 100:200].contiguous()))


@needs_digits
@given(st.integers(1, 150), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_an_8_bit_product_has_the_bits_of_the_slow_one(outputs: int, sixteens: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 16 * sixteens, generator=generator)
    bias, columns = torch.randn(outputs, generator=generator), torch.rand(16 * sixteens, generator=generator)
    fast = int8_linear(weight, bias, columns)
    assert isinstance(fast, DigitLinear)
    x = 10 ** torch.randint(-3, 4, (rows, 1), generator=generator) * torch.randn(
        rows, 16 * sixteens, generator=generator
    )
    assert torch.equal(fast(x), Int8Linear(Int8Matrix(weight), bias, columns)(x))


@needs_digits
@pytest.mark.parametrize("inputs", [64, 192, 576, 1536])
def test_the_matrix_unit_has_the_bits_of_vectors(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.here().squares:
        pytest.skip("no matrix unit")
    weight, bias, x = torch.randn(70, inputs), torch.randn(70), torch.randn(67, inputs)
    by_squares, kept = int8_linear(weight, bias), kernels.digits()  # code goes with its library
    together = by_squares(x)
    without = replace(kernels.here(), squares=False)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "machine", lambda: without)
        kernels.digits.cache_clear()
        assert torch.equal(int8_linear(weight, bias)(x), together)
    kernels.digits.cache_clear()
    for start, stop in ((0, 1), (1, 3), (0, 8), (5, 14), (20, 36), (30, 47), (3, 67)):
        assert torch.equal(by_squares(x[start:stop]), together[start:stop])
    assert kept["pack"]


@pytest.mark.skipif(not kernels.here().squares if machine() else True, reason="no matrix unit")
def test_a_matrix_unit_that_is_forbidden_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_unit.matrix_unit_works()
    killed = tmp_path / "trial.py"
    killed.write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setattr(matrix_unit.trial, "__file__", str(killed))
    assert not matrix_unit.matrix_unit_works()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no interpreter"))
    assert not matrix_unit.matrix_unit_works()


@pytest.mark.parametrize("kind", ["float", "8 bits", "4 bits"])
def test_pairing_gates_and_values_changes_no_result(kind: str) -> None:
    if kind != "float" and not digits_work():
        pytest.skip("no instruction for 8-bit products")
    make = {"float": FloatLinear, "8 bits": int8_linear, "4 bits": int4_linear}[kind]
    generator = torch.Generator().manual_seed(5)
    product = make(torch.randn(192, 96, generator=generator), torch.randn(192, generator=generator))
    x = torch.randn(11, 96, generator=generator)
    before = product(x)
    assert isinstance(product, NativeLinear) and product.can_pair
    for _ in range(2):  # once is enough
        product.pair()
        assert torch.equal(product(x), before)
    assert not FloatLinear(torch.randn(50, 96)).can_pair


@needs_digits
@given(st.integers(1, 100), st.integers(1, 12), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_weights_are_packed_as_they_are_quantised(outputs: int, sixteens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 2 * 16 * sixteens, generator=generator)[:, : 16 * sixteens]  # rows lie apart
    weight[outputs // 2] = 0.0
    packed, ids = int8_linear(weight), torch.arange(outputs)
    assert isinstance(packed, DigitLinear)
    assert torch.equal(packed[ids], Int8Matrix(weight)[ids])


@needs_digits
def test_the_largest_sums_of_8_bit_products_do_not_overflow() -> None:
    for inputs in (576, 4096, 14_336):
        for sign in (1.0, -1.0):
            product, x = int8_linear(torch.full((40, inputs), sign)), torch.ones(20, inputs)
            torch.testing.assert_close(product(x), torch.full((20, 40), sign * inputs), rtol=1e-3, atol=0)


@needs_digits
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    product, x = int8_linear(torch.randn(50, 64)), torch.randn(6, 64)
    wanted = product(x)
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[2, 5] = bad
        result = product(spoilt)
        assert not result[2].isfinite().any()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(result[others], wanted[others])


@needs_digits
def test_a_packed_matrix_is_a_table() -> None:
    weight, ids = torch.randn(70, 48), torch.tensor([[3, 69], [0, 33]])
    packed = int8_linear(weight)
    assert isinstance(packed, DigitLinear)
    assert torch.equal(packed[ids], Int8Matrix(weight)[ids])


@needs_digits
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (70, 96), (576, 1536)])
def test_a_4_bit_product_is_that_of_its_grid(outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    product = int4_linear(weight, bias)
    assert isinstance(product, NibbleLinear)
    codes, scale, offset = _on_grids(weight)
    on_grid = ((codes.view(outputs, -1, GROUP).double() - 8) * scale + offset).flatten(1)
    x = torch.randn(19, inputs, generator=generator)
    result = product(x)
    wanted = x.double() @ on_grid.T + bias.double()
    assert float((result.double() - wanted).norm()) < 0.001 * float(wanted.norm())
    for start, stop in ((0, 1), (3, 8), (5, 19)):
        assert torch.equal(product(x[start:stop]), result[start:stop])


# -- whole passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2"])
def test_a_pass_is_a_program_and_computes_what_operations_do(family: str, quantize: str, tmp_path: Path) -> None:
    if quantize != "none" and not digits_work():
        pytest.skip("no instruction for 8-bit products")
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
    ids, shares = likeliest(logits, count)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert ids.tolist() == order.tolist()
    wanted = logits.softmax(-1).gather(1, order)
    torch.testing.assert_close(torch.from_numpy(shares), wanted, atol=1e-6, rtol=1e-4)


def test_norms_of_two_kinds_of_rows() -> None:
    first, second = torch.randn(5, 64), torch.randn(5, 128)[:, :96]
    weights = torch.rand(64), torch.rand(96)
    result = RootMean(weights, 1e-5)(first, second)
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


def test_where_nothing_can_be_kept(compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    assert compiler.library("nothing", lambda module: None)["start"]


def test_kernels_run_here() -> None:
    assert native_works()


def test_everything_runs_where_there_is_no_compiler() -> None:
    script = """
import sys
sys.modules["llvmlite"] = None
from slipstream.models.linear import make_linear, native_works
from slipstream.drafters import drafter_names
import slipstream.models.native_layers, slipstream.native.small
import torch
assert not native_works() and len(drafter_names()) > 10
print(type(make_linear(torch.randn(64, 64))).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("PackedLinear", "TiledLinear")
