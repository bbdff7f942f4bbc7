"""GEMM with float32 weights.

A weight [out, in] is stored in panels of two vectors of outputs, [panels, in, 2 * lanes], the last one padded with
zeros; results are as wide as all panels. A thread processes some panels, and all rows in tiles: the accumulators of a
panel and a tile stay in registers over the inputs. Every output is one sum over the inputs in order, whatever the tile,
so the GEMM is batch-invariant.

Reading the weights takes the time. So with more than one tile, all of them process the inputs piece by piece: the first
tile reads a piece, the others find it in the L1 cache, and meanwhile prefetch the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from slipstream.native.gemm.fetch import Fetch, panels_in_turn
from slipstream.native.ir import F32, I64, POINTER, Code, Value, floats
from slipstream.native.kernel_args import FloatGemm
from slipstream.native.team import KERNEL

UNROLLED = 4  # inputs of one round; their number must be a multiple
_TILES = 8  # tiles that take turns on a piece of the inputs

Ending = Callable[[Code, list[Value], Value, Value], None]  # (code, a row's two sums, out at the row, panel)


def add_gemm(module: ir.Module, name: str, lanes: int, most: int, piece: int, ending: Ending) -> ir.Function:
    """A kernel for tiles of up to `most` rows and pieces of `piece` inputs; `ending` writes the sums."""
    tiles = [_tile(module, f"{name}.{rows}", lanes, rows, ending) for rows in range(1, most + 1)]
    code = Code(module, name, KERNEL)
    arguments, _, threads, counter = code.arguments
    sums = code.memory(F32, _TILES * most * 2 * lanes)
    rows, inputs = code.load(code.address(arguments, FloatGemm.ROWS), 0, I64), code.number(arguments, FloatGemm.INPUTS)
    panels = code.number(arguments, FloatGemm.PANELS)
    blocks = code.over_up(rows, _TILES * most)
    tiles_in_all = code.over_up(rows, most)
    with panels_in_turn(code, counter, threads, panels, tiles_in_all) as panel, code.loop(0, blocks) as block:
        start, stop = code.share(rows, block, blocks)
        count = code.over_up(code.minus(stop, start), most)
        alone = code.builder.icmp_signed("==", count, code.whole(1))
        length = code.builder.select(alone, inputs, code.whole(piece))
        pieces = code.over_up(inputs, length)
        with code.loop(0, pieces) as turn, code.loop(0, count) as number:
            begin, end = code.share(code.minus(stop, start), number, count)
            place = code.times(turn, length)
            held = code.at(sums, code.times(begin, 2 * lanes), F32)
            until = code.least(code.plus(place, length), inputs)
            operands = [arguments, panel, code.plus(start, begin), number, count, place, until, held]
            code.choose(code.minus(end, begin), [partial(code.builder.call, tile, operands) for tile in tiles])
    return code.done()


def _tile(module: ir.Module, name: str, lanes: int, rows: int, ending: Ending) -> ir.Function:
    """One tile over some of the inputs: its sums continue those of the inputs before."""
    code = Code(module, name, [POINTER, *[I64] * 6, POINTER], inner=True)
    builder = code.builder
    arguments, panel, begin, number, count, first_input, last_input, held = code.arguments
    inputs, vector, width = code.number(arguments, FloatGemm.INPUTS), floats(lanes), 2 * lanes
    weight = code.at(code.address(arguments, FloatGemm.WEIGHT), code.times(panel, inputs, width), F32)
    here = code.at(weight, code.times(first_input, width), F32)
    fetch = Fetch(code, here, code.minus(last_input, first_input), 4 * width, number, count, UNROLLED)
    stride = code.number(arguments, FloatGemm.X_STRIDE)
    x = [
        code.at(code.address(arguments, FloatGemm.X), code.times(code.plus(begin, row), stride), F32)
        for row in range(rows)
    ]
    # All rows start with the same two vectors; later pieces continue with the stored sums.
    fresh = builder.icmp_signed("==", first_input, code.whole(0))
    given = code.at(code.address(arguments, FloatGemm.START), code.times(panel, width), F32)
    source, step = builder.select(fresh, given, held), builder.select(fresh, code.whole(0), code.whole(width))
    starts = [
        code.load(source, code.plus(code.times(step, row), part * lanes), vector)
        for row in range(rows)
        for part in range(2)
    ]
    results, reached = starts, first_input
    for asks, until in ((True, code.plus(first_input, fetch.rounds)), (False, last_input)):
        with code.carrying(reached, until, results, UNROLLED) as (index, sums, results):
            for ahead in range(UNROLLED):
                place = code.plus(index, ahead)
                line = code.times(place, width)
                parts = [code.load(weight, code.plus(line, part * lanes), vector, 4 * lanes) for part in range(2)]
                if asks:
                    fetch.round(code.minus(place, first_input))
                for row in range(rows):
                    value = code.spread(code.load(x[row], place, F32), lanes)
                    for part in range(2):
                        sums[2 * row + part] = code.fma(value, parts[part], sums[2 * row + part])
            results.extend(sums)
        reached = until
    out, out_stride = code.address(arguments, FloatGemm.OUT), code.number(arguments, FloatGemm.OUT_STRIDE)
    done = builder.icmp_signed("==", last_input, inputs)
    with builder.if_else(done) as (complete, unfinished):
        with complete:
            for row in range(rows):
                line = code.at(out, code.times(code.plus(begin, row), out_stride), F32)
                ending(code, results[2 * row : 2 * row + 2], line, panel)
        with unfinished:
            for place, sum_ in enumerate(results):
                code.store(sum_, held, place * lanes)
    return code.done()


def written(code: Code, sums: list[Value], out: Value, panel: Value) -> None:
    """Store the sums."""
    lanes = sums[0].type.count
    for part, sum_ in enumerate(sums):
        code.store(sum_, out, code.plus(code.times(panel, 2 * lanes), part * lanes))


def added(code: Code, sums: list[Value], out: Value, panel: Value) -> None:
    """Add the sums to the output."""
    lanes = sums[0].type.count
    for part, sum_ in enumerate(sums):
        place = code.plus(code.times(panel, 2 * lanes), part * lanes)
        code.store(code.builder.fadd(code.load(out, place, sum_.type), sum_), out, place)


def gated(code: Code, sums: list[Value], out: Value, panel: Value) -> None:
    """silu(gate) * value, where the first sums are gates and the second ones values."""
    gate, value = sums
    shut = code.builder.fadd(code.exp(code.builder.fneg(gate)), code.constant(1.0, gate.type))
    code.store(code.builder.fmul(code.builder.fdiv(gate, shut), value), out, code.times(panel, gate.type.count))
