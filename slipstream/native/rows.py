"""Operations on rows between the GEMMs: norms, rotations, and storing keys and values in pages."""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.ir import F32, I64, Code, Value, floats
from slipstream.native.kernel_args import Attention, Norm, Pass
from slipstream.native.shape import Shape
from slipstream.native.team import KERNEL


def length_of(code: Code, x: Value, width: Value, floor: Value, lanes: int) -> Value:
    """The square root of the sum of squares and `floor`."""
    vector = floats(lanes)
    with code.carrying(0, width, [code.constant(0.0, vector)], lanes) as (place, (sum_,), squares):
        value = code.load(x, place, vector)
        squares.append(code.fma(value, value, sum_))
    return code.unary("sqrt", code.builder.fadd(code.total(squares[0]), floor))


def add_norm(module: ir.Module, name: str, lanes: int) -> None:
    """Rows divided by their lengths, times a weight; their width is whole vectors."""
    code = Code(module, name, KERNEL)
    arguments, thread, threads, _ = code.arguments
    first, last = code.share(code.load(code.address(arguments, Norm.ROWS), 0, I64), thread, threads)
    width = code.number(arguments, Norm.WIDTH)
    floor, weight = code.load(code.address(arguments, Norm.FLOOR), 0, F32), code.address(arguments, Norm.WEIGHT)
    with code.loop(first, last) as row:
        x = code.at(code.address(arguments, Norm.X), code.times(row, code.number(arguments, Norm.X_STRIDE)), F32)
        out = code.at(code.address(arguments, Norm.OUT), code.times(row, code.number(arguments, Norm.OUT_STRIDE)), F32)
        inverse = code.builder.fdiv(ir.Constant(F32, 1.0), length_of(code, x, width, floor, lanes))
        inverse = code.spread(inverse, lanes)
        with code.loop(0, width, lanes) as place:
            value = code.builder.fmul(code.load(x, place, floats(lanes)), inverse)
            code.store(code.builder.fmul(value, code.load(weight, place, floats(lanes))), out, place)
    code.done()


def add_rotate(module: ir.Module, name: str, shape: Shape) -> None:
    """Rotate q and k, whose pairs are adjacent, and store k and v in their pages."""
    code = Code(module, name, KERNEL)
    arguments, thread, threads, _ = code.arguments
    size, lanes, heads = shape.size, shape.lanes, shape.heads
    facts = code.address(arguments, Attention.PASS)
    first, last = code.share(code.number(facts, Pass.ROWS), thread, threads)
    keys, values = code.address(arguments, Attention.KEYS), code.address(arguments, Attention.VALUES)
    swapped = [lane ^ 1 for lane in range(lanes)]
    with code.loop(first, last) as row:
        line = code.at(
            code.address(arguments, Attention.QKV), code.times(row, code.number(arguments, Attention.QKV_STRIDE)), F32
        )
        turns = code.at(code.address(facts, Pass.TURNS), code.times(row, 2 * size), F32)
        place = code.load(code.address(facts, Pass.PLACES), row, I64)
        for part in range(0, size, lanes):
            cosine, sine = (code.load(turns, part + which * size, floats(lanes)) for which in range(2))
            for head in range(heads + 2 * shape.kv_heads):
                value = code.load(line, head * size + part, floats(lanes))
                target = code.plus(place, (head - heads) % shape.kv_heads * shape.page * size + part)
                if head >= heads + shape.kv_heads:
                    code.store(value, values, target)
                    continue
                crossed = code.builder.fmul(code.shuffle(value, swapped), sine)
                rotated = code.fma(value, cosine, crossed)
                if head < heads:
                    code.store(rotated, line, head * size + part)
                else:
                    code.store(rotated, keys, target)
    code.done()
