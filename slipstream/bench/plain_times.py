"""Plain decoding's time as a function of lengths, fitted to the answers that were measured.

A plain step costs the same whatever its token is, so a few plain answers predict the times of the others. The bench
spends its time on answers of drafters instead, which differ from prompt to prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEAST = 12  # plain answers below which nothing is fitted
_PASSES = 4


class Length(NamedTuple):
    """What a plain answer's time depends on."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class PlainTimes:
    """ms = a * tokens + b * prompt + c * tokens * (mean context), and how well that is known."""

    coefficients: Array
    covariance: Array
    noise: float  # standard deviation of a measured time, relative to the fitted one

    def ms(self, lengths: Sequence[Length]) -> Array:
        """The time of each answer."""
        return _features(lengths) @ self.coefficients

    def variance(self, lengths: Sequence[Length], shares: Array) -> float:
        """The relative variance of the answers' weighted sum: how well the fit knows it."""
        total = shares @ _features(lengths)
        return float(total @ self.covariance @ total / (total @ self.coefficients) ** 2)


def fit(lengths: Sequence[Length], ms: Sequence[float]) -> PlainTimes | None:
    """Least squares of errors relative to the fitted times; None with too few answers."""
    if len(ms) < LEAST:
        return None
    features, times = _features(lengths), np.asarray(ms, np.float64)
    expected = features[:, 0] * (times.sum() / features[:, 0].sum())
    for _ in range(_PASSES):  # relative to the measured times themselves, slow answers would count too little
        rows = features / expected[:, None]
        scale = np.maximum(np.abs(rows).max(axis=0), 1e-12)
        inverse = np.linalg.pinv((rows / scale).T @ (rows / scale), rcond=1e-10) / np.outer(scale, scale)
        coefficients = inverse @ rows.T @ (times / expected)
        expected = np.maximum(features @ coefficients, times.min() / 2)
    errors = (times - features @ coefficients) / expected
    variance = float(errors @ errors) / (len(ms) - features.shape[1])
    return PlainTimes(coefficients, variance * inverse, math.sqrt(variance))


def _features(lengths: Sequence[Length]) -> Array:
    return np.array([(n, prompt, n * (prompt + n / 2)) for prompt, n in lengths], np.float64).reshape(-1, 3)
