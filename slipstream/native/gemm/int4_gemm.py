"""GEMM with 4-bit weights in groups of 32 inputs, each with a scale and an offset.

Rows come as digits, as for 8-bit GEMMs, with the sum of each group. A group is summed in integers, and groups are added
in float32 in order: the GEMM is batch-invariant. A weight is code * scale + (offset - 8 * scale); the second term is
multiplied with the sum of the group only.

A weight [out, in] is stored in panels of two vectors of outputs, [panels, groups, 2, 4, lanes, 4 bytes]: the low
nibbles are the codes of the group's first sixteen inputs, four to a lane, the high nibbles those of the others. Scales
and offsets are bfloat16, [panels, groups, scale and offset, 2 * lanes].
"""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.gemm.fetch import SteadyFetch, Turn
from slipstream.native.gemm.float_gemm import Ending
from slipstream.native.gemm.int8_gemm import TILE, add_tiles, tile_rows
from slipstream.native.ir import F32, I16, I32, Code, Value, floats
from slipstream.native.kernel_args import IntGemm
from slipstream.native.shape import DIGIT_BASE, GROUP
from slipstream.native.shape import DIGIT_LANES as LANES

_VECTORS = GROUP // 8  # of 64 bytes, for the codes of one group and one vector of outputs


def add_gemm(module: ir.Module, name: str, ending: Ending, *, vnni: bool) -> None:
    """A kernel for tiles of a few rows; `ending` writes the results. `vnni`: with the dot-product instruction."""
    most = tile_rows(vnni=vnni)
    add_tiles(module, name, [_tile(module, f"{name}.{rows}", rows, ending, vnni) for rows in range(1, most + 1)])


def _tile(module: ir.Module, name: str, rows: int, ending: Ending, vnni: bool) -> ir.Function:
    code = Code(module, name, TILE, inner=True)
    builder, dot = code.builder, code.dot if vnni else code.dot_by_pairs
    arguments, panel, begin, *turn = code.arguments
    inputs = code.number(arguments, IntGemm.INPUTS)
    groups = code.over(inputs, GROUP)
    whole, vector = ir.VectorType(I32, LANES), floats(LANES)
    size = code.times(groups, 2 * _VECTORS * LANES)  # of a panel, in groups of four bytes
    weight = code.at(code.address(arguments, IntGemm.WEIGHT), code.times(panel, size), I32)
    fetch = SteadyFetch(code, weight, groups, 8 * _VECTORS * LANES, Turn(*turn))
    grids = code.at(code.address(arguments, IntGemm.SCALES), code.times(panel, groups, 4 * LANES), I16)
    all_digits, sums_of_groups = code.address(arguments, IntGemm.DIGITS), code.address(arguments, IntGemm.SUMS)
    digits = [
        code.at(
            all_digits, code.times(code.plus(code.times(code.plus(begin, row), 2), part), code.over(inputs, 4)), I32
        )
        for row in range(rows)
        for part in range(2)
    ]
    sums_of = [code.at(sums_of_groups, code.times(code.plus(begin, row), groups), F32) for row in range(rows)]
    zero = code.constant(0.0, vector)
    with code.carrying(0, groups, [zero] * (2 * rows)) as (group, totals, results):
        fetch.round(group)
        for half in range(2):
            counts = [code.constant(0, whole)] * (2 * rows)
            for step in range(_VECTORS):
                place = code.plus(code.times(group, 2 * _VECTORS * LANES), (half * _VECTORS + step) * LANES)
                both = code.load(weight, place, whole, 4 * LANES)
                low = builder.and_(both, code.constant(0x0F0F0F0F, whole))
                high = builder.and_(builder.lshr(both, code.constant(4, whole)), code.constant(0x0F0F0F0F, whole))
                for codes, four in ((low, step), (high, step + _VECTORS)):
                    where = code.plus(code.times(group, GROUP // 4), four)
                    for which, digit in enumerate(digits):
                        spread = code.spread(code.load(digit, where, I32, 4), LANES)
                        counts[which] = dot(counts[which], codes, spread)
            grid = code.plus(code.times(group, 4 * LANES), half * LANES)
            scale, offset = (_wide(code, grids, code.plus(grid, part * 2 * LANES)) for part in range(2))
            base = code.fma(scale, code.constant(-8.0, vector), offset)
            for row in range(rows):
                joined = builder.add(
                    builder.mul(counts[2 * row], code.constant(DIGIT_BASE, whole)), counts[2 * row + 1]
                )
                total = code.fma(builder.sitofp(joined, vector), scale, totals[2 * row + half])
                sum_ = code.spread(code.load(sums_of[row], group, F32), LANES)
                totals[2 * row + half] = code.fma(sum_, base, total)
        results.extend(totals)
    column = code.times(panel, 2 * LANES)
    start, stride = code.address(arguments, IntGemm.START), code.number(arguments, IntGemm.OUT_STRIDE)
    for row in range(rows):
        line = code.plus(begin, row)
        unit = code.spread(code.load(code.address(arguments, IntGemm.UNITS), line, F32), LANES)
        values = [
            builder.fadd(
                builder.fmul(results[2 * row + half], unit),
                code.load(start, code.plus(column, half * LANES), vector),
            )
            for half in range(2)
        ]
        ending(code, values, code.at(code.address(arguments, IntGemm.OUT), code.times(line, stride), F32), panel)
    return code.done()


def _wide(code: Code, numbers: Value, place: Value) -> Value:
    """A vector of bfloat16 as float32."""
    whole = ir.VectorType(I32, LANES)
    short = code.load(numbers, place, ir.VectorType(I16, LANES))
    return code.builder.bitcast(
        code.builder.shl(code.builder.zext(short, whole), code.constant(16, whole)), floats(LANES)
    )
