"""Verifiers: pure functions from (tree, distributions, noise) to an accepted path. No model, no cache, no clock."""

from __future__ import annotations

from slipstream.errors import unknown_choice
from slipstream.verify.base import Distributions, Verdict, Verifier
from slipstream.verify.match import Match
from slipstream.verify.rejection import Rejection

_VERIFIERS: dict[str, type[Verifier]] = {"match": Match, "rejection": Rejection}


def make_verifier(name: str) -> Verifier:
    """The verifier of that name; an unknown name is refused with the valid ones."""
    if name not in _VERIFIERS:
        raise unknown_choice("verifier", name, list(_VERIFIERS))
    return _VERIFIERS[name]()


__all__ = ["Distributions", "Match", "Rejection", "Verdict", "Verifier", "make_verifier"]
