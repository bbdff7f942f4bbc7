"""Receives the progress of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TuneProgress:
    """`tell` gets lines, `tick` the seconds passed, `show` the number of answers and what is being measured."""

    tell: Callable[[str], None] = lambda line: None
    tick: Callable[[float], None] = lambda seconds: None
    show: Callable[[int, str], None] = lambda answers, text: None
