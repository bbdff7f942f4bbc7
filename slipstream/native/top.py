"""The largest numbers of a row, and their softmax probabilities."""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.ir import F32, I32, I64, Code, floats
from slipstream.native.kernel_args import Top
from slipstream.native.team import KERNEL


def add_top(module: ir.Module, name: str, lanes: int) -> None:
    """The COUNT largest of each row, descending, of equals the first one first, as probabilities."""
    code = Code(module, name, KERNEL)
    arguments, thread, threads, _ = code.arguments
    builder, vector, whole = code.builder, floats(lanes), ir.VectorType(I32, lanes)
    first, last = code.share(code.load(code.address(arguments, Top.ROWS), 0, I64), thread, threads)
    width, count = code.number(arguments, Top.WIDTH), code.number(arguments, Top.COUNT)
    nothing = code.constant(float("-inf"), vector)
    lane = ir.Constant(whole, list(range(lanes)))
    with code.loop(first, last) as row:
        x = code.at(code.address(arguments, Top.X), code.times(row, code.number(arguments, Top.X_STRIDE)), F32)
        values, ids = (
            code.at(code.address(arguments, which), code.times(row, count), kind)
            for which, kind in ((Top.VALUES, F32), (Top.IDS, I32))
        )
        with code.carrying(0, width, [nothing], lanes) as (place, (peak,), peaks):
            peaks.append(code.maximum(code.load(x, place, vector), peak))
        peak = code.folded(peaks[0], code.maximum)
        with code.carrying(0, width, [code.constant(0.0, vector)], lanes) as (place, (sum_,), sums):
            difference = builder.fsub(code.load(x, place, vector), code.spread(peak, lanes))
            sums.append(builder.fadd(sum_, code.exp(difference)))
        inverse = builder.fdiv(ir.Constant(F32, 1.0), code.total(sums[0]))
        before = [ir.Constant(F32, float("inf")), ir.Constant(I32, -1)]  # the last one found
        with code.carrying(0, count, before) as (number, (value, where), found):
            limit, place_of_limit = code.spread(value, lanes), code.spread(where, lanes)
            start = [nothing, code.constant(2**31 - 1, whole)]
            with code.carrying(0, width, start, lanes) as (place, (best, at), bests):
                each = code.load(x, place, vector)
                here = builder.add(code.spread(builder.trunc(place, I32), lanes), lane)
                equal = builder.and_(
                    builder.fcmp_ordered("==", each, limit), builder.icmp_signed(">", here, place_of_limit)
                )
                left = builder.or_(builder.fcmp_ordered("<", each, limit), equal)
                better = builder.and_(left, builder.fcmp_ordered(">", each, best))
                bests += [builder.select(better, each, best), builder.select(better, here, at)]
            best, at = bests
            largest = code.folded(best, code.maximum)
            among = builder.fcmp_ordered("==", best, code.spread(largest, lanes))
            at = builder.select(among, at, code.constant(2**31 - 1, whole))
            place_of_largest = code.folded(at, lambda a, b: builder.select(builder.icmp_signed("<", a, b), a, b))
            share = code.exp(code.spread(builder.fsub(largest, peak), lanes))
            share = builder.extract_element(share, ir.Constant(I32, 0))
            code.store(builder.fmul(share, inverse), values, number)
            code.store(place_of_largest, ids, number)
            found += [largest, place_of_largest]
    code.done()
