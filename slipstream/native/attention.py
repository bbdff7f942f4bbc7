"""Tree attention over pages: every row sums over its visible positions in order, wherever they are stored.

The rows of a pass come in tiles, each a few rows of one sequence. The rows of a tile read the positions that all of
them see (`shared`) together; then each row reads its other positions through a list of slots. A query and a key are
multiplied in the same way in both cases, and sums run over positions in order: lane by lane for the weights, one after
the other for the values. So a node of a tree, a token of a prompt and a single token have the same bits at the same
position.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from slipstream.native.ir import F32, I64, POINTER, Code, Value, floats
from slipstream.native.kernel_args import Attention, Pass, Tile
from slipstream.native.shape import Shape
from slipstream.native.team import KERNEL

_SUMS = 24  # accumulators that are kept in registers
_BLOCK = 16  # positions whose weights are computed at once


def add_attention(module: ir.Module, name: str, shape: Shape) -> None:
    """A kernel that computes all rows and heads."""
    parts = [_tile(module, f"{name}.{rows}", shape, rows) for rows in range(1, shape.tile_rows + 1)]
    code = Code(module, name, KERNEL)
    arguments, thread, _, counter = code.arguments
    facts = code.address(arguments, Attention.PASS)
    count = code.number(facts, Pass.TILE_COUNT)
    with code.taking(counter, code.times(count, shape.kv_heads)) as item:  # a head's tiles in turn: they read the same
        head = code.over(item, count)
        number = code.minus(item, code.times(head, count))
        tile = code.at(code.address(facts, Pass.TILES), code.times(number, Tile.LENGTH), I64)
        operands = [arguments, tile, head, thread]
        code.choose(code.number(tile, Tile.ROWS), [partial(code.builder.call, part, operands) for part in parts])
    code.done()


class _Reader:
    """Addresses of the keys and values of one tile and head."""

    def __init__(self, code: Code, arguments: Value, tile: Value, head: Value, shape: Shape) -> None:
        self._code, self._shape = code, shape
        self._pages = code.address(tile, Tile.PAGES)
        offset = code.times(head, shape.page * shape.size)
        self.keys = code.at(code.address(arguments, Attention.KEYS), offset, F32)
        self.values = code.at(code.address(arguments, Attention.VALUES), offset, F32)

    def line(self, slot: Value) -> Value:
        """Where the row of a slot begins, in floats."""
        code, shape = self._code, self._shape
        page = code.load(self._pages, code.over(slot, shape.page), I64)
        within = code.builder.and_(slot, code.whole(shape.page - 1))
        return code.plus(code.times(page, shape.kv_heads * shape.page * shape.size), code.times(within, shape.size))

    def vectors(self, rows: Value, line: Value) -> list[Value]:
        """A key or a value as vectors."""
        lanes = self._shape.lanes
        return [
            self._code.load(rows, self._code.plus(line, part * lanes), floats(lanes))
            for part in range(self._shape.size // lanes)
        ]


def _tile(module: ir.Module, name: str, shape: Shape, rows: int) -> ir.Function:
    code = Code(module, name, [POINTER, POINTER, I64, I64], inner=True)
    builder = code.builder
    arguments, tile, head, thread = code.arguments
    group, size, lanes = shape.group, shape.size, shape.lanes
    reader = _Reader(code, arguments, tile, head, shape)
    facts = code.address(arguments, Attention.PASS)
    first, shared = code.number(tile, Tile.FIRST), code.number(tile, Tile.SHARED)
    committed, span = code.number(tile, Tile.COMMITTED), code.number(facts, Pass.SPAN)
    numbers = [code.plus(first, row) for row in range(rows)]
    positions = [code.load(code.address(facts, Pass.POSITIONS), number, I64) for number in numbers]
    all_lists = code.address(facts, Pass.LISTS)
    lists = [builder.inttoptr(code.load(all_lists, number, I64), POINTER) for number in numbers]
    window = code.number(arguments, Attention.WINDOW)
    lowest = [code.most(0, code.plus(code.minus(position, window), 1)) for position in positions]
    begin = lowest[0]
    for low in lowest[1:]:
        begin = code.least(begin, low)
    begin = code.times(code.over(begin, _BLOCK), _BLOCK)
    shared = code.most(shared, begin)  # a window may begin after the shared positions
    lines = code.at(code.address(facts, Pass.SCORES), code.times(thread, span, shape.tile_rows * group), F32)
    scores = [code.at(lines, code.times(span, query), F32) for query in range(rows * group)]
    queries = [
        code.at(
            code.address(arguments, Attention.QKV),
            code.plus(
                code.times(number, code.number(arguments, Attention.QKV_STRIDE)),
                code.times(code.plus(code.times(head, group), mate), size),
            ),
            F32,
        )
        for number in numbers
        for mate in range(group)
    ]

    def slot(row: int, position: Value) -> Value:
        """The slot of a position after the committed ones."""
        return code.load(lists[row], code.minus(position, committed), I64)

    def score(position: Value, line: Value, which: range) -> None:
        """Scores of one key."""
        key = reader.vectors(reader.keys, line)
        for query in which:
            sum_ = builder.fmul(code.load(queries[query], 0, floats(lanes)), key[0])
            for part in range(1, size // lanes):
                sum_ = code.fma(code.load(queries[query], part * lanes, floats(lanes)), key[part], sum_)
            code.store(code.total(sum_), scores[query], position)

    def score_block(position: Value) -> None:
        """Scores of as many keys as a vector has lanes; they are contiguous in one page."""
        line = reader.line(position)
        keys = [code.at(reader.keys, code.plus(line, lane * size), F32) for lane in range(lanes)]
        for query, place in zip(queries, scores, strict=True):
            parts = [code.load(query, part * lanes, floats(lanes)) for part in range(size // lanes)]
            sums = [builder.fmul(parts[0], code.load(key, 0, floats(lanes))) for key in keys]
            for part in range(1, size // lanes):
                loaded = (code.load(key, part * lanes, floats(lanes)) for key in keys)
                sums = [code.fma(parts[part], key, sum_) for key, sum_ in zip(loaded, sums, strict=True)]
            code.store(code.all_totals(sums), place, position)

    # The last block may extend beyond the shared positions: its surplus is overwritten below.
    with code.loop(begin, shared, lanes) as position:
        score_block(position)
    ends = []
    for row in range(rows):
        own = range(row * group, (row + 1) * group)
        end = code.plus(positions[row], 1)
        with code.loop(shared, end) as position:
            score(position, reader.line(slot(row, position)), own)
        ends.append(code.times(code.over_up(end, _BLOCK), _BLOCK))
        nothing = ir.Constant(F32, float("-inf"))
        for query in own:
            with code.loop(begin, lowest[row]) as position:
                code.store(nothing, scores[query], position)
            with code.loop(end, ends[row]) as position:
                code.store(nothing, scores[query], position)

    block = floats(_BLOCK)
    inverses = []
    for query in range(rows * group):
        end = ends[query // group]
        with code.carrying(begin, end, [code.constant(float("-inf"), block)], _BLOCK) as (place, (peak,), peaks):
            peaks.append(code.larger(code.load(scores[query], place, block), peak))
        level = code.spread(code.folded(peaks[0], code.larger), _BLOCK)
        with code.carrying(begin, end, [code.constant(0.0, block)], _BLOCK) as (place, (sum_,), sums):
            weight = code.exp(builder.fsub(code.load(scores[query], place, block), level))
            code.store(weight, scores[query], place)
            sums.append(builder.fadd(sum_, weight))
        inverses.append(builder.fdiv(ir.Constant(F32, 1.0), code.total(sums[0])))

    parts = size // lanes
    at_once = max(1, _SUMS // parts)
    out, out_stride = code.address(arguments, Attention.OUT), code.number(arguments, Attention.OUT_STRIDE)
    for start in range(0, rows * group, at_once):
        some = range(start, min(start + at_once, rows * group))
        zeros = [code.constant(0.0, floats(lanes))] * (parts * len(some))

        def add(position: Value, line: Value, which: range, sums: list[Value]) -> list[Value]:
            value = reader.vectors(reader.values, line)
            result = []
            for index, query in enumerate(which):
                weight = code.spread(code.load(scores[query], position, F32), lanes)
                result += [code.fma(weight, value[p], sums[index * parts + p]) for p in range(parts)]
            return result

        with code.carrying(begin, shared, zeros) as (position, sums, totals):
            totals += add(position, reader.line(position), some, sums)
        for row in range(start // group, some[-1] // group + 1):
            own = range(max(start, row * group), min(some[-1] + 1, (row + 1) * group))
            mine = slice((own[0] - start) * parts, (own[-1] + 1 - start) * parts)
            with code.carrying(shared, code.plus(positions[row], 1), totals[mine]) as (position, sums, ended):
                ended += add(position, reader.line(slot(row, position)), own, sums)
            for index, query in enumerate(own):
                head_place = code.times(code.plus(code.times(head, group), query - row * group), size)
                line = code.plus(code.times(numbers[row], out_stride), head_place)
                inverse = code.spread(inverses[query], lanes)
                for p in range(parts):
                    code.store(builder.fmul(ended[index * parts + p], inverse), out, code.plus(line, p * lanes))
    return code.done()
