"""The team of threads: every kernel is a step of a program, and all threads take every step together."""

from __future__ import annotations

from llvmlite import ir

from slipstream.native.emit import I32, I64, POINTER, Code, Value

KERNEL = [POINTER, I64, I64, POINTER]  # what a kernel is called with: words, thread, threads, a counter at 0


def add_team(module: ir.Module) -> None:
    """`start(program, threads)`: all threads take one step after the other, and wait for each other in between.

    The threads are torch's own, by the same OpenMP library: two teams would fight for the cores. There are two counters
    for parts of a step that threads take one by one: while the one is in use, the other is set back.
    """
    operation = ir.FunctionType(ir.VoidType(), KERNEL)
    barrier = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "GOMP_barrier")
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
                code.builder.call(barrier, [])

    team = Code(module, "team", [POINTER])
    thread, threads = (team.builder.zext(team.builder.call(function, []), I64) for function in (number, size))
    body(team, team.arguments[0], thread, threads, wait=True)
    function = team.done()

    fork = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I32, I32]), "GOMP_parallel")
    start = Code(module, "start", [I64, I64])
    shared = start.memory(I64, 3)  # the program and both counters
    for place, value in enumerate((start.arguments[0], 0, 0)):
        start.store(start.whole(value), shared, place)
    builder = start.builder
    with builder.if_else(builder.icmp_signed("==", start.arguments[1], start.whole(1))) as (alone, together):
        with alone:
            body(start, shared, start.whole(0), start.whole(1), wait=False)
        with together:
            builder.call(fork, [function, shared, builder.trunc(start.arguments[1], I32), ir.Constant(I32, 0)])
    start.done()
