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
from dataclasses import replace
from functools import partial

import torch

from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.endings import emits_each
from slipstream.engine.extras import Extras, Level
from slipstream.engine.lane_map import LanePosition
from slipstream.engine.launched import Launched, Prepared
from slipstream.engine.round_buffers import FIRST_TOKEN, AcceptanceCounter, Collected, Kind, Passed, RoundBuffers
from slipstream.gpu import forest
from slipstream.gpu.device_sampling import choose_rows
from slipstream.gpu.graphs import Graphs, bucket, sizes
from slipstream.gpu.lane_masks import LaneMasks
from slipstream.models.decoder import Decoder
from slipstream.policy import Progress, Round, Tally
from slipstream.sequence import TARGET, Sequence
from slipstream.types import Plan

_MOST_SPARE, _PATIENCE = 2, 4  # a batch may keep up to twice the lanes that it needs, for so many bursts

Guard = Callable[[Sequence, Callable[[], None]], object]  # runs what a sequence needs; an error in it is its own


class Burst:
    """Runs the bursts of one drafter over one model and cache."""

    def __init__(self, model: Decoder, cache: PagedCache, drafter: AnyDrafter) -> None:
        self._model = model
        self._cache = cache
        self._drafter = drafter
        self._buffers: dict[tuple[int, Kind], RoundBuffers] = {}  # by lanes and kind of rounds
        self._counters: dict[RoundBuffers, AcceptanceCounter] = {}
        self._extras: dict[RoundBuffers, Extras] = {}
        # With or without trees: the lanes of the last burst; for how many bursts in a row fewer would have sufficed.
        self._sizes: dict[bool, tuple[int, int]] = {}
        self._shapes: dict[int, list[Plan]] = {}  # by lanes: those among which the policy picks
        self._failed: set[Kind] = set()
        self._prepared: Prepared | None = None  # for the burst that was reserved last
        self.ahead: Launched | None = None  # a burst whose first round was started ahead
        self.faults: list[tuple[Sequence, Exception]] = []  # sequences whose grammar failed in the last burst
        self.graphs = Graphs(model.device)

    # -- host side, before a burst ------------------------------------------------------------------------------------

    def shape(self, count: int) -> Plan:
        """The tree shape of rounds with `count` sequences."""
        if self._drafter.parts:
            return next(iter(self.shapes(count)), Plan())
        lanes = self._made(count, None if self._drafter.is_passive else ()).lanes
        return Plan(depth=lanes.depth, nodes=lanes.nodes)

    def shapes(self, count: int) -> list[Plan]:
        """The shapes of trees among which the policy picks for rounds with `count` sequences."""
        size = self._lanes_for(count, trees=True)
        if size not in self._shapes:
            made = self._drafter.device_drafts(size)
            self._shapes[size] = [Plan(draft.depth, draft.nodes, parts=parts) for parts, draft in made.items()]
        return [plan for plan in self._shapes[size] if plan.parts not in self._failed]

    def give_up(self, plan: Plan) -> None:
        """Run no more rounds of this kind, which have failed."""
        self._failed.add(_kind(plan))

    def reserve(self, sequences: list[Sequence], plan: Plan) -> int:
        """Reserve slots for the planned rounds; returns for how many there is room, 0 if not even for one.

        A burst never preempts a sequence; a single step does, when it must.
        """
        buffers = self._made(len(sequences), _kind(plan))
        most = min(plan.rounds, max(s.remaining for s in sequences))
        rounds = self._reserve(buffers, sequences, [s.cached for s in sequences], most)
        self._prepared = None
        return rounds if rounds and (buffers.draft is None or self._prepare(buffers.draft, sequences)) else 0

    def _prepare(self, draft: DeviceDraft, sequences: list[Sequence]) -> bool:
        """Bring the drafter up to the roots, and time that."""
        unread = max(len(s.tokens) - 1 - draft.known(s) for s in sequences)
        self._prepared = Prepared.begun(self._drafter.name, unread, on_gpu=self._model.device != "cpu")
        able = draft.prepare(sequences)
        self._prepared.timer.mark()
        return able

    def _reserve(self, buffers: RoundBuffers, sequences: list[Sequence], starts: list[int], rounds: int) -> int:
        """Reserve slots for rounds whose first roots are at `starts`; returns the number of rounds that fit."""
        while rounds:
            rows = [start + rounds * (1 + buffers.lanes.depth) + buffers.scratch for start in starts]
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
        buffers, lanes, extras = self.filled(sequences, plan)
        buffers.number.zero_()
        collected = Collected(buffers, sequences, lanes, [s.remaining for s in sequences], extras)
        starts, progress = [s.cached for s in sequences], [Progress(s) for s in sequences]
        begun = Launched(buffers, sequences, lanes, starts, collected, rounds, began, progress, extras)
        return self._run(replace(begun, may_go_ahead=plan.ahead, prepared=self._prepared), rounds)

    def _run(self, launched: Launched, rounds: int) -> Launched:
        """Run until `rounds` rounds in total are done, or enough sequences finished."""
        buffers, collected, number = launched.buffers, launched.collected, launched.rounds
        cold = self.graphs.cold
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
        return replace(launched, rounds=number, cold=launched.cold or self.graphs.cold > cold)

    def go_ahead(self, launched: Launched) -> None:
        """Start the next burst of the same sequences if none of them finished in this one.

        The last results of this burst are not emitted yet. The drafter's host state is updated only when a burst stops.
        """
        buffers, sequences, collected = launched.buffers, launched.sequences, launched.collected
        if collected.any_ended(launched.rounds - 1) or any(sequence.finished for sequence in sequences):
            return  # one that has failed is finished, too, and holds no pages any more
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
        """Continue a burst that was started ahead: to its end if `alone` and as planned, or only its first round."""
        alone = alone and _kind(plan) == launched.buffers.kind
        begun = replace(launched, began=time.perf_counter(), may_go_ahead=alone and plan.ahead)
        return self._run(begun, min(begun.most, plan.rounds) if alone else 1)

    def forget(self) -> None:
        """Drop a burst that was started ahead. The next burst sets up all lanes anew."""
        self.ahead = None
        for buffers in self._buffers.values():
            buffers.lane_map.forget()

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

    def commit(self, launched: Launched, guard: Guard) -> None:
        """Commit the K/V of the emitted tokens of each sequence, under `guard`.

        A round writes the K/V of the token that it reads, so all emitted tokens but the last have rows.
        """
        for item, start in zip(launched.progress, launched.starts, strict=True):
            if item.new_tokens and item.sequence.table.pages:  # a cancelled sequence has no pages
                rows = range(start, start + item.new_tokens)
                guard(item.sequence, partial(self._cache.commit, item.sequence.table, TARGET, start, rows))

    def settle(self, launched: Launched, guard: Guard) -> None:
        """Update the drafter's state of each sequence, under `guard`."""
        buffers, sequences = launched.buffers, launched.sequences
        if buffers.keepers:
            roots = launched.root_slots(launched.rounds - 1)  # of the last round
            for lane, sequence, root_slot in zip(launched.lanes, sequences, roots, strict=True):
                for keeper in buffers.keepers if sequence.table.pages else ():
                    guard(sequence, partial(keeper.settle, sequence, lane, root_slot))
        buffers.lane_map.leave(launched.lanes, _positions(buffers, sequences))

    def filled(self, sequences: list[Sequence], plan: Plan) -> tuple[RoundBuffers, list[int], Extras | None]:
        """The buffers for this batch, with lanes that are set up; the lane of each sequence; the extras, if needed.

        Sequences that go on where the last burst has left them keep their lanes: only page tables change. A lane whose
        sequence has ended takes another.
        """
        buffers, trees = self._made(len(sequences), _kind(plan)), plan.drafts
        size, spare = buffers.lanes.size, self._sizes.get(trees, (0, 0))[1]
        self._sizes[trees] = size, spare + 1 if size > bucket(len(sequences)) else 0
        lanes, fresh = buffers.lane_map.take(_positions(buffers, sequences))
        if fresh:
            buffers.lanes.fill(fresh, buffers.known)
            joining = {lane: sequence for lane, sequence in fresh.items() if sequence is not None}
            for keeper in buffers.keepers if joining else ():
                keeper.fill(joining)
        buffers.lanes.set_pages(dict(zip(lanes, sequences, strict=True)), self._cache.idle_page)
        demanding = any(Level.of(sequence) is Level.ALL for sequence in sequences)
        extras = self._extras_of(buffers) if demanding else self._extras.get(buffers)
        if extras is not None:
            extras.fill(fresh)
        return buffers, lanes, extras if demanding else None

    def _lanes_for(self, count: int, trees: bool) -> int:
        """How many lanes serve `count` sequences.

        The number shrinks only after a few bursts that needed fewer lanes: while requests come and go, running
        sequences keep their lanes.
        """
        wanted, (size, spare) = bucket(count), self._sizes.get(trees, (0, 0))
        return size if wanted < size <= _MOST_SPARE * wanted and spare < _PATIENCE else wanted

    def _made(self, sequences: int, kind: Kind) -> RoundBuffers:
        return self._of_size(self._lanes_for(sequences, kind is not None), kind)

    def _of_size(self, count: int, kind: Kind) -> RoundBuffers:
        if (count, kind) not in self._buffers:
            made = self._buffers[count, kind] = RoundBuffers.made(self._model, self._drafter, count, kind)
            if made.draft is not None:
                self._counters[made] = AcceptanceCounter(made)
        return self._buffers[count, kind]

    def _extras_of(self, buffers: RoundBuffers) -> Extras:
        if buffers not in self._extras:
            lines, vocabulary = len(buffers.results), self._model.config.vocab_size
            self._extras[buffers] = Extras(buffers.lanes, lines, vocabulary)
        return self._extras[buffers]

    def warm_up(self, most: int) -> None:
        """Run every kind of round twice, for all sizes of batches up to `most` sequences, in free lanes.

        So all graphs are captured, and all kernels compiled, before the first request. No sequence may be in a burst.
        """
        self.forget()
        for size in sizes(most):
            for kind in self._kinds(size):
                buffers = self._of_size(size, kind)
                self._extras_of(buffers)
                for level in [*Level] * 2:
                    buffers.lanes.set_pages({}, self._cache.idle_page)
                    buffers.number.zero_()
                    self.draft(buffers, level > Level.GREEDY)
                    self.verify(buffers, level, False)

    def _kinds(self, size: int) -> list[Kind]:
        """All kinds of rounds of so many lanes."""
        if self._drafter.parts:
            return [None, *self._drafter.device_drafts(size)]
        waits = self._drafter.has_signal  # the drafter has rounds without trees, too
        return [*([None] if waits or self._drafter.is_passive else []), *([] if self._drafter.is_passive else [()])]

    # -- a round ------------------------------------------------------------------------------------------------------

    def draft(self, buffers: RoundBuffers, sampled: bool) -> None:
        """The first half of a round: draft trees below all roots, if there is a drafter."""
        loop = buffers.loop
        if loop is not None:
            self.graphs.run((buffers.lanes.size, buffers.kind, sampled, "draft"), lambda: loop.draft(sampled))

    def verify(self, buffers: RoundBuffers, level: Level, traced: bool) -> None:
        """The second half of a round: verify and advance."""
        key = (buffers.lanes.size, buffers.kind, level, traced, "verify")
        self.graphs.run(key, lambda: self._verify(buffers, level, traced))

    def _verify(self, buffers: RoundBuffers, level: Level, traced: bool) -> None:
        """Run the target over all trees, walk the accepted paths and advance to the next roots."""
        passed = self._passed(buffers)
        self._settle(buffers, passed, self._chosen(buffers, passed, level), level, traced)

    def _passed(self, buffers: RoundBuffers) -> Passed:
        """Run the target over all trees."""
        model, lanes = self._model, buffers.lanes
        depths, bits = forest.geometry(lanes.parents, lanes.depth)
        rows = lanes.rows(lanes.slots, lanes.offsets, depths)
        seen = bits.flatten(0, 1) if lanes.nodes else None
        attend = model.attention_over(buffers.tiles.after(lanes.slots, seen, rows.positions))
        x = model.embed(lanes.tokens.flatten())
        layers, taps = range(model.config.layers), self._drafter.taps
        tapped = model.run_(x, rows, attend, self._cache.layers(TARGET), layers, taps)
        return Passed(model.head(x), rows.positions, depths, tapped)

    def _chosen(
        self, buffers: RoundBuffers, passed: Passed, level: Level, masks: LaneMasks | None = None
    ) -> torch.Tensor:
        """The target's choices after all nodes, int64 [lanes, 1 + nodes]."""
        lanes, positions = buffers.lanes, passed.positions
        after = positions + 1 if level > Level.GREEDY else positions  # greedy choices do not read it
        logits = passed.logits
        if level is Level.ALL:
            logits = self._extras[buffers].adjustments.adjusted(logits, after)
        if masks is not None:
            logits = masks.applied(logits)
        cuts = lanes.row_cuts if level >= Level.CUT else None
        how = lanes.row_stems, after, lanes.row_temperatures
        return choose_rows(logits, *how, sampled=level > Level.GREEDY, cuts=cuts).view_as(lanes.tokens)

    def _settle(self, buffers: RoundBuffers, passed: Passed, chosen: torch.Tensor, level: Level, traced: bool) -> None:
        """Walk the accepted paths and advance to the next roots."""
        lanes, depths = buffers.lanes, passed.depths
        extras = self._extras[buffers] if level is Level.ALL else None
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
        for keeper in buffers.keepers:
            keeper.observe(path, accepted, passed.taps)
        if extras is not None:
            extras.scores.note(passed.logits, chosen, path, buffers.number)
        lanes.advance(chosen, path, accepted, depths, buffers.results, buffers.number)
        if extras is not None:
            extras.adjustments.advance()
        buffers.number.add_(1)


def _positions(buffers: RoundBuffers, sequences: list[Sequence]) -> list[LanePosition]:
    return [LanePosition(s, s.cached, len(s.tokens), buffers.known(s)) for s in sequences]


def _kind(plan: Plan) -> Kind:
    return plan.parts if plan.drafts else None
