"""Ratios of sums over prompts, with 95% intervals by a paired, stratified bootstrap over prompts.

All settings are measured on the same prompts, so one draw of prompts serves all of them: what makes a prompt slow for
one setting and for plain decoding alike cancels. Strata are the categories. Each draw takes n - 1 of a stratum's n
prompts and scales them to n, which keeps the variance unbiased where a stratum is small. The standard error of the
ratio's logarithm over all draws, times Student's quantile, gives the interval: percentiles of the draws themselves
would be too narrow with three or four prompts per category.

An interval is for the prompts of a file, of which some were measured: with all of them measured, only the noise of
measuring is left (the finite population correction of sampling surveys).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Statistic = Callable[[Column], Column]  # of weights [draws, prompts]: a value for each draw

DRAWS = 1000
_LEVEL = 0.975
_LEAST_FREEDOM = 2  # two prompts, one degree of freedom: the interval would span a factor of a hundred


class Interval(NamedTuple):
    """A ratio and its 95% interval; the bounds are None if there are too few prompts to estimate their spread."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> float:
        """Half the width, relative to the value; infinite without bounds."""
        if self.low is None or self.high is None or not self.value:
            return math.inf
        return (self.high - self.low) / (2 * self.value)

    @property
    def above_one(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1.0

    @property
    def below_one(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high is not None and self.high < 1.0


class Bootstrap:
    """Weights of prompts in many draws.

    `shares`: how much each prompt counts (the size of its category's share). `open_part`: how much of a prompt's
    variance is left to chance. 1: prompts stand for all that are like them; less: for the rest of their file.
    """

    def __init__(
        self,
        strata: Sequence[Hashable],
        shares: Column | None = None,
        open_part: Column | None = None,
        seed: int = 0,
    ) -> None:
        count = len(strata)
        sizes = Counter(strata)
        # Strata of one prompt have no spread of their own: they are drawn together.
        names = [stratum if sizes[stratum] > 1 else _ALONE for stratum in strata]
        self._shares = np.ones(count) if shares is None else np.asarray(shares, np.float64)
        self._draws = np.ones((DRAWS, count))
        self.freedom = 0
        rng = np.random.default_rng(seed)
        for stratum in dict.fromkeys(names):
            members = [index for index, name in enumerate(names) if name == stratum]
            size = len(members)
            if size > 1:
                drawn = rng.multinomial(size - 1, np.full(size, 1 / size), DRAWS)
                self._draws[:, members] = drawn * (size / (size - 1))
                self.freedom += size - 1
        if open_part is not None:
            self._draws = 1.0 + np.sqrt(np.asarray(open_part, np.float64)) * (self._draws - 1.0)

    @property
    def shares(self) -> Column:
        """How much each prompt counts."""
        return self._shares

    def ratio(self, above: Column, below: Column, besides: float = 0.0) -> Interval:
        """The ratio of two weighted sums."""
        return self.interval(lambda weights: (weights @ above) / (weights @ below), besides)

    def ratio_of_ratios(
        self, above: tuple[Column, Column], below: tuple[Column, Column], besides: float = 0.0
    ) -> Interval:
        """The ratio of two ratios of sums: (a / b) / (c / d)."""
        return self.interval(
            lambda weights: (weights @ above[0] * (weights @ below[1])) / (weights @ above[1] * (weights @ below[0])),
            besides,
        )

    def interval(self, statistic: Statistic, besides: float = 0.0) -> Interval:
        """A positive statistic of weighted prompts, with its interval. `besides`: relative variance of its own."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(self._shares[None, :])[0])
            drawn = statistic(self._draws * self._shares)
        drawn = drawn[np.isfinite(drawn) & (drawn > 0)]
        if not math.isfinite(value) or value <= 0:
            return Interval(value if math.isfinite(value) else 0.0)
        if self.freedom < _LEAST_FREEDOM or len(drawn) < DRAWS // 2:
            return Interval(value)
        error = math.sqrt(float(np.log(drawn).var(ddof=1)) + besides) * student(self.freedom)
        return Interval(value, value * math.exp(-error), value * math.exp(error))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t."""
    if freedom == 1:
        return math.tan(math.pi * (_LEVEL - 0.5))
    if freedom == 2:
        return (2 * _LEVEL - 1) / math.sqrt(2 * _LEVEL * (1 - _LEVEL))
    z, n = 1.959963984540054, freedom
    terms = (  # the expansion around the normal quantile
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


_ALONE = object()
