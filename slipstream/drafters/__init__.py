"""Drafters: one file per method, with its options and its proposal."""

from slipstream.drafters.base import Drafter, DraftOptions, Outcome, Wish
from slipstream.drafters.registry import DrafterSpec, drafter_class, drafter_names, parse_speculate

__all__ = [
    "DraftOptions",
    "Drafter",
    "DrafterSpec",
    "Outcome",
    "Wish",
    "drafter_class",
    "drafter_names",
    "parse_speculate",
]
