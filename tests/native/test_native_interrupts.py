"""Our own kernels after an interrupt: whatever line it hits, the next pass computes what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.attention import tree_segment
from slipstream.cache import LayerStore, PagedCache
from slipstream.models.layers.linear import int8_kernels_work, native_works
from slipstream.models.load import load_model
from slipstream.native import linear
from tests.native.tracing import interrupted
from tests.tiny import tiny_directory

pytestmark = pytest.mark.skipif(not native_works(), reason="no kernels of our own on this machine")

# In a process of its own: kernels with wrong addresses crash it.
PASSES = """
import sys
import torch
from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models import native_layers, native_rows
from slipstream.models.load import load_model
from slipstream.native import call, linear
from tests.native.tracing import interrupted

torch.set_num_threads(1)
model, _ = load_model(sys.argv[1], dtype="float32", device="cpu", quantize=sys.argv[2])
cache = PagedCache(4)
for store in "ab":
    model.add_store(cache, store)
table = cache.open([])
cache.reserve(table, 200)

def run(store, rows):
    return model.forward(cache, store, [tree_segment(table, 0, [i % 90 for i in range(rows)], None)], taps=[0])

def new():
    model.native = native_layers.native_layers(model.config, model.layers, model._ropes)
    run("a", 3)

files = {module.__file__ for module in (native_layers, native_rows, linear, call)}
with torch.inference_mode():
    new()
    few, many = run("a", 5), run("b", 100)
    line = 0
    while True:
        new()
        if not interrupted(lambda: run("b", 100), files, line):
            break
        for store, rows, wanted in (("a", 5, few), ("b", 100, many), ("a", 5, few)):
            given = run(store, rows)
            assert torch.equal(given.logits, wanted.logits), (line, store)
            assert torch.equal(given.taps[0], wanted.taps[0]), (line, store)
        line += 1
print(line)
"""


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_pass_that_needs_more_memory_is_interrupted(quantize: str) -> None:
    if quantize != "none" and not int8_kernels_work():
        pytest.skip("no kernels for 8-bit products")
    command = [sys.executable, "-c", PASSES, str(tiny_directory()), quantize]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50, "the lines that make memory were not reached"


@pytest.mark.parametrize("kind", ["float", "int8", "int4"])
def test_gates_that_are_being_laid_beside_values(kind: str) -> None:
    if kind != "float" and not int8_kernels_work():
        pytest.skip("no kernels for 8-bit products")
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((128, 64), (128,), (3, 64)))

    def made() -> linear.NativeLinear:
        if kind == "float":
            return linear.FloatLinear(weight, bias)
        if kind == "int8":
            return linear.NativeInt8Linear(weight, 1 / 8000, bias)
        codes = torch.randint(0, 16, (128, 64), generator=torch.Generator().manual_seed(1))
        return linear.NativeInt4Linear(codes, torch.ones(128, 2, 2, dtype=torch.bfloat16), 1 / 8000, bias)

    wanted, line = made()(x), 0
    while True:
        product = made()
        assert torch.equal(product(x), wanted)
        if not interrupted(product.pair, {linear.__file__}, line):
            break
        assert torch.equal(product(x), wanted), line
        product.pair()
        assert torch.equal(product(x), wanted), line
        line += 1
    assert line > 3


def test_a_store_in_the_place_of_another_one() -> None:
    """A new cache may have the address of the one before, with other pages."""
    model, _ = load_model(tiny_directory(), dtype="float32", device="cpu")
    config, room = model.config, torch.zeros(1 << 18)

    def store(pages: int) -> list[LayerStore]:
        shape = config.layers, 2, pages, config.kv_heads, 128, config.head_dim
        return [LayerStore(both) for both in room[: torch.Size(shape).numel()].view(shape).unbind()]

    def run(pages: int) -> torch.Tensor:
        cache = PagedCache(pages - 1)
        cache._layers["kv"] = store(pages)
        table = cache.open([])
        cache.reserve(table, 200)
        return model.forward(cache, "kv", [tree_segment(table, 0, [1, 2, 3], None)]).logits

    with torch.inference_mode():
        first = run(3)
        room.zero_()
        assert torch.equal(run(8), first)
    assert store(8)[-1].values[0].any(), "values lie where this store has them"
