"""The kernel libraries, compiled on first use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from slipstream.native.compiler import Library, library
from slipstream.native.machine import Machine, has_amx, machine
from slipstream.native.shape import Shape

if TYPE_CHECKING:
    from llvmlite import ir

    from slipstream.native.gemm.float_gemm import Ending


@functools.cache
def float32() -> Library:
    """`float32_gemm`, and `norm` and `top` of whole vectors.

    It has variants: `..._added` adds to the output, `..._gated` has gates and values as results.
    """
    return library(f"float32 {here()!r}", functools.partial(_float32, here()))


@functools.cache
def int8() -> Library:
    """For 8-bit weights: `pack`, `unpack`, `int8_gemm`, and `cut`, with a variant `cut_normed` that norms first."""
    amx = has_amx()
    return library(f"int8 {here()!r} {amx}", functools.partial(_int8, here(), amx))


@functools.cache
def int4() -> Library:
    """For 4-bit weights, likewise: `int4_gemm`, and `cut_groups` with a variant `cut_groups_normed`."""
    return library(f"int4 {here()!r}", functools.partial(_int4, here()))


@functools.cache
def layers(shape: Shape) -> Library:
    """`norm`, `rotate` and `attend` for layers of one shape."""
    return library(repr(shape), functools.partial(_layers, shape))


@functools.cache
def noise() -> Library:
    """For Gumbel noise: `draw`, `perturb`, and variants `..._listed` for tokens whose ids are given."""
    return library(f"noise {here()!r}", functools.partial(_noise, here()))


def here() -> Machine:
    """This machine, for callers that know that it is supported."""
    found = machine()
    assert found is not None
    return found


def _endings() -> tuple[tuple[str, Ending], ...]:
    from slipstream.native.gemm.float_gemm import added, gated, written

    return ("", written), ("_added", added), ("_gated", gated)


def _float32(machine: Machine, module: ir.Module) -> None:
    from slipstream.native.gemm.few_rows_gemm import add_choice
    from slipstream.native.gemm.float_gemm import add_gemm
    from slipstream.native.rows import add_norm
    from slipstream.native.top import add_top

    for twin, ending in _endings():
        name, facts = f"float32_gemm{twin}", (machine.lanes, machine.tile_rows, machine.piece, ending)
        if machine.few_rows_sums:
            by_tiles = add_gemm(module, f"{name}.tiles", *facts)
            add_choice(module, name, by_tiles, machine.lanes, machine.few_rows_sums, ending)
        else:
            add_gemm(module, name, *facts)
    add_top(module, "top", machine.lanes)
    add_norm(module, "norm", machine.lanes)


def _int8(machine: Machine, amx: bool, module: ir.Module) -> None:
    from slipstream.native.gemm.amx import add_choice
    from slipstream.native.gemm.int8_gemm import add_gemm, add_quantize
    from slipstream.native.gemm.packing import add_pack, add_unpack

    add_pack(module, "pack")
    add_unpack(module, "unpack")
    for twin, ending in _endings():
        name = f"int8_gemm{twin}"
        if amx:
            add_choice(module, name, add_gemm(module, f"{name}.vectors", ending, vnni=machine.vnni), ending)
        else:
            add_gemm(module, name, ending, vnni=machine.vnni)
    add_quantize(module, "cut", normed=False)
    add_quantize(module, "cut_normed", normed=True)


def _int4(machine: Machine, module: ir.Module) -> None:
    from slipstream.native.gemm.int4_gemm import add_gemm
    from slipstream.native.gemm.int8_gemm import add_quantize

    for twin, ending in _endings():
        add_gemm(module, f"int4_gemm{twin}", ending, vnni=machine.vnni)
    add_quantize(module, "cut_groups", normed=False, grouped=True)
    add_quantize(module, "cut_groups_normed", normed=True, grouped=True)


def _layers(shape: Shape, module: ir.Module) -> None:
    from slipstream.native.attention import add_attention
    from slipstream.native.rows import add_norm, add_rotate

    add_norm(module, "norm", shape.row_lanes)
    add_rotate(module, "rotate", shape)
    add_attention(module, "attend", shape)


def _noise(machine: Machine, module: ir.Module) -> None:
    from slipstream.native.gumbel import add_draw, add_perturb

    for twin, listed in (("", False), ("_listed", True)):
        add_draw(module, f"draw{twin}", machine.lanes, listed=listed)
        add_perturb(module, f"perturb{twin}", machine.lanes, listed=listed)
