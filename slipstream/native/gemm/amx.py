"""8-bit GEMM by the CPU's matrix unit (AMX): integer sums, so the results equal those of the vector kernel.

The unit has eight tile registers of sixteen rows of 64 bytes, and one instruction multiplies two of them. Weights have
the same layout as for vectors: sixteen rows of four inputs each, of sixteen outputs. A tile of digits holds those of
eight rows, high and low. Two of those times two of weights are accumulated in the other four.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from slipstream.native.gemm.fetch import Fetch, panels_in_turn
from slipstream.native.gemm.float_gemm import Ending
from slipstream.native.gemm.int8_gemm import finish_row
from slipstream.native.ir import I8, I32, I64, POINTER, Code, Value
from slipstream.native.kernel_args import IntGemm
from slipstream.native.shape import DIGIT_LANES as LANES
from slipstream.native.shape import SQUARE_ROWS
from slipstream.native.team import KERNEL

_LINES, _LINE = 16, 64  # of a tile register: rows, and bytes of each
INPUTS = _LINE  # inputs of one instruction; the inputs of a GEMM must be a multiple
_LEAST_ROWS = 2  # rows from which on the matrix unit is faster
_PAIR = 2  # tile registers of digits, and of weights
_DIGITS, _WEIGHTS = 4, 6  # indices of the first of each; accumulators come before


def add_choice(module: ir.Module, name: str, by_vectors: ir.Function, ending: Ending) -> None:
    """A kernel that uses the matrix unit where it is faster, and the vector kernel elsewhere."""
    by_amx = _add_amx(module, f"{name}.amx", ending)
    code = Code(module, name, KERNEL)
    arguments = code.arguments[0]
    rows, inputs = code.load(code.address(arguments, IntGemm.ROWS), 0, I64), code.number(arguments, IntGemm.INPUTS)
    builder = code.builder
    enough = builder.icmp_signed(">=", rows, code.whole(_LEAST_ROWS))
    whole = builder.icmp_signed("==", builder.urem(inputs, code.whole(INPUTS)), code.whole(0))
    with builder.if_else(builder.and_(enough, whole)) as (amx, vectors):
        with amx:
            builder.call(by_amx, code.arguments)
        with vectors:
            builder.call(by_vectors, code.arguments)
    code.done()


def _add_amx(module: ir.Module, name: str, ending: Ending) -> ir.Function:
    """A kernel for any number of rows; `ending` writes the results."""
    tiles = [_tile(module, f"{name}.{pairs}", pairs, ending) for pairs in range(1, _PAIR + 1)]
    code = Code(module, name, KERNEL)
    arguments, _, threads, counter = code.arguments
    rows, panels = code.load(code.address(arguments, IntGemm.ROWS), 0, I64), code.number(arguments, IntGemm.PANELS)
    count = code.over_up(rows, _PAIR * SQUARE_ROWS)
    _configure(code)
    with panels_in_turn(code, counter, threads, panels) as panel, code.loop(0, count) as number:
        begin = code.times(number, _PAIR * SQUARE_ROWS)
        operands = [arguments, panel, begin, number, count]
        registers = code.least(code.over_up(code.minus(rows, begin), SQUARE_ROWS), _PAIR)
        code.choose(registers, [partial(code.builder.call, tile, operands) for tile in tiles])
    code.matrix("tilerelease")
    return code.done()


def _configure(code: Code) -> None:
    """Configure all tile registers to their full size."""
    facts = code.memory(I64, 8)
    sizes, lines = int.from_bytes([_LINE, 0] * 4, "little"), int.from_bytes([_LINES] * 8, "little")
    for place, word in enumerate([1, 0, sizes, sizes, 0, 0, lines, 0]):  # 1: the only palette
        code.store(code.whole(word), facts, place)
    code.matrix("ldtilecfg", facts)


def _tile(module: ir.Module, name: str, registers: int, ending: Ending) -> ir.Function:
    """`registers` tile registers of digits times a panel."""
    code = Code(module, name, [POINTER, I64, I64, I64, I64], inner=True)
    arguments, panel, begin, number, count = code.arguments
    sums = code.memory(I32, registers * 2 * _LINES * LANES)
    inputs, step = code.number(arguments, IntGemm.INPUTS), INPUTS * 2 * LANES
    weight = code.at(code.address(arguments, IntGemm.WEIGHT), code.times(panel, inputs, 2 * LANES), I8)
    digits = code.at(code.address(arguments, IntGemm.DIGITS), code.times(begin, 2, inputs), I8)
    rounds = code.over(inputs, INPUTS)
    fetch = Fetch(code, weight, rounds, step, number, count)
    for register in range(2 * registers):
        code.matrix("tilezero", register)
    reached = code.whole(0)
    for asks, until in ((True, fetch.rounds), (False, rounds)):
        with code.loop(reached, until) as index:
            here = code.at(weight, code.times(index, step), I8)
            for part in range(2):
                _load(code, _WEIGHTS + part, code.at(here, part * 4 * LANES, I8), code.whole(8 * LANES))
            if asks:
                fetch.round(index)
            for register in range(registers):
                lines = code.plus(code.times(index, INPUTS), code.times(inputs, register * _LINES))
                _load(code, _DIGITS + register, code.at(digits, lines, I8), inputs)
                for part in range(2):
                    code.matrix("tdpbsud", 2 * register + part, _DIGITS + register, _WEIGHTS + part)
        reached = until
    for register in range(2 * registers):
        place = code.at(sums, register * _LINES * LANES, I32)
        code.matrix("tilestored64", register, place, code.whole(4 * LANES))
    left = code.minus(code.load(code.address(arguments, IntGemm.ROWS), 0, I64), begin)
    with code.loop(0, code.least(left, registers * SQUARE_ROWS)) as row:
        register, within = code.over(row, SQUARE_ROWS), code.builder.urem(row, code.whole(SQUARE_ROWS))
        first = code.times(code.plus(code.times(register, 2 * _LINES), code.times(within, 2)), LANES)
        high, low = (
            [
                code.load(sums, code.plus(first, (part * _LINES + digit) * LANES), ir.VectorType(I32, LANES))
                for part in range(2)
            ]
            for digit in range(2)
        )
        finish_row(code, arguments, panel, code.plus(begin, row), high, low, ending)
    return code.done()


def _load(code: Code, register: int, start: Value, stride: Value) -> None:
    code.matrix("tileloadd64", register, start, stride)
