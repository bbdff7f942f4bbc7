"""Penalties, bias and masks of lanes on the device: `Sampler.adjusted` for all rows of a round at once.

Every lane has a row over the vocabulary that says how often each token came (in the answer; and whether in the prompt),
kept up to date by rounds, and a row that is added to its logits: bias, and -inf for what may never come. Tokens on the
path to a node of a tree count on the fly. What is forbidden only after certain tokens (bad words of several tokens) or
only for a while (end tokens before `min_tokens`) is a short list per lane.

Branches for tensors that are not on a GPU are the reference of the kernels: only tests run them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from slipstream.gpu.fused import runs_fused
from slipstream.gpu.lanes import Lanes
from slipstream.sampling import Sampler
from slipstream.sequence import Sequence

ENTRIES = 64  # length of the list of tokens that are forbidden at times
BEFORE = 7  # tokens that a bad word may have before its last one
IN_PROMPT = 1 << 30  # added to the count of a token that the prompt has
BIASED, REPEATED, COUNTED = 1, 2, 4  # flags: what a lane's logits need
_ANY, _NOTHING = -1, -2  # in place of a token: every token fits; there is no token
_ALWAYS = 1 << 40


class Entry(NamedTuple):
    """`token` is forbidden after the tokens `before`, up to position `until`."""

    token: int
    before: tuple[int, ...]
    until: int


def entries_of(sampler: Sampler) -> list[Entry]:
    """What is forbidden at times: the ends of bad words of several tokens, and end tokens before `min_tokens`."""
    words = sampler.bad_words.words if sampler.bad_words is not None else []
    entries = [Entry(word[-1], tuple(word[:-1]), _ALWAYS) for word in words if len(word) > 1]
    if sampler.params.min_tokens:
        until = sampler.prompt_length + sampler.params.min_tokens
        entries += [Entry(token, (), until) for token in sampler.masked_ids]
    return entries


def bias_of(sampler: Sampler, vocabulary: int) -> torch.Tensor | None:
    """What is always added to the logits, float32 [vocabulary]; None: nothing."""
    params = sampler.params
    single = [word[0] for word in (sampler.bad_words.words if sampler.bad_words else []) if len(word) == 1]
    if not (params.bias or single or params.allowed_token_ids is not None):
        return None
    row = torch.zeros(vocabulary)
    if params.allowed_token_ids is not None:
        row.fill_(-math.inf)[list(params.allowed_token_ids)] = 0.0
    row[single] = -math.inf
    row[list(params.bias)] += torch.tensor(list(params.bias.values()), dtype=torch.float32)
    return row


def fits_lanes(sampler: Sampler, vocabulary: int) -> bool:
    """Whether lanes can hold what a sampler asks for, and some token may come whatever the list forbids."""
    entries = entries_of(sampler)
    if len(entries) > ENTRIES or any(len(entry.before) > BEFORE for entry in entries):
        return False
    row = bias_of(sampler, vocabulary)
    return row is None or int((row > -math.inf).sum()) > len(entries)


class Adjustments:
    """The tables of lanes of one size."""

    def __init__(self, lanes: Lanes, vocabulary: int) -> None:
        size, device = lanes.size, lanes.device
        self._lanes = lanes
        self._vocabulary = vocabulary
        self.flags = torch.zeros(size, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(3, size, dtype=torch.float32, device=device)  # repetition, presence, frequency
        self.bias = torch.zeros(size, vocabulary, dtype=torch.float32, device=device)
        self.counts = torch.zeros(size, vocabulary, dtype=torch.int32, device=device)
        # The last tokens of the answer up to the root, and the list: token, tokens before it, position.
        self.tail = torch.full((size, BEFORE), _NOTHING, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, ENTRIES, dtype=torch.int64, device=device)
        self.before = torch.full((size, ENTRIES, BEFORE), _ANY, dtype=torch.int64, device=device)
        self.until = torch.zeros(size, ENTRIES, dtype=torch.int64, device=device)
        self._taken = torch.arange(lanes.depth + 1, device=device)
        self._places = torch.arange(BEFORE, device=device)

    def fill(self, sequences: Mapping[int, Sequence | None]) -> None:
        """Set lanes up for these sequences; None: a free lane."""
        for lane, sequence in sequences.items():
            if sequence is None or not sequence.params.adjusts:
                self.flags[lane] = 0
                self.until[lane] = 0
            else:
                self._fill(lane, sequence)

    def _fill(self, lane: int, sequence: Sequence) -> None:
        params, sampler = sequence.params, sequence.sampler
        row, entries = bias_of(sampler, self._vocabulary), entries_of(sampler)
        counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        repeated = params.repetition_penalty != 1.0
        if row is not None:
            self.bias[lane].copy_(row)
        if counted or repeated:
            counts = np.bincount(sequence.output_ids, minlength=self._vocabulary).astype(np.int32)
            counts[np.unique(sequence.request.prompt_ids)] += IN_PROMPT
            self.counts[lane].copy_(torch.from_numpy(counts))
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.penalties[:, lane].copy_(torch.tensor(penalties, dtype=torch.float32))
        self.flags[lane] = BIASED * (row is not None) + REPEATED * repeated + COUNTED * counted
        self.until[lane] = 0
        if entries:
            last = [*[_NOTHING] * BEFORE, *sequence.output_ids[-BEFORE:]][-BEFORE:]
            self.tail[lane].copy_(torch.tensor(last))
            count = len(entries)
            self.tokens[lane, :count].copy_(torch.tensor([entry.token for entry in entries]))
            before = [[*[_ANY] * (BEFORE - len(entry.before)), *entry.before] for entry in entries]
            self.before[lane, :count].copy_(torch.tensor(before))
            self.until[lane, :count].copy_(torch.tensor([entry.until for entry in entries]))

    # -- in a round ---------------------------------------------------------------------------------------------------

    def adjusted(self, logits: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The logits that the lanes choose by, float32 [rows, vocabulary].

        logits [lanes * (1 + nodes), vocabulary], of the roots and nodes of the lanes' trees; after int64 [rows]: the
        positions of the tokens that are chosen.
        """
        if runs_fused(logits):
            from slipstream.gpu.kernels.adjust_kernels import adjust

            return adjust(self, self._lanes, logits, after)
        lanes, each = self._lanes, 1 + self._lanes.nodes

        def by_row(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(each, 0)

        scores, flags = logits.float(), by_row(self.flags)[:, None]
        scores = torch.where(flags & BIASED > 0, scores + by_row(self.bias), scores)
        counts = by_row(self.counts)
        own = torch.arange(each, device=logits.device).expand(lanes.size, each)
        for _ in range(lanes.depth):  # the tokens from each node up to the root
            token = lanes.tokens.gather(1, own).view(-1, 1)
            counts.scatter_add_(1, token, (own > 0).int().view(-1, 1))
            own = lanes.parents.gather(1, own)
        repetition, presence, frequency = (by_row(values)[:, None] for values in self.penalties)
        eased = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where((flags & REPEATED > 0) & (counts > 0), eased, scores)
        said = counts & (IN_PROMPT - 1)
        scores = torch.where((flags & COUNTED > 0) & (said > 0), scores - (frequency * said + presence), scores)
        context = self._contexts()
        fits = (by_row(self.before) == context[:, None]) | (by_row(self.before) == _ANY)
        forbidden = fits.all(2) & (after[:, None] < by_row(self.until))
        return scores.scatter_reduce(1, by_row(self.tokens), torch.where(forbidden, -math.inf, math.inf), "amin")

    def _contexts(self) -> torch.Tensor:
        """The last tokens up to each node, int64 [rows, BEFORE]."""
        lanes = self._lanes
        own = torch.arange(1 + lanes.nodes, device=lanes.tokens.device).expand_as(lanes.tokens)
        above = torch.zeros_like(own)  # how many of the tokens so far were the answer's, not the tree's
        taken = []
        for _ in range(BEFORE):
            of_tail = self.tail.gather(1, BEFORE - 1 - above)
            taken.append(torch.where(own > 0, lanes.tokens.gather(1, own), of_tail))
            above = above + (own == 0).long()
            own = lanes.parents.gather(1, own)
        return torch.stack(taken[::-1], -1).flatten(0, 1)

    def advance(self) -> None:
        """Count the tokens that the lanes have just accepted, after `Lanes.advance`."""
        lanes = self._lanes
        fresh = (self._taken <= lanes.accepted[:, None]).int()
        self.counts.scatter_add_(1, lanes.last_tokens, fresh)
        last = torch.cat([self.tail, lanes.last_tokens], 1)
        self.tail.copy_(last.gather(1, self._places + 1 + lanes.accepted[:, None]))
