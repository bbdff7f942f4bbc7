"""Whom a search tells how it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`tell` gets lines, `tick` the seconds that are gone."""

    tell: Callable[[str], None] = lambda line: None
    tick: Callable[[float], None] = lambda seconds: None
