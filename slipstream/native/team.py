"""The thread team: every kernel is a step of a program, and all threads run every step together."""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.ir import I32, I64, POINTER, Code, Value

KERNEL = [POINTER, I64, I64, POINTER]  # arguments of a kernel: its own, thread, threads, a counter at 0

_ARRIVED, _ROUND, _WORDS = 16, 32, 48  # places that do not share a line of the cache
_LOOKS = 2000  # checks of a barrier before a waiting thread yields its core


def _barrier(code: Code, shared: Value, threads: Value) -> None:
    """Wait until all threads have arrived; a thread that waits for long yields its core.

    OpenMP's own barrier spins without yielding, and stops spinning for good once a second thread of the process uses
    OpenMP (a user's own torch operations are enough): every barrier then costs a system call.
    """
    builder, function = code.builder, code.builder.function
    arrived, round_ = code.at(shared, _ARRIVED, I64), code.at(shared, _ROUND, I64)
    before = builder.load_atomic(round_, "acquire", 8, typ=I64)
    place = builder.atomic_rmw("add", arrived, code.whole(1), "acq_rel")
    last, waiting, giving, done = (function.append_basic_block(name) for name in ("last", "waiting", "giving", "done"))
    here = builder.block
    builder.cbranch(builder.icmp_signed("==", code.plus(place, 1), threads), last, waiting)
    builder.position_at_end(last)
    builder.atomic_rmw("xchg", arrived, code.whole(0), "release")
    builder.atomic_rmw("xchg", round_, code.plus(before, 1), "release")
    builder.branch(done)
    builder.position_at_end(waiting)
    looks = builder.phi(I64)
    now = builder.load_atomic(round_, "acquire", 8, typ=I64)
    more = code.plus(looks, 1)
    over = function.append_basic_block("over")
    builder.cbranch(builder.icmp_signed("!=", now, before), done, over)
    builder.position_at_end(over)
    builder.cbranch(builder.icmp_signed(">", more, code.whole(_LOOKS)), giving, waiting)
    builder.position_at_end(giving)
    builder.call(code._declared("sched_yield", ir.FunctionType(I32, [])), [])
    builder.branch(waiting)
    looks.add_incoming(code.whole(0), here)
    looks.add_incoming(more, over)
    looks.add_incoming(more, giving)
    builder.position_at_end(done)


def add_team(module: ir.Module) -> None:
    """`start(program, threads)`: all threads run one step after the other, with a barrier in between.

    The threads are torch's own, by the same OpenMP library: two teams would compete for the cores. There are two
    counters for dynamic scheduling within a step: while one is in use, the other is reset.
    """
    operation = ir.FunctionType(ir.VoidType(), KERNEL)
    number = ir.Function(module, ir.FunctionType(I32, []), "omp_get_thread_num")
    size = ir.Function(module, ir.FunctionType(I32, []), "omp_get_num_threads")

    def body(code: Code, shared: Value, thread: Value, threads: Value, *, wait: bool) -> None:
        program = code.address(shared, 0)
        with code.loop(0, code.load(program, 0, I64)) as index:
            place = code.plus(code.times(index, 2), 1)
            function = code.builder.inttoptr(code.load(program, place, I64), operation.as_pointer())
            arguments = code.builder.inttoptr(code.load(program, code.plus(place, 1), I64), POINTER)
            turn = code.builder.and_(index, code.whole(1))
            counter = code.at(shared, code.plus(turn, 1), I64)
            with code.when(code.builder.icmp_signed("==", thread, code.whole(0))):
                code.store(code.whole(0), shared, code.minus(2, turn))
            code.builder.call(function, [arguments, thread, threads, counter])
            if wait:
                _barrier(code, shared, threads)

    team = Code(module, "team", [POINTER])
    thread, threads = (team.builder.zext(team.builder.call(function, []), I64) for function in (number, size))
    body(team, team.arguments[0], thread, threads, wait=True)
    function = team.done()

    fork = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I32, I32]), "GOMP_parallel")
    start = Code(module, "start", [I64, I64])
    shared = start.memory(I64, _WORDS)  # the program and both counters; far from these those of `_barrier`
    for place, value in [(0, start.arguments[0]), (1, 0), (2, 0), (_ARRIVED, 0), (_ROUND, 0)]:
        start.store(start.whole(value), shared, place)
    builder = start.builder
    with builder.if_else(builder.icmp_signed("==", start.arguments[1], start.whole(1))) as (alone, together):
        with alone:
            body(start, shared, start.whole(0), start.whole(1), wait=False)
        with together:
            builder.call(fork, [function, shared, builder.trunc(start.arguments[1], I32), ir.Constant(I32, 0)])
    start.done()
