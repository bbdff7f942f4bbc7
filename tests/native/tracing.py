"""Interrupts at chosen lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def interrupted(action: Callable[[], object], files: Collection[str], line: int) -> bool:
    """Do something, and raise KeyboardInterrupt in front of the line of `files` that has this number in the order they
    run; False if it was done before that. The exception must come out.
    """
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left >= 0, "the exception was swallowed"
    return False
