"""The kernels, by what they are for; compiled when they are first asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from slipstream.native.compiler import Library, library
from slipstream.native.machine import Machine, machine
from slipstream.native.shape import Shape

if TYPE_CHECKING:
    from llvmlite import ir

DIGIT_ROWS = 4  # of a tile of an 8-bit or 4-bit product


@functools.cache
def products() -> Library:
    """`norm` and `top` of whole vectors, `product` and, with the instruction for 8 bits, `pack`, `cut` and
    `digit_product` (8-bit weights), `cut_groups` and `nibble_product` (4-bit weights).

    Each product has twins: `..._added` adds to what is there, the results of `..._gated` are gates and values. And each
    cut has one that norms first, `..._normed`.
    """
    return library(repr(here()), functools.partial(_products, here()))


@functools.cache
def layers(shape: Shape) -> Library:
    """`norm`, `turn` and `attend` for layers of one shape."""
    return library(repr(shape), functools.partial(_layers, shape))


def here() -> Machine:
    """This machine, for those who know that it will do."""
    found = machine()
    assert found is not None
    return found


def _products(machine: Machine, module: ir.Module) -> None:
    from slipstream.native import digits, nibbles, squares
    from slipstream.native import products as plain
    from slipstream.native.packing import add_pack
    from slipstream.native.rows import add_norm
    from slipstream.native.top import add_top

    for twin, ending in (("", plain.written), ("_added", plain.added), ("_gated", plain.gated)):
        plain.add_product(module, f"product{twin}", machine.lanes, machine.tile_rows, ending)
        if machine.digits:
            name = f"digit_product{twin}"
            if machine.squares:
                squares.add_choice(
                    module, name, digits.add_product(module, f"{name}.vectors", DIGIT_ROWS, ending), ending
                )
            else:
                digits.add_product(module, name, DIGIT_ROWS, ending)
            nibbles.add_product(module, f"nibble_product{twin}", DIGIT_ROWS, ending)
    add_top(module, "top", machine.lanes)
    add_norm(module, "norm", machine.lanes)
    if machine.digits:
        add_pack(module, "pack")
        for normed in (False, True):
            twin = "_normed" if normed else ""
            digits.add_cut(module, f"cut{twin}", normed=normed)
            digits.add_cut(module, f"cut_groups{twin}", normed=normed, grouped=True)


def _layers(shape: Shape, module: ir.Module) -> None:
    from slipstream.native.attention import add_attention
    from slipstream.native.rows import add_norm, add_turn

    add_norm(module, "norm", shape.row_lanes)
    add_turn(module, "turn", shape)
    add_attention(module, "attend", shape)
