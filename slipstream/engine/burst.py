"""Bursts: several rounds of a whole batch on the device, without the host.

A round drafts, runs the target over all trees, follows the paths that it chose and moves on, all in tensors: on a GPU
as replays of captured graphs. Plain decoding is the round whose trees are bare roots. The host lays out beforehand what
it knows (pages, noise, temperatures), looks for ends one round late, while the next one runs, and gives each sequence
its tokens up to the one that ends it. What was computed behind an end is dropped. Where a burst is over and nobody's
answer is, the first round of the next one begins before the host gives out what the last one gave: a round ahead.

Rounds choose what single steps choose. A batch is filled up to one of a few sizes with idle lanes, which work on a page
that nobody reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from slipstream import forest
from slipstream.attention import LaneTiles
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.choices import choose_rows
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.endings import Taken, emit_plain, emit_rounds
from slipstream.engine.rounds import TAKEN, Collected, Size
from slipstream.engine.scheduler import Work
from slipstream.graphs import Graphs, bucket
from slipstream.lanes import Lanes
from slipstream.models.decoder import Decoder
from slipstream.models.model import Model
from slipstream.sequence import TARGET, Sequence
from slipstream.verify import Match, Verifier

PLAIN_ROUNDS = 16  # of a burst at most: tokens reach a stream, and prompts their turn, that much later
TREE_ROUNDS = 8
WAITING_ROUNDS = 4  # plain ones, while a drafter has nothing to guess


def make_burst(model: Model, cache: PagedCache, drafter: AnyDrafter, verifier: Verifier) -> Burst | None:
    """Bursts, where such an engine can run them: a pass can be captured, and so can drafting, if there is any."""
    if not (isinstance(model, Decoder) and model.captures and isinstance(verifier, Match)):
        return None
    return Burst(model, cache, drafter) if drafter.blind or drafter.device_draft(1) is not None else None


class Stand(NamedTuple):
    """Where a sequence stood behind its last burst."""

    sequence: Sequence
    cached: int
    tokens: int
    known: int


@dataclass(frozen=True)
class Launched:
    """Rounds that are under way, or over."""

    size: Size
    sequences: list[Sequence]
    starts: list[int]  # where the roots of the first round were
    collected: Collected
    most: int  # rounds that there is room for
    began: float
    rounds: int = 0

    def root_slots(self, rounds: int) -> list[int]:
        """Where the roots are behind so many rounds, which are over."""
        behind = self.collected.taken(rounds)
        return [start + count for start, count in zip(self.starts, behind, strict=True)]


class Burst:
    """Runs bursts over one model and cache."""

    def __init__(self, model: Decoder, cache: PagedCache, drafter: AnyDrafter) -> None:
        self._model = model
        self._cache = cache
        self._drafter = drafter
        self._sizes: dict[tuple[int, bool], Size] = {}  # by lanes, and whether there are trees
        self._last: tuple[Size, list[Stand]] | None = None  # what the last burst used, and what it left behind
        self.ahead: Launched | None = None  # a burst of which one round has begun
        self.graphs = Graphs(model.device)

    # -- what the host does before ------------------------------------------------------------------------------------

    def ready(self, work: list[Work]) -> list[Sequence]:
        """The sequences of a step that a burst may take: all that decode, if it may take all of them, or none.

        Prompts go their own way, up to the first token. If only some of those that decode could be taken, the others
        would wait for a whole burst between two tokens.
        """
        sequences = []
        for item in work:
            sequence = item.sequence
            if sequence.first_token_at is None:
                continue
            plain = sequence.sampler.simple and sequence.params.logprobs is None and sequence.stops is None
            if not plain or len(item.pending) > 1 or (sequence.drafter_dropped and not self._drafter.blind):
                return []
            sequences.append(sequence)
        return sequences

    def reserve(self, sequences: list[Sequence]) -> int:
        """Reserve slots for as many rounds as a burst may have; returns how many, 0 if the cache has no room for one.

        Nobody is set aside for a burst: that is for a single step to do, when it must.
        """
        size = self._size(sequences)
        most = size.rounds if size.draft is None else size.draft.rounds(sequences, size.rounds)
        most = min(most, max(s.remaining for s in sequences))
        rounds = self._reserve(size, sequences, [s.cached for s in sequences], most)
        return rounds if rounds and (size.draft is None or size.draft.prepare(sequences)) else 0

    def _reserve(self, size: Size, sequences: list[Sequence], starts: list[int], rounds: int) -> int:
        """Reserve slots for rounds whose first roots are at `starts`; returns for how many there is room."""
        while rounds:
            rows = [start + rounds * (1 + size.lanes.depth) + _scratch(size.draft) for start in starts]
            pages = (-(-n // PAGE_SIZE) - len(s.table.pages) for n, s in zip(rows, sequences, strict=True))
            if sum(max(0, missing) for missing in pages) <= self._cache.available:
                for sequence, count in zip(sequences, rows, strict=True):
                    self._cache.reserve(sequence.table, count)
                return rounds
            rounds //= 2
        return 0

    # -- a burst ------------------------------------------------------------------------------------------------------

    def launch(self, sequences: list[Sequence], rounds: int) -> Launched:
        """Run rounds on the device, until they are over or too many answers are; nothing has been given out yet."""
        began = time.perf_counter()
        size = self.filled(sequences)
        size.number.zero_()
        collected = Collected(size, sequences, [s.remaining for s in sequences])
        return self._run(Launched(size, sequences, [s.cached for s in sequences], collected, rounds, began), rounds)

    def _run(self, launched: Launched, rounds: int) -> Launched:
        """Run on, up to so many rounds in all."""
        size, collected, number = launched.size, launched.collected, launched.rounds
        sampled = not all(s.params.greedy for s in launched.sequences)
        while number < rounds and not collected.over(number):
            self.draft(size, sampled)
            self.verify(size, sampled)
            collected.send(number)
            number += 1
        return replace(launched, rounds=number)

    def go_ahead(self, launched: Launched) -> None:
        """Begin with the next burst for the same sequences, if all of them go on behind this one.

        What this one gave last has not been given out. So nobody may be asked what would be good to do next, and a
        drafter is not told where the sequences stand until they stop.
        """
        size, sequences, collected = launched.size, launched.sequences, launched.collected
        steady = self._drafter.blind if size.draft is None else size.draft.steady
        if not steady or collected.any_ended(launched.rounds - 1):
            return
        starts = launched.root_slots(launched.rounds)
        rounds = self._reserve(size, sequences, starts, min(size.rounds, max(collected.left)))
        if rounds:
            size.lanes.turn_to(sequences, self._cache.idle_page)
            next_one = Collected(size, sequences, collected.left, after=collected)
            size.number.fill_(next_one.first_line)
            begun = Launched(size, sequences, starts, next_one, rounds, time.perf_counter())
            self.ahead = self._run(begun, 1)

    def go_on(self, launched: Launched, rounds: int) -> Launched:
        """Run on with a burst of which a round has begun, up to so many in all."""
        return self._run(replace(launched, began=time.perf_counter()), rounds)

    def forget(self) -> None:
        """Whatever has begun ahead is in vain, and lanes may stand anywhere: the next burst lays out all of them."""
        self.ahead = self._last = None

    def collect(self, launched: Launched, meanwhile: Callable[[], None]) -> tuple[list[int], float]:
        """Give each sequence its tokens, all or up to its end, and commit their K/V.

        What all rounds but the last gave is given out while that one runs. `meanwhile` is called when it is over, and
        what it gave has not been given out. Returns how many tokens each sequence took, and the milliseconds until the
        device was done with them.
        """
        size, sequences = launched.size, launched.sequences
        counts, last = [0] * len(sequences), launched.rounds - 1
        device_ms = 0.0
        for first, stop in ((0, last), (last, last + 1)):
            # A round that was begun before the end was seen is not waited for if it can give nothing more.
            if first == stop or all(s.finished for s in sequences):
                continue
            told = launched.collected.read(first, stop)
            device_ms = 1000 * (time.perf_counter() - launched.began)
            if stop > last:
                meanwhile()
            nodes, name = size.lanes.nodes, self._drafter.name
            lines = (told if nodes else told[:, :, TAKEN]).swapaxes(0, 1).tolist()  # of a bare root the token alone
            for lane, (sequence, given) in enumerate(zip(sequences, lines, strict=True)):
                if sequence.finished:
                    continue
                if nodes:
                    trees = [Taken(line[TAKEN:][: 1 + line[0]], nodes, line[1]) for line in given]
                    counts[lane] += emit_rounds(sequence, trees, name)
                else:
                    counts[lane] += emit_plain(sequence, given)
        for sequence, start, count in zip(sequences, launched.starts, counts, strict=True):
            # A round writes the row of the token that it reads: of the tokens given out, all but the last are rows now.
            if count:  # or it was cancelled, and its pages are gone
                self._cache.commit(sequence.table, TARGET, start, range(start, start + count))
        return counts, device_ms

    def settle(self, launched: Launched, guard: Callable[[Sequence, Callable[[], None]], object]) -> None:
        """Let the drafter know where the sequences stand; what it does for each is done under `guard`."""
        size, sequences, loop = launched.size, launched.sequences, launched.size.loop
        if loop is not None:
            roots = launched.root_slots(launched.rounds - 1)  # of the last round
            for lane, (sequence, root_slot) in enumerate(zip(sequences, roots, strict=True)):
                if sequence.table.pages:
                    guard(sequence, partial(loop.settle, sequence, lane, root_slot))
        if not any(s.finished for s in sequences):
            self._last = size, _standing(size, sequences)

    def filled(self, sequences: list[Sequence]) -> Size:
        """The buffers for a batch, set up for these."""
        size = self._size(sequences)
        last, self._last = self._last, None
        if last == (size, _standing(size, sequences)):
            # The lanes stand where the last burst has left them, and so does the drafter.
            size.lanes.turn_to(sequences, self._cache.idle_page)
        else:
            size.lanes.fill(sequences, [size.known(s) for s in sequences], self._cache.idle_page)
            if size.loop is not None:
                size.loop.fill(sequences)
        return size

    def _size(self, sequences: list[Sequence]) -> Size:
        count = bucket(len(sequences))
        size = self._made(count, trees=not self._drafter.blind)
        waits = size.draft is not None and not size.draft.expects(sequences)
        return self._made(count, trees=False) if waits else size

    def _made(self, count: int, *, trees: bool) -> Size:
        if (count, trees) not in self._sizes:
            self._sizes[count, trees] = self._make(count, trees)
        return self._sizes[count, trees]

    def _make(self, count: int, trees: bool) -> Size:
        config, device = self._model.config, self._model.device
        draft = self._drafter.device_draft(count) if trees else None
        nodes, depth = (draft.nodes, draft.depth) if draft else (0, 0)
        rounds = TREE_ROUNDS if trees else PLAIN_ROUNDS if self._drafter.blind else WAITING_ROUNDS
        spare = rounds * (1 + depth) + _scratch(draft)
        lanes = Lanes(count, nodes, depth, config.context, spare, device)
        tiles = LaneTiles(lanes.tables, 1 + nodes, config.group, open_rows=nodes > 0)
        told = torch.zeros(2 * rounds, count, TAKEN + depth + 1, dtype=torch.int64, device=device)
        heard = torch.empty(told.shape, dtype=told.dtype, pin_memory=True) if told.is_cuda else told
        loop = None if draft is None else draft.loop(lanes)
        number = torch.zeros(1, dtype=torch.int64, device=device)
        return Size(lanes, draft, loop, rounds, tiles, told, heard, number)

    # -- a round ------------------------------------------------------------------------------------------------------

    def draft(self, size: Size, sampled: bool) -> None:
        """The first half of a round: trees below all roots, if the drafter makes any."""
        loop = size.loop
        if loop is not None:
            self.graphs.run((size.lanes.size, sampled, "draft"), lambda: loop.draft(sampled))

    def verify(self, size: Size, sampled: bool) -> None:
        """The second half."""
        key = (size.lanes.size, size.lanes.nodes, sampled, "verify")
        self.graphs.run(key, lambda: self._verify(size, sampled))

    def _verify(self, size: Size, sampled: bool) -> None:
        """The target's pass over all trees, and the way to the next roots."""
        model, lanes, loop = self._model, size.lanes, size.loop
        depths, bits = forest.geometry(lanes.parents, lanes.depth)
        rows = lanes.rows(lanes.slots, lanes.offsets, depths)
        seen = bits.flatten(0, 1) if lanes.nodes else None
        attend = model.attention_over(size.tiles.behind(lanes.slots, seen, rows.positions))
        x = model.embed(lanes.tokens.flatten())
        layers, taps = range(model.config.layers), self._drafter.taps
        tapped = model.run_(x, rows, attend, self._cache.layers(TARGET), layers, taps)
        behind = rows.positions + 1 if sampled else rows.positions  # which greedy choices do not read
        chosen = choose_rows(model.head(x), lanes.row_stems, behind, lanes.row_temperatures, sampled=sampled)
        chosen = chosen.view_as(lanes.tokens)
        path, accepted = forest.walk(lanes.tokens, lanes.parents, chosen, lanes.depth)
        if lanes.nodes:
            lanes.move(self._cache.stores[TARGET], path)
        if loop is not None:
            loop.observe(path, accepted, tapped)
        lanes.advance(chosen, path, accepted, depths, size.told, size.number)
        size.number.add_(1)


def _standing(size: Size, sequences: list[Sequence]) -> list[Stand]:
    return [Stand(s, s.cached, len(s.tokens), size.known(s)) for s in sequences]


def _scratch(draft: DeviceDraft | None) -> int:
    """Rows behind a root that a round may write: those of the tree, or of what drafting needs."""
    return 0 if draft is None else max(draft.nodes, draft.scratch)
