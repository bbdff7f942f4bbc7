"""Bursts: several rounds of a whole batch on the device, without the host.

A round drafts, runs the target over all trees, walks the accepted paths and advances, all in tensors: on a GPU as
replays of captured graphs. Plain decoding is the round whose trees are bare roots. Before a burst the host sets pages,
noise and temperatures. It checks for finished sequences one round late, while the next round runs, and reports each
sequence's tokens. Tokens computed after an end are dropped. If no sequence finished in a burst, the first round of the
next burst may start before the host emits the results of this one: a round ahead.

Rounds choose the same tokens as single steps. A batch is padded to one of a few sizes with idle lanes, which write to a
page that no sequence owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from slipstream.attention import LaneTiles
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.drafters import Drafter
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.endings import emits_each
from slipstream.engine.extras import Extras, Level, on_host
from slipstream.engine.rounds import FIRST_TOKEN, AcceptanceCounter, Collected, RoundBuffers
from slipstream.engine.seats import LanePosition, Seats
from slipstream.gpu import forest
from slipstream.gpu.device_sampling import choose_rows
from slipstream.gpu.graphs import Graphs, bucket, sizes
from slipstream.gpu.lanes import Lanes
from slipstream.models.decoder import Decoder
from slipstream.policy import Progress, Round, Tally
from slipstream.policy.sizes import most_rounds
from slipstream.policy.tally import BINS
from slipstream.sequence import TARGET, Sequence
from slipstream.types import Plan

_MOST_SPARE, _PATIENCE = 2, 4  # a batch stays in up to twice the lanes that it needs, for so many bursts


@dataclass(frozen=True)
class Launched:
    """Rounds that are running or done."""

    buffers: RoundBuffers
    sequences: list[Sequence]
    lanes: list[int]  # of the sequences
    starts: list[int]  # slots of the roots of the first round
    collected: Collected
    most: int  # rounds that slots are reserved for
    began: float
    progress: list[Progress]
    extras: Extras | None = None  # if any sequence needs them
    rounds: int = 0
    may_go_ahead: bool = False

    def root_slots(self, rounds: int) -> list[int]:
        """Slots of the roots after `rounds` finished rounds."""
        counts = self.collected.token_counts(rounds)
        return [start + count for start, count in zip(self.starts, counts, strict=True)]

    @property
    def level(self) -> Level:
        """What the most demanding sequence needs."""
        return max(map(Level.of, self.sequences))

    @property
    def traced(self) -> bool:
        """Whether the trees of these rounds are kept."""
        return any(sequence.request.trace for sequence in self.sequences)


class Burst:
    """Runs the bursts of one drafter over one model and cache."""

    def __init__(self, model: Decoder, cache: PagedCache, drafter: AnyDrafter) -> None:
        self._model = model
        self._cache = cache
        self._drafter = drafter
        self._buffers: dict[tuple[int, bool], RoundBuffers] = {}  # (lanes, whether rounds have trees)
        self._counters: dict[RoundBuffers, AcceptanceCounter] = {}
        self._extras: dict[RoundBuffers, Extras] = {}
        # The lanes of the last burst with or without trees, and for how many bursts in a row fewer would have done.
        self._sizes: dict[bool, tuple[int, int]] = {}
        self.ahead: Launched | None = None  # a burst whose first round was started ahead
        self.graphs = Graphs(model.device)

    # -- host side, before a burst ------------------------------------------------------------------------------------

    def shape(self, count: int) -> Plan:
        """The tree shape of rounds with `count` sequences."""
        lanes = self._made(count, trees=not self._drafter.is_passive).lanes
        return Plan(depth=lanes.depth, nodes=lanes.nodes)

    def reserve(self, sequences: list[Sequence], plan: Plan) -> int:
        """Reserve slots for the planned rounds; returns for how many there is room, 0 if not even for one.

        A burst never preempts a sequence; a single step does, when it must.
        """
        buffers = self._made(len(sequences), trees=plan.drafts)
        most = min(plan.rounds, max(s.remaining for s in sequences))
        rounds = self._reserve(buffers, sequences, [s.cached for s in sequences], most)
        return rounds if rounds and (buffers.draft is None or buffers.draft.prepare(sequences)) else 0

    def _reserve(self, buffers: RoundBuffers, sequences: list[Sequence], starts: list[int], rounds: int) -> int:
        """Reserve slots for rounds whose first roots are at `starts`; returns the number of rounds that fit."""
        while rounds:
            rows = [start + rounds * (1 + buffers.lanes.depth) + _scratch(buffers.draft) for start in starts]
            pages = (-(-n // PAGE_SIZE) - len(s.table.pages) for n, s in zip(rows, sequences, strict=True))
            if sum(max(0, missing) for missing in pages) <= self._cache.available:
                for sequence, count in zip(sequences, rows, strict=True):
                    self._cache.reserve(sequence.table, count)
                return rounds
            rounds //= 2
        return 0

    # -- a burst ------------------------------------------------------------------------------------------------------

    def launch(self, sequences: list[Sequence], plan: Plan, rounds: int) -> Launched:
        """Run up to `rounds` rounds; stops early when enough sequences finished. Nothing is emitted yet."""
        began = time.perf_counter()
        buffers, lanes, extras = self.filled(sequences, trees=plan.drafts)
        buffers.number.zero_()
        collected = Collected(buffers, sequences, lanes, [s.remaining for s in sequences], extras)
        starts, progress = [s.cached for s in sequences], [Progress(s) for s in sequences]
        begun = Launched(buffers, sequences, lanes, starts, collected, rounds, began, progress, extras)
        return self._run(replace(begun, may_go_ahead=plan.ahead), rounds)

    def _run(self, launched: Launched, rounds: int) -> Launched:
        """Run until `rounds` rounds in total are done, or enough sequences finished."""
        buffers, collected, number = launched.buffers, launched.collected, launched.rounds
        level, sampled = launched.level, not all(s.params.greedy for s in launched.sequences)
        while number < rounds and not collected.over(number):
            if buffers.loop is not None:
                collected.drafting.mark()
                self.draft(buffers, sampled)
                collected.drafting.mark()
            collected.verifying.mark()
            self.verify(buffers, level, launched.traced)
            collected.verifying.mark()
            collected.send(number)
            number += 1
        return replace(launched, rounds=number)

    def go_ahead(self, launched: Launched) -> None:
        """Start the next burst of the same sequences if none of them finished in this one.

        The last results of this burst are not emitted yet. The drafter's host state is updated only when a burst stops.
        """
        buffers, sequences, collected = launched.buffers, launched.sequences, launched.collected
        if collected.any_ended(launched.rounds - 1):
            return
        starts = launched.root_slots(launched.rounds)
        rounds = self._reserve(buffers, sequences, starts, min(buffers.rounds, max(collected.left)))
        if rounds:
            lanes, extras = launched.lanes, launched.extras
            buffers.lanes.set_pages(dict(zip(lanes, sequences, strict=True)), self._cache.idle_page)
            next_one = Collected(buffers, sequences, lanes, collected.left, extras, after=collected)
            buffers.number.fill_(next_one.first_line)
            began, progress = time.perf_counter(), [Progress(s) for s in sequences]
            begun = Launched(buffers, sequences, lanes, starts, next_one, rounds, began, progress, extras)
            self.ahead = self._run(begun, 1)

    def go_on(self, launched: Launched, plan: Plan, *, alone: bool) -> Launched:
        """Continue a burst that was started ahead: to its end if `alone`, otherwise only its first round."""
        begun = replace(launched, began=time.perf_counter(), may_go_ahead=alone and plan.ahead)
        return self._run(begun, min(begun.most, plan.rounds) if alone else 1)

    def forget(self) -> None:
        """Drop a burst that was started ahead. The next burst sets up all lanes anew."""
        self.ahead = None
        for buffers in self._buffers.values():
            buffers.seats.forget()

    def read(self, launched: Launched, first: int, stop: int) -> None:
        """Wait for rounds `first` to `stop`, and add their results to the progress of each unfinished sequence."""
        buffers = launched.buffers
        lines = launched.collected.read(first, stop)
        nodes = buffers.lanes.nodes
        # Bare roots give one token per round: they are reported as one `Round` of several steps.
        given = (lines if nodes else lines[:, :, FIRST_TOKEN]).swapaxes(0, 1).tolist()
        for lane, item, results in zip(launched.lanes, launched.progress, given, strict=True):
            if item.sequence.finished:
                continue
            if not nodes and not emits_each(item.sequence):
                item.rounds.append(Round(results, steps=len(results)))
                continue
            for number, line in enumerate(results, launched.collected.first_line + first):
                item.rounds.append(self._round(launched, number, lane, line if nodes else [0, 0, line]))
                if item.sequence.request.trace and nodes:
                    item.trees.append(buffers.tree(number, lane))

    @staticmethod
    def _round(launched: Launched, number: int, lane: int, line: list[int]) -> Round:
        """The round whose results are line `number` of the buffers; `line`: those of a lane."""
        buffers, extras = launched.buffers, launched.extras
        nodes, depth = buffers.lanes.nodes, buffers.lanes.depth
        accepted, deepest = line[0], line[1]
        origins = [buffers.origins[which] for which in line[FIRST_TOKEN + depth + 1 :][:accepted]]
        scores = None if extras is None else extras.read(number, lane)
        tokens, path = line[FIRST_TOKEN:][: 1 + accepted], range(1, 1 + accepted)
        return Round(tokens, origins, nodes, deepest, nodes=path, target=scores)

    def tally(self, launched: Launched) -> Tally:
        """Acceptance counts since the last burst with these buffers."""
        counting = self._counters.get(launched.buffers)
        return Tally() if counting is None else counting.since()

    def commit(self, launched: Launched) -> None:
        """Commit the K/V of the emitted tokens.

        A round writes the K/V of the token that it reads, so all emitted tokens but the last have rows.
        """
        for item, start in zip(launched.progress, launched.starts, strict=True):
            if item.new_tokens and item.sequence.table.pages:  # a cancelled sequence has no pages
                rows = range(start, start + item.new_tokens)
                self._cache.commit(item.sequence.table, TARGET, start, rows)

    def settle(self, launched: Launched, guard: Callable[[Sequence, Callable[[], None]], object]) -> None:
        """Update the drafter's state of each sequence, under `guard`."""
        buffers, sequences, loop = launched.buffers, launched.sequences, launched.buffers.loop
        if loop is not None:
            roots = launched.root_slots(launched.rounds - 1)  # of the last round
            for lane, sequence, root_slot in zip(launched.lanes, sequences, roots, strict=True):
                if sequence.table.pages:
                    guard(sequence, partial(loop.settle, sequence, lane, root_slot))
        buffers.seats.leave(launched.lanes, _positions(buffers, sequences))

    def filled(self, sequences: list[Sequence], *, trees: bool) -> tuple[RoundBuffers, list[int], Extras | None]:
        """The buffers for this batch, with lanes that are set up; the lane of each sequence; the extras, if needed.

        Sequences that go on where the last burst has left them keep their lanes: only page tables change. A lane whose
        sequence has ended takes another.
        """
        buffers = self._made(len(sequences), trees=trees)
        size, spare = buffers.lanes.size, self._sizes.get(trees, (0, 0))[1]
        self._sizes[trees] = size, spare + 1 if size > bucket(len(sequences)) else 0
        lanes, fresh = buffers.seats.take(_positions(buffers, sequences))
        if fresh:
            buffers.lanes.fill(fresh, buffers.known)
            joining = {lane: sequence for lane, sequence in fresh.items() if sequence is not None}
            if buffers.loop is not None and joining:
                buffers.loop.fill(joining)
        buffers.lanes.set_pages(dict(zip(lanes, sequences, strict=True)), self._cache.idle_page)
        demanding = any(Level.of(sequence) is Level.ALL for sequence in sequences)
        extras = self._extras_of(buffers) if demanding else self._extras.get(buffers)
        if extras is not None:
            extras.fill(fresh)
        return buffers, lanes, extras if demanding else None

    def _lanes_for(self, count: int, trees: bool) -> int:
        """How many lanes serve `count` sequences.

        If fewer would do than in the last burst, that is believed after a few bursts only: while requests come and go,
        those that stay keep their lanes.
        """
        wanted, (size, spare) = bucket(count), self._sizes.get(trees, (0, 0))
        return size if wanted < size <= _MOST_SPARE * wanted and spare < _PATIENCE else wanted

    def _made(self, sequences: int, *, trees: bool) -> RoundBuffers:
        return self._of_size(self._lanes_for(sequences, trees), trees)

    def _of_size(self, count: int, trees: bool) -> RoundBuffers:
        if (count, trees) not in self._buffers:
            made = self._buffers[count, trees] = self._make(count, trees)
            if made.draft is not None:
                self._counters[made] = AcceptanceCounter(made)
        return self._buffers[count, trees]

    def _extras_of(self, buffers: RoundBuffers) -> Extras:
        if buffers not in self._extras:
            lines, vocabulary = len(buffers.results), self._model.config.vocab_size
            self._extras[buffers] = Extras(buffers.lanes, lines, vocabulary)
        return self._extras[buffers]

    def _make(self, count: int, trees: bool) -> RoundBuffers:
        config, device = self._model.config, self._model.device
        draft = self._drafter.device_draft(count) if trees else None
        nodes, depth = (draft.nodes, draft.depth) if draft else (0, 0)
        rounds = most_rounds(drafts=trees, passive=self._drafter.is_passive)
        spare = rounds * (1 + depth) + _scratch(draft)
        lanes = Lanes(count, nodes, depth, config.context, spare, device)
        tiles = LaneTiles(lanes.tables, 1 + nodes, config.group, open_rows=nodes > 0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        results = numbers(2 * rounds, count, FIRST_TOKEN + depth + 1 + depth)
        counts = numbers(len(draft.origins) if draft else 0, depth, BINS, 2)
        trees_ = numbers(2 * rounds, 3, count, 1 + nodes)
        confidence = torch.zeros(2 * rounds, count, 1 + nodes, dtype=torch.float32, device=device)
        loop = None if draft is None else draft.loop(lanes)
        told = results, on_host(results), counts, on_host(counts), trees_, confidence, numbers(1)
        return RoundBuffers(lanes, Seats(count), draft, loop, rounds, tiles, *told)

    def warm_up(self, most: int) -> None:
        """Run every kind of round twice, for all sizes of batches up to `most` sequences, in lanes that nobody has.

        So all graphs are captured, and all kernels compiled, before the first request. No sequence may be in a burst.
        """
        self.forget()
        waits = type(self._drafter).signal is not Drafter.signal  # it has rounds without trees, too
        for trees in {not self._drafter.is_passive, not (self._drafter.is_passive or waits)}:
            for size in sizes(most):
                buffers = self._of_size(size, trees)
                self._extras_of(buffers)
                for level in [*Level] * 2:
                    buffers.lanes.set_pages({}, self._cache.idle_page)
                    buffers.number.zero_()
                    self.draft(buffers, level > Level.GREEDY)
                    self.verify(buffers, level, False)

    # -- a round ------------------------------------------------------------------------------------------------------

    def draft(self, buffers: RoundBuffers, sampled: bool) -> None:
        """The first half of a round: draft trees below all roots, if there is a drafter."""
        loop = buffers.loop
        if loop is not None:
            self.graphs.run((buffers.lanes.size, sampled, "draft"), lambda: loop.draft(sampled))

    def verify(self, buffers: RoundBuffers, level: Level, traced: bool) -> None:
        """The second half of a round: verify and advance."""
        key = (buffers.lanes.size, buffers.lanes.nodes, level, traced, "verify")
        self.graphs.run(key, lambda: self._verify(buffers, level, traced))

    def _verify(self, buffers: RoundBuffers, level: Level, traced: bool) -> None:
        """Run the target over all trees, walk the accepted paths and advance to the next roots."""
        model, lanes, loop = self._model, buffers.lanes, buffers.loop
        depths, bits = forest.geometry(lanes.parents, lanes.depth)
        rows = lanes.rows(lanes.slots, lanes.offsets, depths)
        seen = bits.flatten(0, 1) if lanes.nodes else None
        attend = model.attention_over(buffers.tiles.after(lanes.slots, seen, rows.positions))
        x = model.embed(lanes.tokens.flatten())
        layers, taps = range(model.config.layers), self._drafter.taps
        tapped = model.run_(x, rows, attend, self._cache.layers(TARGET), layers, taps)
        extras = self._extras[buffers] if level is Level.ALL else None
        after = rows.positions + 1 if level > Level.GREEDY else rows.positions  # greedy choices do not read it
        logits = raw = model.head(x)
        if extras is not None:
            logits = extras.adjustments.adjusted(raw, after)
        cuts = lanes.row_cuts if level >= Level.CUT else None
        how = lanes.row_stems, after, lanes.row_temperatures
        chosen = choose_rows(logits, *how, sampled=level > Level.GREEDY, cuts=cuts).view_as(lanes.tokens)
        path, accepted = forest.walk(lanes.tokens, lanes.parents, chosen, lanes.depth)
        if lanes.nodes:
            lanes.move(self._cache.stores[TARGET], path)
            forest.count(buffers.counts, lanes.parents, lanes.origins, depths, lanes.scores, path, lanes.active)
            if len(buffers.origins) > 1:
                line = lanes.origins.gather(1, path)[None]
                buffers.results[:, :, FIRST_TOKEN + lanes.depth + 1 :].index_copy_(0, buffers.number, line)
            if traced:
                forest_ = torch.stack([lanes.tokens, lanes.parents, lanes.origins])
                buffers.trees.index_copy_(0, buffers.number, forest_[None])
                buffers.confidence.index_copy_(0, buffers.number, lanes.scores[None])
        if loop is not None:
            loop.observe(path, accepted, tapped)
        if extras is not None:
            extras.scores.note(raw, chosen, path, buffers.number)
        lanes.advance(chosen, path, accepted, depths, buffers.results, buffers.number)
        if extras is not None:
            extras.adjustments.advance()
        buffers.number.add_(1)


def _positions(buffers: RoundBuffers, sequences: list[Sequence]) -> list[LanePosition]:
    return [LanePosition(s, s.cached, len(s.tokens), buffers.known(s)) for s in sequences]


def _scratch(draft: DeviceDraft | None) -> int:
    """Rows after a root that a round may write: the tree's, or those that drafting needs."""
    return 0 if draft is None else max(draft.nodes, draft.scratch)
