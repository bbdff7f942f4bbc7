"""Products of rows with a matrix of float32 weights.

A weight [out, in] lies in panels of two vectors of outputs, [panels, in, 2 * lanes], the last one filled up with zeros;
results are as wide as all panels. A thread takes some panels, and goes through all rows in tiles: what a panel and a
tile give stays in registers while the inputs go by. Every output is one sum over the inputs in their order, whatever
the tile, so a row's bits do not depend on the others.

Reading weights is what takes time. So the first tile of a panel asks for them early, and while the rows of later tiles
find the panel in the cache, the next one is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from slipstream.native.emit import F32, I64, POINTER, Code, Value, floats
from slipstream.native.words import Product

AHEAD = 1024  # floats that the first tile fetches before it reads them
UNROLLED = 4  # inputs that one round takes; their number must be a multiple

Ending = Callable[[Code, list[Value], Value, Value], None]  # (code, a row's two sums, out at the row, panel)


def add_product(module: ir.Module, name: str, lanes: int, most: int, ending: Ending) -> None:
    """A kernel for tiles of up to `most` rows; `ending` says what becomes of the sums."""
    tiles = [_tile(module, f"{name}.{rows}", lanes, rows, ending) for rows in range(1, most + 1)]
    code = Code(module, name, [POINTER, I64, I64])
    arguments, thread, threads = code.arguments
    rows = code.load(code.address(arguments, Product.ROWS), 0, I64)
    first, last = code.share(code.number(arguments, Product.PANELS), thread, threads)
    count = code.over_up(rows, most)
    with code.loop(first, last) as panel, code.loop(0, count) as number:
        begin = code.over(code.times(rows, number), count)
        end = code.over(code.times(rows, code.plus(number, 1)), count)
        operands = [arguments, panel, begin, number]
        cases = [partial(code.builder.call, tile, operands) for tile in tiles]
        code.choose(code.minus(end, begin), cases)
    code.done()


def _tile(module: ir.Module, name: str, lanes: int, rows: int, ending: Ending) -> ir.Function:
    code = Code(module, name, [POINTER, I64, I64, I64])
    code.function.linkage = "internal"
    code.function.attributes.add("noinline")
    arguments, panel, begin, number = code.arguments
    inputs, vector, width = code.number(arguments, Product.INPUTS), floats(lanes), 2 * lanes
    size = code.times(inputs, width)
    weight = code.at(code.address(arguments, Product.WEIGHT), code.times(panel, size), F32)
    first_tile = code.builder.icmp_signed("==", number, code.whole(0))
    fetched = code.at(weight, code.builder.select(first_tile, code.whole(AHEAD), size), F32)
    stride = code.number(arguments, Product.X_STRIDE)
    x = [
        code.at(code.address(arguments, Product.X), code.times(code.plus(begin, row), stride), F32)
        for row in range(rows)
    ]
    start = code.at(code.address(arguments, Product.START), code.times(panel, width), F32)
    first = [code.load(start, part * lanes, vector) for part in range(2)]
    with code.carrying(0, inputs, first * rows, UNROLLED) as (index, sums, results):
        for ahead in range(UNROLLED):
            place = code.plus(index, ahead)
            line = code.times(place, width)
            parts = [code.load(weight, code.plus(line, part * lanes), vector, 4 * lanes) for part in range(2)]
            for part in range(2):
                code.prefetch(code.at(fetched, code.plus(line, part * lanes), F32))
            for row in range(rows):
                value = code.spread(code.load(x[row], place, F32), lanes)
                for part in range(2):
                    sums[2 * row + part] = code.fma(value, parts[part], sums[2 * row + part])
        results.extend(sums)
    out, out_stride = code.address(arguments, Product.OUT), code.number(arguments, Product.OUT_STRIDE)
    for row in range(rows):
        line = code.at(out, code.times(code.plus(begin, row), out_stride), F32)
        ending(code, results[2 * row : 2 * row + 2], line, panel)
    return code.done()


def written(code: Code, sums: list[Value], out: Value, panel: Value) -> None:
    """The sums are the result."""
    lanes = sums[0].type.count
    for part, sum_ in enumerate(sums):
        code.store(sum_, out, code.plus(code.times(panel, 2 * lanes), part * lanes))


def added(code: Code, sums: list[Value], out: Value, panel: Value) -> None:
    """The sums are added to what is there."""
    lanes = sums[0].type.count
    for part, sum_ in enumerate(sums):
        place = code.plus(code.times(panel, 2 * lanes), part * lanes)
        code.store(code.builder.fadd(code.load(out, place, sum_.type), sum_), out, place)
