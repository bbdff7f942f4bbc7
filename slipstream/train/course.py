"""What decides how a training goes: how long, how much at a time, how fast, how often it is examined."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slipstream.errors import OptionError

TOKENS = {"cuda": 8192, "cpu": 2048}  # of a batch, by kind of device: what fits into 24 GiB, and what is soon done
MINUTES = 10.0
_WARM_UP, _FLOOR = 100, 0.01  # steps until the full rate; the share of it that is left in the end


@dataclass(frozen=True)
class Course:
    """The settings of a training. Two trainings with the same course, data and target give the same weights on a CPU.

    `steps`: how many; or `minutes`: as many as fit, examinations included (neither: 10). `tokens`: of a batch, filling
    included (0: what suits the device). `longest`: texts are cut there. `rate`: of learning, at its highest.
    `evaluate`: steps from one examination to the next (0: twenty in all, fewer where they would take too long).
    `patience`: examinations without a new best after which training stops (0: it never does). `save`: steps from one
    safe point to the next. `prompts`, `answer`: how many held-out prompts are answered in an examination, and with how
    many tokens.
    """

    steps: int = 0
    minutes: float = 0.0
    tokens: int = 0
    longest: int = 1024
    rate: float = 3e-3
    seed: int = 0
    evaluate: int = 0
    patience: int = 10
    save: int = 500
    prompts: int = 32
    answer: int = 96

    def __post_init__(self) -> None:
        least = {"steps": 0, "minutes": 0, "tokens": 0, "longest": 2, "evaluate": 0, "patience": 0, "save": 1}
        for name, low in {**least, "prompts": 1, "answer": 1}.items():
            self._require(getattr(self, name) >= low, name, f"{low} or more")
        self._require(math.isfinite(self.rate) and self.rate > 0, "rate", "above 0")
        self._require(0 <= self.seed < 1 << 31, "seed", "0 to 2**31 - 1")
        self._require(math.isfinite(self.minutes), "minutes", "a number")
        if self.steps and self.minutes:
            raise OptionError(f"give either steps={self.steps} or minutes={self.minutes:g}, not both")

    def _require(self, ok: bool, name: str, valid: str) -> None:
        if not ok:
            raise OptionError(f"{name}={getattr(self, name)!r} is out of range", hint=f"valid: {valid}")

    def on(self, device: str) -> Course:
        """The course with what was left open filled in, as it suits a device."""
        tokens = self.tokens or TOKENS["cuda" if device.startswith("cuda") else "cpu"]
        minutes = MINUTES if not (self.steps or self.minutes) else self.minutes
        return replace(self, tokens=tokens, minutes=minutes)


def rate(course: Course, step: int, progress: float) -> float:
    """The rate of learning at a step (the first is 0), `progress` (0 to 1) of the training being done.

    Up in a line over the first steps, and down along a cosine until the end.
    """
    warm_up = min(_WARM_UP, course.steps // 10) if course.steps else _WARM_UP
    warmth = min(1.0, (step + 1) / max(1, warm_up))
    return course.rate * warmth * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)
