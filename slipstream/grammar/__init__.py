"""Structured output: grammars, and what they allow at every node of a tree. llguidance does the matching."""

from slipstream.grammar.compiler import Grammars
from slipstream.grammar.constraint import Constraint

__all__ = ["Constraint", "Grammars"]
