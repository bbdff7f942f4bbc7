"""From a matrix of floats to packed 8-bit codes, and rows of it back to floats.

The largest number of a row becomes the code 127; a code is a quotient, rounded to the nearest integer.
"""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.ir import F32, I8, I32, I64, Code, Value, floats
from slipstream.native.kernel_args import Pack, Unpack
from slipstream.native.shape import DIGIT_BASE
from slipstream.native.shape import DIGIT_LANES as LANES
from slipstream.native.team import KERNEL

_LEVELS = 127.0
_TINY = 1e-30  # replaces a largest number of 0
_PANEL = 2 * LANES  # outputs


def add_pack(module: ir.Module, name: str) -> None:
    """Codes [panels, in / 4, outputs of a panel, 4], 128 added to each, and a scale for each output.

    The last panel is padded with outputs whose scale is 0.
    """
    code = Code(module, name, KERNEL)
    arguments, _, _, counter = code.arguments
    rows, inputs = code.load(code.address(arguments, Pack.ROWS), 0, I64), code.number(arguments, Pack.INPUTS)
    whole = ir.VectorType(I32, LANES)
    with code.taking(counter, code.over_up(rows, _PANEL)) as panel, code.loop(0, _PANEL) as place:
        row = code.plus(code.times(panel, _PANEL), place)
        is_row = code.builder.icmp_signed("<", row, rows)
        line = code.times(code.least(row, code.minus(rows, 1)), code.number(arguments, Pack.X_STRIDE))
        x = code.at(code.address(arguments, Pack.X), line, F32)
        vector = floats(LANES)
        with code.carrying(0, inputs, [code.constant(_TINY, vector)], LANES) as (first, (largest,), peaks):
            peaks.append(code.maximum(code.unary("fabs", code.load(x, first, vector)), largest))
        scale = code.builder.fdiv(code.folded(peaks[0], code.maximum), ir.Constant(F32, _LEVELS))
        kept = code.builder.select(is_row, scale, ir.Constant(F32, 0.0))
        code.store(kept, code.address(arguments, Pack.SCALES), row)
        weight = code.at(code.address(arguments, Pack.WEIGHT), code.times(panel, inputs, _PANEL), I8)
        scales = code.spread(scale, LANES)
        with code.loop(0, inputs, LANES) as first:
            numbers = code.unary("rint", code.builder.fdiv(code.load(x, first, vector), scales))
            codes = code.builder.add(code.builder.fptosi(numbers, whole), code.constant(DIGIT_BASE, whole))
            _scatter(code, codes, weight, code.plus(code.times(first, LANES // 2), place))
    code.done()


def _scatter(code: Code, codes: Value, weight: Value, first: Value) -> None:
    """Store sixteen codes as four groups of four bytes, with the stride of a panel."""
    short = code.builder.trunc(codes, ir.VectorType(I8, LANES))
    fours = code.builder.bitcast(short, ir.VectorType(I32, LANES // 4))
    for four in range(LANES // 4):
        value = code.builder.extract_element(fours, ir.Constant(I32, four))
        code.store(value, weight, code.plus(first, four * _PANEL))


def add_unpack(module: ir.Module, name: str) -> None:
    """Rows of a packed matrix as floats, by their numbers: an embedding table."""
    code = Code(module, name, KERNEL)
    arguments, thread, threads, _ = code.arguments
    first, last = code.share(code.load(code.address(arguments, Unpack.ROWS), 0, I64), thread, threads)
    fours = code.over(code.number(arguments, Unpack.INPUTS), 4)
    short, vector = ir.VectorType(I8, 4), floats(4)
    with code.loop(first, last) as row:
        number = code.load(code.address(arguments, Unpack.IDS), row, I64)
        panel = code.over(number, _PANEL)
        place = code.minus(number, code.times(panel, _PANEL))
        scale = code.spread(code.load(code.address(arguments, Unpack.SCALES), number, F32), 4)
        codes = code.at(code.address(arguments, Unpack.WEIGHT), code.times(panel, fours, _PANEL), I32)
        out = code.at(code.address(arguments, Unpack.OUT), code.times(row, fours, 4), F32)
        with code.loop(0, fours) as four:
            packed = code.load(codes, code.plus(code.times(four, _PANEL), place), I32)
            signed = code.builder.xor(code.builder.bitcast(packed, short), code.constant(DIGIT_BASE, short))
            numbers = code.builder.fmul(code.builder.sitofp(signed, vector), scale)
            code.store(numbers, out, code.times(four, 4))
    code.done()
