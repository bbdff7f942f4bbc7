"""GEMM with 8-bit weights, in integers.

A row is divided by its largest number and split into two digits of 7 bits (see `quantized.py`); digits times codes are
summed four at a time, by the VNNI instruction or by two others. Integers do not round, so there is only one result. One
operand must be unsigned: codes have 128 added, which is subtracted from the sums again.

A weight [out, in] is stored in panels of two vectors of outputs and four inputs each, [panels, in / 4, 2 * lanes, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from slipstream.native.gemm.fetch import SteadyFetch, Turn, parts_in_turn
from slipstream.native.gemm.float_gemm import Ending
from slipstream.native.ir import F32, I1, I8, I32, I64, POINTER, Code, Value, floats
from slipstream.native.kernel_args import IntGemm
from slipstream.native.rows import length_of
from slipstream.native.shape import DIGIT_BASE as BASE
from slipstream.native.shape import DIGIT_LANES as LANES
from slipstream.native.shape import GROUP
from slipstream.native.team import KERNEL

TILE = [POINTER, I64, I64, I64, I64, I1, I1]  # arguments of a tile: the kernel's, panel, first row, and a `Turn`
_UNROLLED = 2  # rounds of four inputs
_TINY = 1e-30  # replaces a largest number of 0


def add_quantize(module: ir.Module, name: str, *, normed: bool, grouped: bool = False) -> None:
    """Quantise rows to digits [rows, 2, inputs]; `normed`: rows are divided by their length first.

    `grouped`: computes sums of groups of inputs, [rows, groups], instead of the excess of 128.
    """
    code = Code(module, name, KERNEL)
    arguments, thread, threads, _ = code.arguments
    builder, vector, whole = code.builder, floats(LANES), ir.VectorType(I32, LANES)
    first, last = code.share(code.load(code.address(arguments, IntGemm.ROWS), 0, I64), thread, threads)
    inputs, stride = code.number(arguments, IntGemm.INPUTS), code.number(arguments, IntGemm.X_STRIDE)
    columns = code.address(arguments, IntGemm.COLUMNS)
    fineness = code.load(code.address(arguments, IntGemm.FINENESS), 0, F32)
    with code.loop(first, last) as row:
        x = code.at(code.address(arguments, IntGemm.X), code.times(row, stride), F32)
        digits = code.at(code.address(arguments, IntGemm.DIGITS), code.times(row, inputs, 2), I8)
        one = ir.Constant(F32, 1.0)
        inverse = one
        if normed:
            floor = code.load(code.address(arguments, IntGemm.FLOOR), 0, F32)
            inverse = builder.fdiv(one, length_of(code, x, inputs, floor, LANES))
        inverse = code.spread(inverse, LANES)

        def number(place: Value, x: Value = x, inverse: Value = inverse) -> Value:
            value = code.load(x, place, vector)
            value = builder.fmul(value, inverse) if normed else value
            return builder.fmul(value, code.load(columns, place, vector))

        with code.carrying(0, inputs, [code.constant(_TINY, vector)], LANES) as (place, (largest,), peaks):
            peaks.append(code.maximum(code.unary("fabs", number(place)), largest))
        unit = builder.fmul(code.folded(peaks[0], code.maximum), fineness)
        units = code.spread(unit, LANES)

        def cut(place: Value, units: Value = units, digits: Value = digits) -> Value:
            """Store both digits of a vector; returns their value."""
            scaled = builder.fdiv(number(place), units)
            high = code.unary("rint", builder.fmul(scaled, code.constant(1 / BASE, vector)))
            low = builder.fsub(scaled, builder.fmul(high, code.constant(float(BASE), vector)))
            high, low = builder.fptosi(high, whole), builder.fptosi(low, whole)
            for part, digit in enumerate((high, low)):
                short = builder.trunc(digit, ir.VectorType(I8, LANES))
                code.store(short, digits, code.plus(place, code.times(inputs, part)))
            return builder.add(builder.mul(high, code.constant(BASE, whole)), low)

        code.store(unit, code.address(arguments, IntGemm.UNITS), row)
        if grouped:
            groups = code.over(inputs, GROUP)
            sums = code.at(code.address(arguments, IntGemm.SUMS), code.times(row, groups), F32)
            with code.loop(0, groups) as group:
                place = code.times(group, GROUP)
                together = builder.add(cut(place), cut(code.plus(place, LANES)))
                code.store(builder.sitofp(code.folded(together, builder.add), F32), sums, group)
        else:
            with code.carrying(0, inputs, [code.constant(0, whole)], LANES) as (place, (sum_,), totals):
                totals.append(builder.add(sum_, cut(place)))
            excess = builder.mul(code.folded(totals[0], builder.add), ir.Constant(I32, BASE))
            code.store(excess, code.address(arguments, IntGemm.EXCESS), row)
    code.done()


def add_gemm(module: ir.Module, name: str, ending: Ending, *, vnni: bool) -> ir.Function:
    """A kernel for tiles of a few rows; `ending` writes the results. `vnni`: with the dot-product instruction."""
    most = tile_rows(vnni=vnni)
    tiles = [_tile(module, f"{name}.{rows}", rows, ending, vnni) for rows in range(1, most + 1)]
    return add_tiles(module, name, tiles)


def tile_rows(*, vnni: bool) -> int:
    """Rows of a tile at most: as many as there are registers for their sums."""
    return 4 if vnni else 1


def add_tiles(module: ir.Module, name: str, tiles: Sequence[ir.Function]) -> ir.Function:
    """A kernel over all panels and rows, with functions for tiles of 1, 2, ... rows."""
    code = Code(module, name, KERNEL)
    arguments, _, threads, counter = code.arguments
    rows = code.load(code.address(arguments, IntGemm.ROWS), 0, I64)
    panels, count = code.number(arguments, IntGemm.PANELS), code.over_up(rows, len(tiles))
    with parts_in_turn(code, counter, threads, panels, count) as (first, last), code.loop(first, last) as panel:
        ends = [code.builder.icmp_signed("==", panel, end) for end in (first, code.minus(last, 1))]
        with code.loop(0, count) as number:
            begin, end = code.share(rows, number, count)
            operands = [arguments, panel, begin, number, count, *ends]
            code.choose(code.minus(end, begin), [partial(code.builder.call, tile, operands) for tile in tiles])
    return code.done()


def _tile(module: ir.Module, name: str, rows: int, ending: Ending, vnni: bool) -> ir.Function:
    code = Code(module, name, TILE, inner=True)
    arguments, panel, begin, *turn = code.arguments
    inputs, width = code.number(arguments, IntGemm.INPUTS), 2 * LANES
    whole, dot = ir.VectorType(I32, LANES), code.dot if vnni else code.dot_by_pairs
    size = code.times(inputs, width)
    weight = code.at(code.address(arguments, IntGemm.WEIGHT), code.times(panel, size), I8)
    fours = code.over(inputs, 4)
    fetch = SteadyFetch(code, weight, fours, 4 * width, Turn(*turn))
    all_digits = code.address(arguments, IntGemm.DIGITS)
    digits = [
        code.at(all_digits, code.times(code.plus(code.times(code.plus(begin, row), 2), part), inputs), I8)
        for row in range(rows)
        for part in range(2)
    ]
    zeros = [code.constant(0, whole)] * (4 * rows)
    with code.carrying(0, fours, zeros, _UNROLLED) as (index, sums, results):
        for ahead in range(_UNROLLED):
            place = code.plus(index, ahead)
            line = code.times(place, width)  # in groups of four bytes
            codes = [code.load(weight, code.plus(line, part * LANES), whole, 4 * LANES) for part in range(2)]
            fetch.round(place)
            for which, digit in enumerate(digits):
                four = code.spread(code.load(digit, place, I32, 4), LANES)
                for part in range(2):
                    sums[2 * which + part] = dot(sums[2 * which + part], codes[part], four)
        results.extend(sums)
    for row in range(rows):
        high, low = results[4 * row : 4 * row + 2], results[4 * row + 2 : 4 * row + 4]
        finish_row(code, arguments, panel, code.plus(begin, row), high, low, ending)
    return code.done()


def finish_row(
    code: Code, arguments: Value, panel: Value, row: Value, high: list[Value], low: list[Value], ending: Ending
) -> None:
    """From the sums of a row's digits, two vectors of each, to its results."""
    builder, whole, vector = code.builder, ir.VectorType(I32, LANES), floats(LANES)
    scales, start = code.address(arguments, IntGemm.SCALES), code.address(arguments, IntGemm.START)
    excess = code.spread(code.load(code.address(arguments, IntGemm.EXCESS), row, I32), LANES)
    unit = code.spread(code.load(code.address(arguments, IntGemm.UNITS), row, F32), LANES)
    values = []
    for part in range(2):
        joined = builder.sub(builder.add(builder.mul(high[part], code.constant(BASE, whole)), low[part]), excess)
        place = code.plus(code.times(panel, 2 * LANES), part * LANES)
        scaled = builder.fmul(builder.sitofp(joined, vector), code.load(scales, place, vector))
        values.append(builder.fadd(builder.fmul(scaled, unit), code.load(start, place, vector)))
    stride = code.number(arguments, IntGemm.OUT_STRIDE)
    ending(code, values, code.at(code.address(arguments, IntGemm.OUT), code.times(row, stride), F32), panel)
