"""Gumbel noise by token id, as `slipstream/noise.py` defines it, and the largest of logits plus noise.

The noise of a token is a hash of its id, `bits`, made uniform, u = (bits + 1/2) / 2^32, and then -log(-log(u)). Both
kernels compute the hash of every token: integers, the same on every machine.

* `draw` finds the largest. Noise needs two logarithms, but a bound of it takes a few cheap instructions: it is at most
  -log(1 - u), and the bits of a float are nearly its logarithm. So only tokens whose bound reaches the best one found
  so far get their noise, in float64. If the two best are too near each other for its logarithm to decide, the result is
  -1, and the caller uses the library, whose logarithm is the definition.
* `perturb` writes logits plus noise for all tokens, in float32: enough for a draft.
"""

from __future__ import annotations

import math

from llvmlite import ir

from slipstream.native.ir import F32, F64, I32, I64, POINTER, Code, Value, floats
from slipstream.native.kernel_args import Draw, Perturb
from slipstream.native.team import KERNEL

_FACTORS, _SHIFTS = (0x7FEB352D, 0x846CA68B), (16, 15, 16)
_NEAR_ONE = 0xB504F333  # bits of a u above the root of 1/2
_SCALE = 2.0**-32
# Two scores that are further apart have the order of the library's: both compute them to some 1e-14 of their size.
_SURE, _SURE_SHARE = 1e-10, 1e-13
# A bound is computed in float32. It may be off by less than this.
_SLACK, _SLACK_SHARE = 1e-3, 1e-6


def _hash(code: Code, tokens: Value, low: Value, high: Value) -> Value:
    """The 32 bits of token ids under a key, of vectors or of single numbers."""
    builder = code.builder

    def mix(x: Value) -> Value:
        for factor, shift in zip(_FACTORS, _SHIFTS, strict=False):
            x = builder.xor(x, builder.lshr(x, code.constant(shift, x.type)))
            x = builder.mul(x, code.constant(factor, x.type))
        return builder.xor(x, builder.lshr(x, code.constant(_SHIFTS[-1], x.type)))

    return mix(builder.add(mix(builder.xor(tokens, low)), high))


def _key(code: Code, args: Value, index: int) -> tuple[Value, Value]:
    """Both halves of a 64-bit key."""
    key = code.number(args, index)
    return code.builder.trunc(key, I32), code.builder.trunc(code.builder.lshr(key, code.whole(32)), I32)


def _tokens(code: Code, ids: Value | None, place: Value, lanes: int) -> Value:
    """The ids of the tokens from `place` on, int32."""
    whole = ir.VectorType(I32, lanes)
    if ids is not None:
        return code.builder.trunc(code.load(ids, place, ir.VectorType(I64, lanes)), whole)
    first = code.spread(code.builder.trunc(code.whole(place), I32), lanes)
    return code.builder.add(first, ir.Constant(whole, list(range(lanes))))


# -- the largest ------------------------------------------------------------------------------------------------------


def add_draw(module: ir.Module, name: str, lanes: int, *, listed: bool) -> None:
    """The index of the largest of logits / temperature + noise, into RESULT; -1 if that cannot be said for certain.

    `listed`: the tokens' ids are given. It is meant for one thread.
    """
    consider = _consider(module, f"{name}.consider")
    code = Code(module, name, KERNEL)
    builder, vector = code.builder, floats(lanes)
    arguments = code.arguments[0]
    x, count = code.address(arguments, Draw.X), code.number(arguments, Draw.COUNT)
    ids = code.address(arguments, Draw.IDS) if listed else None
    temperature = code.load(arguments, 2 * Draw.TEMPERATURE, F32)
    low, high = _key(code, arguments, Draw.KEY)
    lowest = ir.Constant(F64, -math.inf)
    code.store(lowest, arguments, Draw.FIRST)
    code.store(lowest, arguments, Draw.SECOND)
    code.store(code.whole(-1), arguments, Draw.RESULT)
    code.store(ir.Constant(F32, -math.inf), arguments, 2 * Draw.BOUND)

    lows, highs, divisors = (code.spread(value, lanes) for value in (low, high, temperature))
    whole_vectors = code.times(code.over(count, lanes), lanes)
    with code.loop(0, whole_vectors, lanes) as place:
        bits = _hash(code, _tokens(code, ids, place, lanes), lows, highs)
        scaled = builder.fdiv(code.load(x, place, vector), divisors)
        bound = code.load(arguments, 2 * Draw.BOUND, F32)
        reaching = builder.fcmp_unordered(">", _most(code, scaled, bits), code.spread(bound, lanes))
        mask = builder.bitcast(reaching, ir.IntType(lanes))
        with code.when(builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))):
            wide = builder.zext(mask, I64)
            with code.loop(0, lanes) as lane:
                left = builder.and_(builder.lshr(wide, lane), code.whole(1))
                with code.when(builder.icmp_unsigned("==", left, code.whole(1))):
                    operands = (builder.extract_element(part, lane) for part in (scaled, bits))
                    builder.call(consider, [arguments, *operands, code.plus(place, lane)])
    with code.loop(whole_vectors, count) as place:
        token = builder.trunc(place if ids is None else code.load(ids, place, I64), I32)
        score = builder.fdiv(code.load(x, place, F32), temperature)
        builder.call(consider, [arguments, score, _hash(code, token, low, high), place])

    first, second = (code.load(arguments, which, F64) for which in (Draw.FIRST, Draw.SECOND))
    needed = builder.fadd(
        builder.fmul(code.unary("fabs", first), ir.Constant(F64, _SURE_SHARE)), ir.Constant(F64, _SURE)
    )
    sure = builder.fcmp_ordered(">", builder.fsub(first, second), needed)
    code.store(builder.select(sure, code.number(arguments, Draw.RESULT), code.whole(-1)), arguments, Draw.RESULT)
    code.done()


def _most(code: Code, scaled: Value, bits: Value) -> Value:
    """An upper bound of the scores: with c = 2^32 - 1 - bits the noise is at most log(2^32 / (c + 1/2)).

    c is halved, rounded down, so that it converts as a signed number. The bits of a float y, as a number, over 2^23 are
    at most log2(y) + 127.
    """
    builder, kind = code.builder, scaled.type
    halved = builder.lshr(builder.not_(bits), code.constant(1, bits.type))
    y = builder.fadd(builder.sitofp(halved, kind), code.constant(0.25, kind))
    power = builder.sitofp(builder.bitcast(y, bits.type), kind)
    most = code.fma(power, code.constant(-math.log(2) / 2**23, kind), code.constant((127 + 31) * math.log(2), kind))
    return builder.fadd(scaled, most)


def _consider(module: ir.Module, name: str) -> ir.Function:
    """The score of one token, compared with the best. NaN ends the search without a result."""
    code = Code(module, name, [POINTER, F32, I32, I64], inner=True)
    builder = code.builder
    args, scaled, bits, index = code.arguments
    unit = builder.fadd(builder.uitofp(bits, F64), ir.Constant(F64, 0.5))
    inner = code.unary("log", builder.fmul(unit, ir.Constant(F64, _SCALE)))
    score = builder.fsub(builder.fpext(scaled, F64), code.unary("log", builder.fneg(inner)))
    unknown = builder.fcmp_unordered("uno", score, score)
    score = builder.select(unknown, ir.Constant(F64, math.inf), score)
    largest, second = (code.load(args, which, F64) for which in (Draw.FIRST, Draw.SECOND))
    larger = builder.fcmp_ordered(">", score, largest)
    loser = builder.select(larger, largest, score)
    code.store(code.larger(loser, second), args, Draw.SECOND)
    largest = builder.select(larger, score, largest)
    code.store(largest, args, Draw.FIRST)
    code.store(builder.select(larger, index, code.number(args, Draw.RESULT)), args, Draw.RESULT)
    share = builder.fmul(code.unary("fabs", largest), ir.Constant(F64, _SLACK_SHARE))
    bound = builder.fsub(builder.fsub(largest, share), ir.Constant(F64, _SLACK))
    code.store(builder.fptrunc(bound, F32), args, 2 * Draw.BOUND)
    return code.done()


# -- all of them ------------------------------------------------------------------------------------------------------


def add_perturb(module: ir.Module, name: str, lanes: int, *, listed: bool) -> None:
    """Logits / temperature + noise for each row, whole vectors wide; every row has a key."""
    code = Code(module, name, KERNEL)
    builder, vector = code.builder, floats(lanes)
    arguments, thread, threads, _ = code.arguments
    width = code.number(arguments, Perturb.WIDTH)
    ids = code.address(arguments, Perturb.IDS) if listed else None
    temperature = code.spread(code.load(arguments, 2 * Perturb.TEMPERATURE, F32), lanes)
    first, last = code.share(code.load(code.address(arguments, Perturb.ROWS), 0, I64), thread, threads)
    with code.loop(first, last) as row:
        x = code.at(code.address(arguments, Perturb.X), code.times(row, code.number(arguments, Perturb.X_STRIDE)), F32)
        out = code.at(code.address(arguments, Perturb.OUT), code.times(row, width), F32)
        halves = _key(code, code.at(code.address(arguments, Perturb.KEYS), row, I64), 0)
        low, high = (code.spread(half, lanes) for half in halves)
        with code.loop(0, width, lanes) as place:
            bits = _hash(code, _tokens(code, ids, place, lanes), low, high)
            scaled = builder.fdiv(code.load(x, place, vector), temperature)
            code.store(builder.fsub(scaled, code.log(_exponential(code, bits, vector))), out, place)
    code.done()


def _exponential(code: Code, bits: Value, kind: ir.Type) -> Value:
    """-log(u): near 1, from 1 - u, which is exact there."""
    builder = code.builder

    def unit(whole: Value) -> Value:
        return builder.fmul(builder.fadd(builder.uitofp(whole, kind), code.constant(0.5, kind)), scale)

    scale = code.constant(_SCALE, kind)
    rest, power = code.split(unit(bits))
    near = builder.icmp_unsigned(">", bits, code.constant(_NEAR_ONE, bits.type))
    rest = builder.select(near, builder.fneg(unit(builder.not_(bits))), rest)
    power = builder.select(near, code.constant(0.0, kind), power)
    return builder.fneg(code.log_of(rest, power))
