"""The kernels, by what they are for; compiled when they are first asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from slipstream.native.compiler import Library, library
from slipstream.native.machine import Machine, machine, squares
from slipstream.native.shape import Shape

if TYPE_CHECKING:
    from llvmlite import ir

    from slipstream.native.products import Ending


@functools.cache
def products() -> Library:
    """`product`, and `norm` and `top` of whole vectors.

    Every product has twins: `..._added` adds to what is there, the results of `..._gated` are gates and values.
    """
    return library(f"products {here()!r}", functools.partial(_products, here()))


@functools.cache
def digits() -> Library:
    """For 8-bit weights: `pack`, `digit_product`, and `cut`, with a twin `cut_normed` that norms first."""
    by_squares = squares()
    return library(f"digits {here()!r} {by_squares}", functools.partial(_digits, here(), by_squares))


@functools.cache
def nibbles() -> Library:
    """For 4-bit weights, likewise: `nibble_product`, and `cut_groups` with a twin `cut_groups_normed`."""
    return library(f"nibbles {here()!r}", functools.partial(_nibbles, here()))


@functools.cache
def layers(shape: Shape) -> Library:
    """`norm`, `turn` and `attend` for layers of one shape."""
    return library(repr(shape), functools.partial(_layers, shape))


def here() -> Machine:
    """This machine, for those who know that it will do."""
    found = machine()
    assert found is not None
    return found


def _endings() -> tuple[tuple[str, Ending], ...]:
    from slipstream.native.products import added, gated, written

    return ("", written), ("_added", added), ("_gated", gated)


def _products(machine: Machine, module: ir.Module) -> None:
    from slipstream.native.abreast import add_choice
    from slipstream.native.products import add_product
    from slipstream.native.rows import add_norm
    from slipstream.native.top import add_top

    for twin, ending in _endings():
        name, facts = f"product{twin}", (machine.lanes, machine.tile_rows, machine.piece, ending)
        if machine.abreast:
            by_tiles = add_product(module, f"{name}.tiles", *facts)
            add_choice(module, name, by_tiles, machine.lanes, machine.abreast, ending)
        else:
            add_product(module, name, *facts)
    add_top(module, "top", machine.lanes)
    add_norm(module, "norm", machine.lanes)


def _digits(machine: Machine, by_squares: bool, module: ir.Module) -> None:
    from slipstream.native.digits import add_cut, add_product
    from slipstream.native.packing import add_pack
    from slipstream.native.squares import add_choice

    add_pack(module, "pack")
    for twin, ending in _endings():
        name = f"digit_product{twin}"
        if by_squares:
            add_choice(module, name, add_product(module, f"{name}.vectors", ending, dots=machine.dots), ending)
        else:
            add_product(module, name, ending, dots=machine.dots)
    add_cut(module, "cut", normed=False)
    add_cut(module, "cut_normed", normed=True)


def _nibbles(machine: Machine, module: ir.Module) -> None:
    from slipstream.native.digits import add_cut
    from slipstream.native.nibbles import add_product

    for twin, ending in _endings():
        add_product(module, f"nibble_product{twin}", ending, dots=machine.dots)
    add_cut(module, "cut_groups", normed=False, grouped=True)
    add_cut(module, "cut_groups_normed", normed=True, grouped=True)


def _layers(shape: Shape, module: ir.Module) -> None:
    from slipstream.native.attention import add_attention
    from slipstream.native.rows import add_norm, add_turn

    add_norm(module, "norm", shape.row_lanes)
    add_turn(module, "turn", shape)
    add_attention(module, "attend", shape)
