"""An engine on a clock that only counts: passes and drafts take what a test says, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM


class VirtualClock:
    """`ms` is the present."""

    def __init__(self, llm: LLM, pass_ms: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        """`pass_ms`: of a pass by its rows."""
        self.ms = 0.0
        forward = llm.model.forward

        def timed(cache: Any, store: Any, segments: Any, **how: Any) -> Any:
            self.ms += pass_ms(sum(segment.rows for segment in segments))
            return forward(cache, store, segments, **how)

        monkeypatch.setattr(llm.model, "forward", timed)
        monkeypatch.setattr(time, "perf_counter", lambda: self.ms / 1000)
