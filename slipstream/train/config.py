"""Settings of a training: its length, batch size, learning rate and evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slipstream.checks import Checked
from slipstream.errors import OptionError

TOKENS = {"cuda": 8192, "cpu": 2048}  # of a batch, by device: fits into 24 GiB; quick on a CPU
MINUTES = 10.0
_WARM_UP, _FLOOR = 100, 0.01  # warm-up steps; share of the rate at the end


@dataclass(frozen=True)
class TrainConfig(Checked):
    """The settings of a training. The same config, data and target give the same weights on a CPU.

    `steps`: how many; or `minutes`: as many as fit, evaluations included (neither: 10). `tokens`: of a batch, padding
    included (0: a default of the device). `longest`: texts are cut there. `rate`: the highest learning rate.
    `evaluate`: steps between evaluations (0: twenty in all, fewer if they would take too long). `patience`: evaluations
    without a new best before training stops (0: never). `save`: steps between saved states. `prompts`, `answer`:
    held-out prompts per evaluation, and tokens of their answers.
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
            self.require(getattr(self, name) >= low, name, f"{low} or more")
        self.require(math.isfinite(self.rate) and self.rate > 0, "rate", "above 0")
        self.require(0 <= self.seed < 1 << 31, "seed", "0 to 2**31 - 1")
        self.require(math.isfinite(self.minutes), "minutes", "a number")
        if self.steps and self.minutes:
            raise OptionError(f"give either steps={self.steps} or minutes={self.minutes:g}, not both")

    def on(self, device: str) -> TrainConfig:
        """The config with defaults of a device filled in."""
        tokens = self.tokens or TOKENS["cuda" if device.startswith("cuda") else "cpu"]
        minutes = MINUTES if not (self.steps or self.minutes) else self.minutes
        return replace(self, tokens=tokens, minutes=minutes)


def rate(config: TrainConfig, step: int, progress: float) -> float:
    """The learning rate at a step (the first is 0) after the share `progress` (0 to 1) of the training.

    Linear warm-up, then a cosine.
    """
    warm_up = min(_WARM_UP, config.steps // 10) if config.steps else _WARM_UP
    ramp = min(1.0, (step + 1) / max(1, warm_up))
    return config.rate * ramp * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)
