"""The texts of a data set, the held-out ones, the order of the batches, the draft vocabulary.

Nothing here has state: the batches of an epoch follow from the seed and the epoch's number, so an interrupted training
continues with the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slipstream.errors import OptionError
from slipstream.train.data import ChatData

Indices = npt.NDArray[np.int64]

HELD_OUT, LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 32, 512  # share of the chats, minimum and maximum
_WINDOW = 32  # batches of texts that are sorted by length together
_COUNTED = 4096  # chats whose tokens are counted at one time


@dataclass(frozen=True)
class Page:
    """The texts of a batch, padded on the right with token 0."""

    indices: Indices  # [batch], of the texts in their data set
    tokens: torch.Tensor  # [batch, length]
    prompt_lens: torch.Tensor  # [batch]
    lengths: torch.Tensor  # [batch]

    def to(self, device: str) -> Page:
        """This page on a device."""
        parts = (part.to(device, non_blocking=True) for part in (self.tokens, self.prompt_lens, self.lengths))
        return Page(self.indices, *parts)


class Texts:
    """The chats of a data set, cut to `longest` tokens; those without a token of the target before the cut are left
    out.

    `multiple`: batch lengths are padded to a multiple of it; a GPU is slow with every new size. `training` and
    `held_out`: their indices. Which are held out depends on the number of chats alone, unless they are given.
    """

    def __init__(self, data: ChatData, longest: int, multiple: int = 1, held_out: Indices | None = None) -> None:
        self._data = data
        self._longest = longest
        self._multiple = multiple
        chats = [(len(chat.tokens), chat.prompt_len) for chat in (data[index] for index in range(len(data)))]
        whole, self._prompts = np.array(chats, np.int64).T
        self._lengths = np.minimum(whole, longest)
        mixed = _mixed(np.arange(len(data), dtype=np.uint64))
        usable = self._lengths > self._prompts
        order = np.argsort(mixed, kind="stable")
        order = order[usable[order]]
        count = min(max(LEAST_HELD_OUT, int(HELD_OUT * len(order))), MOST_HELD_OUT, len(order) // 2)
        if count == 0:
            raise OptionError(
                f"the data has {len(order)} texts with an answer in its first {longest} tokens: too few to train on",
                hint="make more with slipstream synth, or raise --longest",
            )
        self.left_out = len(data) - len(order)
        self.held_out: Indices = order[:count] if held_out is None else held_out[usable[held_out]]
        self.training: Indices = np.setdiff1d(order, self.held_out if held_out is None else held_out)

    @property
    def answer_lengths(self) -> Indices:
        """[texts]: tokens of each answer that are within the first `longest` of its text."""
        lengths: Indices = (self._lengths - self._prompts).clip(min=0)
        return lengths

    def prompt(self, index: int) -> list[int]:
        """The prompt of a chat."""
        chat = self._data[int(index)]
        ids: list[int] = chat.tokens[: chat.prompt_len].tolist()
        return ids

    def page(self, indices: Indices) -> Page:
        """A batch of these chats."""
        lengths = self._lengths[indices]
        tokens = torch.zeros(len(indices), self._whole(int(lengths.max())), dtype=torch.int64)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            tokens[row, :length] = torch.from_numpy(self._data[int(index)].tokens[:length])
        return Page(indices, tokens, torch.from_numpy(self._prompts[indices]), torch.from_numpy(lengths))

    def batches(self, seed: int, epoch: int, budget: int) -> list[Indices]:
        """The batches of an epoch: each text once, at most `budget` tokens per batch with padding (or one text).

        Texts of similar length share a batch, to pad little; the grouping and the order change with the epoch.
        """
        draw = np.random.default_rng((seed, epoch))
        shuffled = draw.permutation(self.training)
        size = max(1, int(_WINDOW * budget / self._lengths[shuffled].mean()))
        batches: list[Indices] = []
        for start in range(0, len(shuffled), size):
            window = shuffled[start : start + size]
            window = window[np.argsort(self._lengths[window], kind="stable")]
            batches.extend(_cut(window, [self._whole(int(length)) for length in self._lengths[window]], budget))
        return [batches[place] for place in draw.permutation(len(batches))]

    def vocabulary(self, size: int, ends: Iterable[int]) -> torch.Tensor:
        """The ids of the `size` most frequent tokens of the answers (0: all), ascending; `ends` are always included.

        Ties go to the lower ids.
        """
        total = self._data.vocab_size
        if size == 0 or size >= total:
            return torch.arange(total)
        counts = np.zeros(total, np.int64)
        for start in range(0, len(self.training), _COUNTED):
            some = self.training[start : start + _COUNTED]
            counts += np.bincount(np.concatenate([self._answer(index) for index in some]), minlength=total)
        counts[list(ends)] = np.iinfo(np.int64).max
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))

    def _whole(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple

    def _answer(self, index: int) -> Indices:
        return self._data[int(index)].tokens[self._prompts[index] : self._lengths[index]]


def _cut(texts: Indices, lengths: Sequence[int], budget: int) -> list[Indices]:
    """Texts of ascending length as batches: as many in each as fit when padded to the longest."""
    batches, start = [], 0
    for stop in range(1, len(texts) + 1):
        if stop == len(texts) or (stop + 1 - start) * lengths[stop] > budget:
            batches.append(texts[start:stop])
            start = stop
    return batches


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers hashed to 64 bits (splitmix; overflow is intended)."""
    x = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
