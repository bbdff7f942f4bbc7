"""Drafters: one file per method, with its options and its proposal."""

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.drafters.registry import DrafterSpec, drafter_class, drafter_names, parse_speculate

__all__ = [
    "DraftOptions",
    "DraftRequest",
    "Drafter",
    "DrafterSpec",
    "Outcome",
    "drafter_class",
    "drafter_names",
    "parse_speculate",
]
