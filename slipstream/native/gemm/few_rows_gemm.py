"""GEMM of so few rows that it is memory-bound: several panels are read side by side.

The hardware prefetcher restarts in every page of memory, and the first lines of a page stall. With several panels at
once the others continue meanwhile. Software prefetches, as in `float_gemm.py`, do not help then: each takes a slot
among the loads. An output is the same sum as in `float_gemm.py`, over the inputs in order, so a row has the same bits
with either kernel.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from llvmlite import ir

from slipstream.native.gemm.fetch import groups_in_turn
from slipstream.native.gemm.float_gemm import UNROLLED, Ending
from slipstream.native.ir import F32, I64, POINTER, Code, floats
from slipstream.native.kernel_args import FloatGemm
from slipstream.native.team import KERNEL

_LEAST_PANELS = 2  # side by side, from which on it pays


def add_choice(module: ir.Module, name: str, by_tiles: ir.Function, lanes: int, most: int, ending: Ending) -> None:
    """A kernel that reads panels side by side for few rows, and calls the tiled kernel for more.

    `most`: accumulators that are kept in registers; two for each row and panel.
    """
    pairs = most // 2
    few = pairs // _LEAST_PANELS  # rows
    kernels = [_rows(module, f"{name}.{rows}", lanes, rows, pairs // rows, ending) for rows in range(1, few + 1)]
    code = Code(module, name, KERNEL)
    builder = code.builder
    rows = code.load(code.address(code.arguments[0], FloatGemm.ROWS), 0, I64)
    with builder.if_else(builder.icmp_signed("<=", rows, code.whole(few))) as (side_by_side, tiled):
        with side_by_side:
            code.choose(rows, [partial(builder.call, kernel, code.arguments) for kernel in kernels])
        with tiled:
            builder.call(by_tiles, code.arguments)
    code.done()


def _rows(module: ir.Module, name: str, lanes: int, rows: int, most: int, ending: Ending) -> ir.Function:
    """A kernel for `rows` rows, with up to `most` panels side by side."""
    groups = [_group(module, f"{name}.{panels}", lanes, rows, panels, ending) for panels in range(1, most + 1)]
    code = Code(module, name, KERNEL, inner=True)
    arguments, _, threads, counter = code.arguments
    panels = code.number(arguments, FloatGemm.PANELS)
    with groups_in_turn(code, counter, threads, panels, most) as (first, count):
        code.choose(count, [partial(code.builder.call, group, [arguments, first]) for group in groups])
    return code.done()


def _group(module: ir.Module, name: str, lanes: int, rows: int, panels: int, ending: Ending) -> ir.Function:
    """`rows` rows times `panels` panels, from `first` on."""
    code = Code(module, name, [POINTER, I64], inner=True)
    arguments, first = code.arguments
    inputs, vector, width = code.number(arguments, FloatGemm.INPUTS), floats(lanes), 2 * lanes
    numbers = [code.plus(first, panel) for panel in range(panels)]
    start, weight = code.address(arguments, FloatGemm.START), code.address(arguments, FloatGemm.WEIGHT)
    weights = [code.at(weight, code.times(number, inputs, width), F32) for number in numbers]
    x, out = (
        [
            code.at(code.address(arguments, lines), code.times(row, code.number(arguments, stride)), F32)
            for row in range(rows)
        ]
        for lines, stride in ((FloatGemm.X, FloatGemm.X_STRIDE), (FloatGemm.OUT, FloatGemm.OUT_STRIDE))
    )
    starts = [
        code.load(start, code.plus(code.times(number, width), part * lanes), vector)
        for number, part in product(numbers, range(2))
    ]
    with code.carrying(0, inputs, starts * rows, UNROLLED) as (index, sums, results):
        for ahead in range(UNROLLED):
            place = code.plus(index, ahead)
            line = code.times(place, width)
            values = [code.spread(code.load(row, place, F32), lanes) for row in x]
            for column, (panel, part) in enumerate(product(weights, range(2))):
                loaded = code.load(panel, code.plus(line, part * lanes), vector, 4 * lanes)
                for which in range(rows):
                    mine = which * 2 * panels + column
                    sums[mine] = code.fma(values[which], loaded, sums[mine])
        results.extend(sums)
    for which, (line, number) in enumerate(product(out, numbers)):
        ending(code, results[2 * which : 2 * which + 2], line, number)
    return code.done()
