"""What is not worth learning from: texts that go round in circles, and texts that were there before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Signature = npt.NDArray[np.uint64]

COPIES = 3  # a passage that stands there so often at the end of a text, one copy behind the other, is a loop
TOLERANCE = 10  # a copy may differ in one token of so many
LEAST_LOOP = 24  # tokens that are repetition: a short chant or the rule of a table is none

SHINGLE = 4  # tokens
BANDS, ROWS = 4, 5  # of a signature: two texts are taken for the same if all the rows of any band agree
SLOTS = 1 << 22  # of the memory for bands: 32 MiB, however much is written


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where the second copy of the passage begins that a text repeats until its end; None if it does not.

    One token in `TOLERANCE` may differ from copy to copy (the number of a list's entry), and the last copy may be
    unfinished. Of several periods the one counts that reaches back furthest.
    """
    text = np.asarray(tokens, np.int64)
    length = len(text)
    if length < LEAST_LOOP:
        return None
    earliest = length
    # The last token must have stood one period before the end too: few periods are left to look at.
    for back in np.flatnonzero(text[-2 : -2 - length // COPIES : -1] == text[-1]):
        period = int(back) + 1
        second = period + _repetition(np.flatnonzero(text[period:] != text[:-period]), period)
        repeated = length - second
        if repeated >= max(LEAST_LOOP, (COPIES - 1) * period):
            earliest = min(earliest, second)
    return earliest if earliest < length else None


def _repetition(differs: Ids, period: int) -> int:
    """From where on a text repeats what stood one period before, given where it differs from that."""
    allowed = period // TOLERANCE  # differences within one period
    crowded = np.flatnonzero(differs[allowed:] - differs[: max(0, len(differs) - allowed)] < period)
    start = int(differs[crowded[-1]]) + 1 if len(crowded) else 0
    rest = differs[differs >= start] - start
    return start + int((rest == np.arange(len(rest))).sum())  # it does not begin with a difference


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
    """A bijection of 64 bits in which every bit of the input reaches all of the output (wrapping is meant)."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(32))


_SALTS = _mix(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64))


class Duplicates:
    """Which texts were there before, in bounded memory: when it is full, new bands take the place of old ones."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._bands = np.zeros(slots, np.uint64)

    def knows(self, text: Signature) -> bool:
        """Whether a text so much alike was added."""
        return bool((self._bands[self._places(text)] == text).any())

    def add(self, text: Signature) -> None:
        """Remember a text."""
        self._bands[self._places(text)] = text

    def _places(self, text: Signature) -> Signature:
        return (text >> np.uint64(8)) % np.uint64(len(self._bands))  # the lowest bit is always set
