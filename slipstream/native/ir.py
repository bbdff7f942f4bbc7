"""A small layer over LLVM IR in which the kernels are written: loops, vectors and memory.

Everything is explicit. A sum runs in the order in which it is written, on every CPU and for any number of rows: nothing
here permits the compiler to reorder floating-point arithmetic, so every row is computed alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
Value = Any  # llvmlite is untyped

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST, _GREATEST = -87.0, 88.0  # exp is 0 below, and constant above
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
_LOG_LAST = 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1
_ROOT_OF_HALF = 0x3F3504F3  # the bits of a float32


class Code:
    """One function under construction: `builder` is at its end."""

    def __init__(self, module: ir.Module, name: str, takes: Sequence[ir.Type], *, inner: bool = False) -> None:
        """`inner`: not called from outside the module, and not inlined."""
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), takes), name)
        if inner:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    @property
    def arguments(self) -> tuple[Value, ...]:
        """The arguments of the function."""
        return tuple(self.function.args)

    def done(self) -> ir.Function:
        """End the function."""
        self.builder.ret_void()
        return self.function

    # -- control ------------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        """The body runs with start, start + step, ... below stop."""
        with self.carrying(start, stop, [], step) as (index, _, _):
            yield index

    @contextmanager
    def carrying(
        self, start: Value, stop: Value, values: Sequence[Value], step: int = 1
    ) -> Iterator[tuple[Value, list[Value], list[Value]]]:
        """A loop with loop-carried values: (index, values at the beginning of a round, list for the next ones).

        After the loop, that list has the values of the last round.
        """
        builder = self.builder
        before = builder.block
        head, body, end = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(self.whole(start), before)
        carried = [builder.phi(value.type) for value in values]
        for phi, value in zip(carried, values, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, self.whole(stop)), body, end)
        builder.position_at_end(body)
        following: list[Value] = []
        yield index, list(carried), following
        index.add_incoming(builder.add(index, self.whole(step)), builder.block)
        for phi, value in zip(carried, following, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        following[:] = carried

    @contextmanager
    def taking(self, counter: Value, count: Value) -> Iterator[Value]:
        """The body runs with each number below `count` that no other thread has taken: dynamic scheduling."""
        builder = self.builder
        head, body, end = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        number = builder.atomic_rmw("add", counter, self.whole(1), "monotonic")
        builder.cbranch(builder.icmp_signed("<", number, self.whole(count)), body, end)
        builder.position_at_end(body)
        yield number
        builder.branch(head)
        builder.position_at_end(end)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body runs if the condition holds."""
        with self.builder.if_then(condition):
            yield

    def choose(self, number: Value, cases: Sequence[Callable[[], None]]) -> None:
        """Run the case number 1, 2, ... of `cases`."""
        builder = self.builder
        end = builder.append_basic_block()
        branch = builder.switch(number, end)
        for which, case in enumerate(cases, 1):
            block = builder.append_basic_block()
            branch.add_case(self.whole(which), block)
            builder.position_at_end(block)
            case()
            builder.branch(end)
        builder.position_at_end(end)

    # -- integers -----------------------------------------------------------------------------------------------------

    def whole(self, value: Value) -> Value:
        """A number as a 64-bit value."""
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def times(self, *factors: Value) -> Value:
        """A product of integers."""
        result = self.whole(factors[0])
        for factor in factors[1:]:
            result = self.builder.mul(result, self.whole(factor))
        return result

    def plus(self, *terms: Value) -> Value:
        """A sum of integers."""
        result = self.whole(terms[0])
        for term in terms[1:]:
            result = self.builder.add(result, self.whole(term))
        return result

    def minus(self, a: Value, b: Value) -> Value:
        """A difference of integers."""
        return self.builder.sub(self.whole(a), self.whole(b))

    def over(self, a: Value, b: Value) -> Value:
        """A quotient of non-negative integers, rounded down."""
        return self.builder.udiv(self.whole(a), self.whole(b))

    def over_up(self, a: Value, b: Value) -> Value:
        """A quotient, rounded up."""
        return self.over(self.plus(a, self.minus(b, 1)), b)

    def least(self, a: Value, b: Value) -> Value:
        """The smaller of two integers."""
        a, b = self.whole(a), self.whole(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def most(self, a: Value, b: Value) -> Value:
        """The larger of two integers."""
        a, b = self.whole(a), self.whole(b)
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def share(self, count: Value, thread: Value, threads: Value) -> tuple[Value, Value]:
        """The range [first, last) of `count` items of a thread."""
        first = self.over(self.times(count, thread), threads)
        return first, self.over(self.times(count, self.plus(thread, 1)), threads)

    # -- memory -------------------------------------------------------------------------------------------------------

    def at(self, base: Value, index: Value, kind: ir.Type) -> Value:
        """The address of element `index` of `base`."""
        return self.builder.gep(base, [self.whole(index)], source_etype=kind)

    def load(self, base: Value, index: Value, kind: ir.Type, align: int | None = None) -> Value:
        """Element `index` of `base`. For a vector the index counts its elements, not vectors."""
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        return self.builder.load(self.at(base, index, element), align=align or _bytes(element), typ=kind)

    def store(self, value: Value, base: Value, index: Value) -> None:
        """Store a value at element `index` of `base`; for a vector the index counts its elements."""
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        self.builder.store(value, self.at(base, index, element), align=_bytes(element))

    def memory(self, kind: ir.Type, count: int) -> Value:
        """Stack memory for `count` elements; must come first in the function."""
        return self.builder.bitcast(self.builder.alloca(kind, count), POINTER)

    def address(self, arguments: Value, index: int) -> Value:
        """Argument `index`, an address."""
        return self.builder.inttoptr(self.load(arguments, index, I64), POINTER)

    def number(self, arguments: Value, index: int) -> Value:
        """Argument `index`, an integer."""
        return self.load(arguments, index, I64)

    def prefetch(self, address: Value) -> None:
        """Prefetch a cache line into L2."""
        kinds = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = self._declared("llvm.prefetch.p0", kinds)
        self.builder.call(function, [address, *(ir.Constant(I32, n) for n in (0, 2, 1))])

    # -- vectors ------------------------------------------------------------------------------------------------------

    def constant(self, value: float | int, kind: ir.Type) -> Value:
        """A constant, in every lane of a vector."""
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def spread(self, value: Value, lanes: int) -> Value:
        """A number in every lane."""
        kind = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.shuffle(first, [0] * lanes)

    def shuffle(self, vector: Value, order: Sequence[int], other: Value | None = None) -> Value:
        """The lanes `order` of a vector (and of another one after it)."""
        mask = ir.Constant(ir.VectorType(I32, len(order)), list(order))
        return self.builder.shuffle_vector(
            vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, mask
        )

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        kind = c.type
        return self.builder.call(
            self._declared(f"llvm.fma.{_name(kind)}", ir.FunctionType(kind, [kind] * 3)), [a, b, c]
        )

    def unary(self, name: str, x: Value) -> Value:
        """An intrinsic of one argument, such as `fabs` or `sqrt`."""
        return self.builder.call(self._declared(f"llvm.{name}.{_name(x.type)}", ir.FunctionType(x.type, [x.type])), [x])

    def larger(self, a: Value, b: Value) -> Value:
        """The larger one, lane by lane; b if a is NaN. One instruction, where `maximum` takes several."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger one, lane by lane; NaN if either is."""
        kind = a.type
        name = f"llvm.maximum.{_name(kind)}"
        return self.builder.call(self._declared(name, ir.FunctionType(kind, [kind] * 2)), [a, b])

    def all_totals(self, vectors: Sequence[Value]) -> Value:
        """The sums of as many vectors as each has lanes, in one vector: the bits of `total`, in a third of the time.

        In every round pairs of vectors become one, in which the halves of all pieces of both have been added: pieces
        get half as long, and twice as many. The order within a piece is kept, so each sum has the order of `total`.
        """
        lanes = len(vectors)
        order = _places_of_pieces(lanes)
        vectors = [vectors[order.index(place)] for place in range(lanes)]
        length = lanes
        while len(vectors) > 1:
            low, high = _halves(lanes, length)
            vectors = [
                self.builder.fadd(self.shuffle(a, low, b), self.shuffle(a, high, b))
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            length //= 2
        return vectors[0]

    def dot(self, sums: Value, without_sign: Value, with_sign: Value) -> Value:
        """32-bit sums plus the products of four bytes each; such bytes come four to a lane."""
        kind = sums.type
        function = self._declared("llvm.x86.avx512.vpdpbusd.512", ir.FunctionType(kind, [kind] * 3))
        return self.builder.call(function, [sums, without_sign, with_sign])

    def dot_by_pairs(self, sums: Value, without_sign: Value, with_sign: Value) -> Value:
        """`dot` without VNNI, half a vector at a time. Two products must fit in 16 bits."""
        half, builder = sums.type.count // 2, self.builder
        short, bytes_ = ir.VectorType(I16, 2 * half), ir.VectorType(I8, 4 * half)
        pairs = self._declared("llvm.x86.avx2.pmadd.ub.sw", ir.FunctionType(short, [bytes_, bytes_]))
        fours = self._declared("llvm.x86.avx2.pmadd.wd", ir.FunctionType(ir.VectorType(I32, half), [short, short]))
        halves = []
        for lanes in (range(half), range(half, 2 * half)):
            operands = [builder.bitcast(self.shuffle(part, lanes), bytes_) for part in (without_sign, with_sign)]
            halves.append(builder.call(fours, [builder.call(pairs, operands), self.constant(1, short)]))
        return builder.add(sums, self.shuffle(halves[0], range(2 * half), halves[1]))

    def matrix(self, name: str, *operands: Value) -> None:
        """An instruction of the matrix unit, by the compiler's name; its registers are given by index."""
        values = [ir.Constant(I8, operand) if isinstance(operand, int) else operand for operand in operands]
        kinds = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        self.builder.call(self._declared(f"llvm.x86.{name}", kinds), values)

    def folded(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Reduce all lanes, halves first."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            low, high = self.shuffle(vector, range(half)), self.shuffle(vector, range(half, 2 * half))
            vector = join(low, high)
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def total(self, vector: Value) -> Value:
        """The sum of all lanes, halves first."""
        return self.folded(vector, self.builder.fadd)

    def exp(self, x: Value) -> Value:
        """e^x of a float vector, to 2 units in the last place; 0 below -87."""
        builder, kind = self.builder, x.type
        tiny = builder.fcmp_ordered("<", x, self.constant(_LEAST, kind))
        x = builder.select(
            builder.fcmp_ordered(">", x, self.constant(_GREATEST, kind)), self.constant(_GREATEST, kind), x
        )
        power = self.unary("rint", builder.fmul(x, self.constant(_LOG2_E, kind)))
        rest = self.fma(power, self.constant(-_LN2_HIGH, kind), x)
        rest = self.fma(power, self.constant(-_LN2_LOW, kind), rest)
        sum_ = self.constant(_EXP[0], kind)
        for coefficient in _EXP[1:]:
            sum_ = self.fma(sum_, rest, self.constant(coefficient, kind))
        sum_ = self.fma(builder.fmul(rest, rest), sum_, builder.fadd(rest, self.constant(1.0, kind)))
        whole = ir.VectorType(I32, kind.count)
        # Out of range if x is tiny or NaN: the result is replaced, or is NaN too.
        shift = builder.shl(
            builder.fptosi(builder.select(tiny, self.constant(0.0, kind), power), whole), self.constant(23, whole)
        )
        scaled = builder.bitcast(builder.add(builder.bitcast(sum_, whole), shift), kind)
        return builder.select(tiny, self.constant(0.0, kind), scaled)

    def log(self, x: Value) -> Value:
        """The natural logarithm of a float vector of normal positive numbers, to 2 units in the last place."""
        return self.log_of(*self.split(x))

    def split(self, x: Value) -> tuple[Value, Value]:
        """x as 2^power * (1 + rest), with 1 + rest between the roots of 1/2 and 2: rest and power."""
        builder, whole = self.builder, ir.VectorType(I32, x.type.count)
        bits = builder.bitcast(x, whole)
        power = builder.ashr(builder.sub(bits, self.constant(_ROOT_OF_HALF, whole)), self.constant(23, whole))
        scaled = builder.bitcast(builder.sub(bits, builder.shl(power, self.constant(23, whole))), x.type)
        return builder.fsub(scaled, self.constant(1.0, x.type)), builder.sitofp(power, x.type)

    def log_of(self, rest: Value, power: Value) -> Value:
        """The logarithm of 2^power * (1 + rest)."""
        builder, kind = self.builder, rest.type
        square = builder.fmul(rest, rest)
        sum_ = self.constant(_LOG[0], kind)
        for coefficient in (*_LOG[1:], *_LOG_LAST):
            sum_ = self.fma(sum_, rest, self.constant(coefficient, kind))
        sum_ = builder.fmul(builder.fmul(sum_, rest), square)
        sum_ = self.fma(power, self.constant(_LN2_LOW, kind), sum_)
        sum_ = self.fma(square, self.constant(-0.5, kind), sum_)
        return self.fma(power, self.constant(_LN2_HIGH, kind), builder.fadd(rest, sum_))

    def _declared(self, name: str, kinds: ir.FunctionType) -> ir.Function:
        return self.module.globals.get(name) or ir.Function(self.module, kinds, name)


def _halves(lanes: int, length: int) -> tuple[list[int], list[int]]:
    """Lanes of two vectors made of pieces: the first halves of all pieces, and the second ones.

    A piece of one vector is next to its neighbour in the other, as far as shuffles do not cross lanes.
    """
    half = length // 2
    if lanes * 4 // 16 > 1 and length > 4:
        places = [(vector, piece) for vector in range(2) for piece in range(0, lanes, length)]
    else:
        places = [(vector, piece) for piece in range(0, lanes, length) for vector in range(2)]
        if length == 2:  # four pieces of each vector per quarter: those of the first one are adjacent
            quarter = [(vector, piece) for vector in range(2) for piece in (0, 2)]
            places = [(vector, start + piece) for start in range(0, lanes, 4) for vector, piece in quarter]
    low = [vector * lanes + piece + lane for vector, piece in places for lane in range(half)]
    return low, [place + half for place in low]


def _places_of_pieces(lanes: int) -> list[int]:
    """The order of the vectors, so that lane i of `all_totals` is the sum of vector i."""
    owners = [[vector] * lanes for vector in range(lanes)]
    length = lanes
    while len(owners) > 1:
        low, _ = _halves(lanes, length)
        owners = [[(a + b)[place] for place in low] for a, b in zip(owners[::2], owners[1::2], strict=True)]
        length //= 2
    return owners[0]


def floats(lanes: int) -> ir.VectorType:
    """A vector of float32."""
    return ir.VectorType(F32, lanes)


def _bytes(kind: ir.Type) -> int:
    return {F32: 4, F64: 8}.get(kind) or math.ceil(kind.width / 8)


def _name(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_name(kind.element)}"
    return {F32: "f32", F64: "f64"}.get(kind) or f"i{kind.width}"
