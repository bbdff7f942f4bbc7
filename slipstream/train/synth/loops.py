"""Texts not to train on: loops, and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Signature = npt.NDArray[np.uint64]

COPIES = 3  # consecutive copies of a passage at the end of a text that make a loop
TOLERANCE = 10  # one token in so many may differ between copies
LEAST_LOOP = 24  # repeated tokens of a loop: a short chant or a table rule is not one

SHINGLE = 4  # tokens
BANDS, ROWS = 4, 5  # of a signature: two texts count as the same if all rows of any band agree
SLOTS = 1 << 22  # of the table of bands: 32 MiB, however many texts


def loop_start(tokens: Sequence[int]) -> int | None:
    """Start of the second copy of the passage that a text repeats until its end; None if there is no loop.

    One token in `TOLERANCE` may differ from copy to copy (the number of a list's entry), and the last copy may be
    incomplete. Of several periods the one that reaches back furthest counts.
    """
    text = np.asarray(tokens, np.int64)
    length = len(text)
    if length < LEAST_LOOP:
        return None
    earliest = length
    # The last token must also occur one period before the end: few periods are left to check.
    for back in np.flatnonzero(text[-2 : -2 - length // COPIES : -1] == text[-1]):
        period = int(back) + 1
        second = period + _repetition(np.flatnonzero(text[period:] != text[:-period]), period)
        repeated = length - second
        if repeated >= max(LEAST_LOOP, (COPIES - 1) * period):
            earliest = min(earliest, second)
    return earliest if earliest < length else None


def _repetition(differs: Ids, period: int) -> int:
    """Start of the repetition with this period, given where the text differs from itself one period earlier."""
    allowed = period // TOLERANCE  # differences within one period
    crowded = np.flatnonzero(differs[allowed:] - differs[: max(0, len(differs) - allowed)] < period)
    start = int(differs[crowded[-1]]) + 1 if len(crowded) else 0
    rest = differs[differs >= start] - start
    return start + int((rest == np.arange(len(rest))).sum())  # it does not start with a difference


def signature(tokens: Sequence[int]) -> Signature:
    """MinHash of a text's shingles, folded into one number per band: [BANDS].

    Texts that share the part s of their shingles agree in a band with probability s ** ROWS: of texts with nine tenths
    in common 97 in 100 agree somewhere, with a half in common 12, with a fifth almost none.
    """
    ids = np.asarray(tokens, np.int64).astype(np.uint64)
    width = max(1, min(SHINGLE, len(ids)))
    hashes = np.zeros(max(1, len(ids) - width + 1), np.uint64)
    for offset in range(width if len(ids) else 0):
        hashes = _mix(hashes + ids[offset : offset + len(hashes)])
    lowest = _mix(hashes[:, None] ^ _SALTS).min(axis=0)  # [BANDS * ROWS]
    folded = np.zeros(BANDS, np.uint64)
    for row in lowest.reshape(BANDS, ROWS).T:
        folded = _mix(folded + row)
    return _mix(folded + _SALTS[:BANDS]) | np.uint64(1)  # each band has its own numbers, and none is empty


def _mix(x: Signature) -> Signature:
    """A bijection of 64 bits that mixes every input bit into all output bits (overflow is intended)."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(32))


_SALTS = _mix(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64))


class Duplicates:
    """Near-duplicate detection in bounded memory: when it is full, new bands overwrite old ones."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._bands = np.zeros(slots, np.uint64)

    def knows(self, text: Signature) -> bool:
        """Whether a similar text was added."""
        return bool((self._bands[self._places(text)] == text).any())

    def add(self, text: Signature) -> None:
        """Add a text."""
        self._bands[self._places(text)] = text

    def _places(self, text: Signature) -> Signature:
        return (text >> np.uint64(8)) % np.uint64(len(self._bands))  # the lowest bit is always set
