"""How often a draft by some of the layers is the whole model's token.

Measured at the first level of a draft: K/V of everything before the root are the whole model's, and only the root runs
through the chosen layers. One pass measures many roots of a text at once. The whole model has written the rows of the
text; after them come the same tokens again, as rows that do not attend to each other:

    slots    prompt    answer          the same tokens again
             p p p p   a0 a1 a2 a3     a0 a1 a2
                                       |  |  `- attends to p, a0 a1 and itself; predicts what follows a2
                                       |  `---- attends to p, a0 and itself
                                       `------- attends to p and itself

The rows of the text are written once, so any number of subsets can be measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE, PageTable
from slipstream.errors import PromptError
from slipstream.models.view import TargetView

LONGEST_ANSWER = PAGE_SIZE + 1  # tokens: an attention block then never has more keys than an exact GEMM may have
POSITIONS = 512  # roots in all
ROWS = 256  # of one pass
PART = 4  # a rough measurement uses one root in so many

Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Text:
    """A prompt and the model's own greedy answer to it, of LONGEST_ANSWER tokens at most."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class _Open:
    """A text whose rows are in the cache, except for the last token."""

    text: Text
    table: PageTable
    roots: npt.NDArray[np.int64]  # indices into the answer

    def segment(self, roots: npt.NDArray[np.int64]) -> Segment:
        lead, known = len(self.text.prompt), np.arange(len(self.text.answer) - 1)
        visible = np.concatenate([known < roots[:, None], np.eye(len(roots), dtype=np.bool_)], axis=1)
        tokens = [self.text.answer[root] for root in roots]
        return Segment(self.table, lead, tokens, lead + np.concatenate([known, roots]), visible, 0)


class Agreement:
    """The agreement of any subset of layers on a number of texts. Holds pages of the cache; a context manager."""

    def __init__(self, target: TargetView, texts: Sequence[Text]) -> None:
        self._target = target
        self._opened: list[_Open] = []
        usable = [text for text in texts if len(text.answer) >= 2]
        with torch.inference_mode():
            for text in usable:
                self._open(text, max(1, POSITIONS // len(usable)))
        if not self._opened:
            raise PromptError("no answer is long enough to measure drafts on", hint="give other prompts")

    def _open(self, text: Text, most: int) -> None:
        """Write the rows of a text, if the cache has room."""
        cache, every = self._target.cache, range(self._target.config.layers)
        tokens = (text.prompt + text.answer)[:-1]
        available = len(text.answer) - 1
        roots = np.unique(np.linspace(0, available - 1, min(most, available)).round().astype(np.int64))
        rows = len(tokens) + len(roots)
        if -(-rows // PAGE_SIZE) > cache.available:
            return
        table = PageTable()
        cache.reserve(table, rows)
        for start in range(0, len(tokens), ROWS):
            self._target.run([tree_segment(table, start, tokens[start : start + ROWS], None)], every)
        self._opened.append(_Open(text, table, roots))

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *exception: object) -> None:
        for opened in self._opened:
            self._target.cache.release(opened.table)
        self._opened.clear()

    @property
    def texts(self) -> int:
        """Number of texts in use."""
        return len(self._opened)

    @property
    def positions(self) -> int:
        """Number of drafts compared."""
        return sum(len(opened.roots) for opened in self._opened)

    def __call__(self, layers: Sequence[int], *, rough: bool = False) -> float:
        """The share of drafts that agree with the whole model."""
        found = np.concatenate(self.by_root(layers, rough=rough))
        return float(found.mean())

    def by_root(self, layers: Sequence[int], *, rough: bool = False) -> list[Booleans]:
        """Whether the drafts after the roots agree with the whole model, for all texts in order."""
        queries = [(opened, opened.roots[:: PART if rough else 1]) for opened in self._opened]
        right = []
        with torch.inference_mode():
            for group in _passes(queries):
                segments = [opened.segment(roots) for opened, roots in group]
                drafted = self._target.run(segments, layers).logits.argmax(dim=1).cpu().numpy()
                said = [opened.text.answer[root + 1] for opened, roots in group for root in roots]
                ends = np.cumsum([len(roots) for _, roots in group])[:-1]
                right += np.split(drafted == np.array(said), ends)
        return right


Query = tuple[_Open, npt.NDArray[np.int64]]


def _passes(queries: Sequence[Query]) -> Iterator[list[Query]]:
    """Texts in groups whose rows fit into one pass."""
    group: list[Query] = []
    for opened, roots in queries:
        if group and sum(len(known) for _, known in group) + len(roots) > ROWS:
            yield group
            group = []
        group.append((opened, roots))
    yield group
