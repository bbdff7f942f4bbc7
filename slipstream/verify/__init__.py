"""Verifiers: pure functions from (tree, distributions, noise) to an accepted path. No model, no cache, no clock."""

from __future__ import annotations

from slipstream.errors import unknown_choice
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.block import Block
from slipstream.verify.match import Match
from slipstream.verify.rejection import Rejection
from slipstream.verify.traversal import Traversal
from slipstream.verify.typical import Typical

_VERIFIERS: dict[str, type[Verifier]] = {
    verifier.name: verifier for verifier in (Match, Rejection, Block, Traversal, Typical)
}


def make_verifier(name: str) -> Verifier:
    """The verifier of that name; an unknown name is an error that lists the valid ones."""
    if name not in _VERIFIERS:
        raise unknown_choice("verifier", name, list(_VERIFIERS))
    return _VERIFIERS[name]()


__all__ = [
    "Block",
    "Distributions",
    "Match",
    "Rejection",
    "Traversal",
    "Typical",
    "Verdict",
    "Verifier",
    "make_verifier",
]
