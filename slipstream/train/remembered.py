"""Caches the target's outputs on a text for the next epoch.

A head that reads no hidden states of the target learns from its probabilities alone, and a few of them cover nearly the
whole distribution of a row. With those cached, the target need not read the text again, which is two thirds of the
compute of a training step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slipstream.drafters.heads.head import Head, Lesson, Rows
from slipstream.train.lessons import Indices, Page, Texts
from slipstream.train.teacher import own_words

_MOST, _LEAST = 64, 16  # draft tokens kept per row: 64 cover 98% of the probability of all, 16 cover 94%
_ROOM = 8 << 30  # bytes
_FREE = 0.25  # largest share of the free device memory


class Remembered:
    """The `kept` likeliest draft tokens of every row to learn from; initially empty."""

    def __init__(self, counts: Indices, kept: int, vocab: torch.Tensor, dtype: torch.dtype) -> None:
        """`counts`: such rows per text. `vocab`: the draft tokens. `dtype`: of probabilities."""
        total, self._kept, self._tokens_in_all = int(counts.sum()), kept, len(vocab)
        self._counts = counts
        self._starts = np.cumsum(counts) - counts  # start of each text's rows
        self._known = np.zeros(len(counts), np.bool_)
        self._shares = torch.empty(total, kept, dtype=dtype, device=vocab.device)
        self._tokens = torch.empty(total, kept, dtype=_index_type(len(vocab)), device=vocab.device)
        self._best = torch.empty(total, dtype=torch.int32, device=vocab.device)
        self._reread: Callable[[torch.Tensor], torch.Tensor] | None = None

    def lesson(self, page: Page, rows: Rows, ask: Callable[[], Lesson]) -> Lesson:
        """The lesson of a page with `rows` to learn from. The target reads it only if a text is new."""
        if self._known[page.indices].all():
            return self._recalled(page, rows)
        lesson = ask()
        self._keep(page, rows, lesson)
        return lesson

    def _keep(self, page: Page, rows: Rows, lesson: Lesson) -> None:
        where = self._where(page.indices)
        places = rows.places[: len(where)]  # without padding
        shares, tokens = lesson.probabilities.flatten(0, 1)[places].topk(self._kept)
        self._shares[where] = shares
        self._tokens[where] = tokens.to(self._tokens.dtype)
        self._best[where] = lesson.best.flatten()[places].to(self._best.dtype)
        self._known[page.indices] = True
        self._reread = lesson.reread  # the same for every lesson

    def _recalled(self, page: Page, rows: Rows) -> Lesson:
        where = self._where(page.indices)
        places = rows.places[: len(where)]
        shape = page.tokens.shape
        probabilities = self._shares.new_zeros(shape.numel(), self._tokens_in_all)
        probabilities[places[:, None], self._tokens[where].long()] = self._shares[where]
        best = torch.full((shape.numel(),), -1, device=places.device)
        best[places] = self._best[where].long()
        learn = own_words(page.tokens, page.prompt_lens, page.lengths)
        return Lesson(
            page.tokens, learn, {}, probabilities.view(*shape, -1), best.view(shape), self._reread, known_rows=rows
        )

    def _where(self, texts: Indices) -> torch.Tensor:
        """Where the rows of these texts are kept, text by text: their order in a page."""
        counts = self._counts[texts]
        before = np.cumsum(counts) - counts
        where = np.repeat(self._starts[texts] - before, counts) + np.arange(counts.sum())
        return torch.from_numpy(where).to(self._best.device, non_blocking=True)


def remembered(head: Head, texts: Texts) -> Remembered | None:
    """The cache for a training of this head; None if there is none.

    There is none on a CPU: an interrupted training must give the same weights as an uninterrupted one, bit for bit, and
    a text that is read again in another batch may differ in the last bits.
    """
    vocab, rows = head.frame.vocab, head.frame.rows
    if not head.top_is_enough or not vocab.is_cuda:
        return None
    counts = texts.answer_lengths
    room = min(_ROOM, int(_FREE * torch.cuda.mem_get_info(vocab.device)[0]))
    kept = fitting(int(counts.sum()), len(vocab), rows.element_size(), room)
    return Remembered(counts, kept, vocab, rows.dtype) if kept else None


def fitting(rows: int, tokens: int, share_bytes: int, room: int) -> int:
    """Number of draft tokens, out of `tokens`, that can be kept per row in `room` bytes; 0: too few to learn from."""
    each = share_bytes + _index_type(tokens).itemsize
    kept = min(_MOST, tokens, (room // rows - torch.int32.itemsize) // each)
    return kept if kept >= min(_LEAST, tokens) else 0


def _index_type(tokens: int) -> torch.dtype:
    return torch.int16 if tokens <= torch.iinfo(torch.int16).max else torch.int32
