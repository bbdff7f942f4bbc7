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
from typing import NamedTuple

import torch

from slipstream.attention import LaneTiles
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.rounds import FIRST_TOKEN, AcceptanceCounter, Collected, RoundBuffers
from slipstream.gpu import forest
from slipstream.gpu.device_sampling import choose_rows
from slipstream.gpu.graphs import Graphs, bucket
from slipstream.gpu.lanes import Lanes
from slipstream.models.decoder import Decoder
from slipstream.policy import Progress, Round, Tally
from slipstream.policy.sizes import most_rounds
from slipstream.policy.tally import BINS
from slipstream.sequence import TARGET, Sequence
from slipstream.types import Plan


class LanePosition(NamedTuple):
    """The state of a sequence after its last burst."""

    sequence: Sequence
    cached: int
    tokens: int
    known: int


@dataclass(frozen=True)
class Launched:
    """Rounds that are running or done."""

    buffers: RoundBuffers
    sequences: list[Sequence]
    starts: list[int]  # slots of the roots of the first round
    collected: Collected
    most: int  # rounds that slots are reserved for
    began: float
    progress: list[Progress]
    rounds: int = 0
    may_go_ahead: bool = False

    def root_slots(self, rounds: int) -> list[int]:
        """Slots of the roots after `rounds` finished rounds."""
        counts = self.collected.token_counts(rounds)
        return [start + count for start, count in zip(self.starts, counts, strict=True)]

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
        self._last: tuple[RoundBuffers, list[LanePosition]] | None = None  # the last burst's, and where it ended
        self.ahead: Launched | None = None  # a burst whose first round was started ahead
        self.graphs = Graphs(model.device)

    # -- host side, before a burst ------------------------------------------------------------------------------------

    def shape(self, count: int) -> Plan:
        """The tree shape of rounds with `count` sequences."""
        lanes = self._made(bucket(count), trees=not self._drafter.is_passive).lanes
        return Plan(depth=lanes.depth, nodes=lanes.nodes)

    def reserve(self, sequences: list[Sequence], plan: Plan) -> int:
        """Reserve slots for the planned rounds; returns for how many there is room, 0 if not even for one.

        A burst never preempts a sequence; a single step does, when it must.
        """
        buffers = self._made(bucket(len(sequences)), trees=plan.drafts)
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
        buffers = self.filled(sequences, trees=plan.drafts)
        buffers.number.zero_()
        collected = Collected(buffers, sequences, [s.remaining for s in sequences])
        starts, progress = [s.cached for s in sequences], [Progress(s) for s in sequences]
        begun = Launched(buffers, sequences, starts, collected, rounds, began, progress, may_go_ahead=plan.ahead)
        return self._run(begun, rounds)

    def _run(self, launched: Launched, rounds: int) -> Launched:
        """Run until `rounds` rounds in total are done, or enough sequences finished."""
        buffers, collected, number = launched.buffers, launched.collected, launched.rounds
        sampled = not all(s.params.greedy for s in launched.sequences)
        while number < rounds and not collected.over(number):
            if buffers.loop is not None:
                collected.drafting.mark()
                self.draft(buffers, sampled)
                collected.drafting.mark()
            collected.verifying.mark()
            self.verify(buffers, sampled, launched.traced)
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
            buffers.lanes.set_pages(sequences, self._cache.idle_page)
            next_one = Collected(buffers, sequences, collected.left, after=collected)
            buffers.number.fill_(next_one.first_line)
            began, progress = time.perf_counter(), [Progress(s) for s in sequences]
            self.ahead = self._run(Launched(buffers, sequences, starts, next_one, rounds, began, progress), 1)

    def go_on(self, launched: Launched, plan: Plan, *, alone: bool) -> Launched:
        """Continue a burst that was started ahead: to its end if `alone`, otherwise only its first round."""
        begun = replace(launched, began=time.perf_counter(), may_go_ahead=alone and plan.ahead)
        return self._run(begun, min(begun.most, plan.rounds) if alone else 1)

    def forget(self) -> None:
        """Drop a burst that was started ahead. The next burst sets up all lanes anew."""
        self.ahead = self._last = None

    def read(self, launched: Launched, first: int, stop: int) -> None:
        """Wait for rounds `first` to `stop`, and add their results to the progress of each unfinished sequence."""
        buffers = launched.buffers
        lines = launched.collected.read(first, stop)
        nodes, depth = buffers.lanes.nodes, buffers.lanes.depth
        # Bare roots give one token per round: they are reported as one `Round` of several steps.
        given = (lines if nodes else lines[:, :, FIRST_TOKEN]).swapaxes(0, 1).tolist()
        for lane, (item, results) in enumerate(zip(launched.progress, given, strict=True)):
            if item.sequence.finished:
                continue
            if not nodes:
                item.rounds.append(Round(results, steps=len(results)))
                continue
            for number, line in enumerate(results, first):
                accepted, deepest = line[0], line[1]
                origins = [buffers.origins[which] for which in line[FIRST_TOKEN + depth + 1 :][:accepted]]
                item.rounds.append(Round(line[FIRST_TOKEN:][: 1 + accepted], origins, nodes, deepest))
                if item.sequence.request.trace:
                    item.trees.append(buffers.tree(launched.collected.first_line + number, lane))

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
            for lane, (sequence, root_slot) in enumerate(zip(sequences, roots, strict=True)):
                if sequence.table.pages:
                    guard(sequence, partial(loop.settle, sequence, lane, root_slot))
        if not any(s.finished for s in sequences):
            self._last = buffers, _positions(buffers, sequences)

    def filled(self, sequences: list[Sequence], *, trees: bool) -> RoundBuffers:
        """The buffers for this batch, with its lanes set up."""
        buffers = self._made(bucket(len(sequences)), trees=trees)
        last, self._last = self._last, None
        if last == (buffers, _positions(buffers, sequences)):
            # Lanes and drafter state are still those of the last burst: only the page tables changed.
            buffers.lanes.set_pages(sequences, self._cache.idle_page)
        else:
            buffers.lanes.fill(sequences, [buffers.known(s) for s in sequences], self._cache.idle_page)
            if buffers.loop is not None:
                buffers.loop.fill(sequences)
        return buffers

    def _made(self, count: int, *, trees: bool) -> RoundBuffers:
        if (count, trees) not in self._buffers:
            made = self._buffers[count, trees] = self._make(count, trees)
            if made.draft is not None:
                self._counters[made] = AcceptanceCounter(made)
        return self._buffers[count, trees]

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
        hosts = _on_host(results), _on_host(counts)
        return RoundBuffers(
            lanes, draft, loop, rounds, tiles, results, hosts[0], counts, hosts[1], trees_, confidence, numbers(1)
        )

    # -- a round ------------------------------------------------------------------------------------------------------

    def draft(self, buffers: RoundBuffers, sampled: bool) -> None:
        """The first half of a round: draft trees below all roots, if there is a drafter."""
        loop = buffers.loop
        if loop is not None:
            self.graphs.run((buffers.lanes.size, sampled, "draft"), lambda: loop.draft(sampled))

    def verify(self, buffers: RoundBuffers, sampled: bool, traced: bool) -> None:
        """The second half of a round: verify and advance."""
        key = (buffers.lanes.size, buffers.lanes.nodes, sampled, traced, "verify")
        self.graphs.run(key, lambda: self._verify(buffers, sampled, traced))

    def _verify(self, buffers: RoundBuffers, sampled: bool, traced: bool) -> None:
        """Run the target over all trees, walk the accepted paths and advance to the next roots."""
        model, lanes, loop = self._model, buffers.lanes, buffers.loop
        depths, bits = forest.geometry(lanes.parents, lanes.depth)
        rows = lanes.rows(lanes.slots, lanes.offsets, depths)
        seen = bits.flatten(0, 1) if lanes.nodes else None
        attend = model.attention_over(buffers.tiles.after(lanes.slots, seen, rows.positions))
        x = model.embed(lanes.tokens.flatten())
        layers, taps = range(model.config.layers), self._drafter.taps
        tapped = model.run_(x, rows, attend, self._cache.layers(TARGET), layers, taps)
        after = rows.positions + 1 if sampled else rows.positions  # greedy choices do not read it
        chosen = choose_rows(model.head(x), lanes.row_stems, after, lanes.row_temperatures, sampled=sampled)
        chosen = chosen.view_as(lanes.tokens)
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
        lanes.advance(chosen, path, accepted, depths, buffers.results, buffers.number)
        buffers.number.add_(1)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory that the device copies to; on a CPU the tensor itself."""
    if not tensor.is_cuda or not tensor.numel():
        return tensor.cpu()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _positions(buffers: RoundBuffers, sequences: list[Sequence]) -> list[LanePosition]:
    return [LanePosition(s, s.cached, len(s.tokens), buffers.known(s)) for s in sequences]


def _scratch(draft: DeviceDraft | None) -> int:
    """Rows after a root that a round may write: the tree's, or those that drafting needs."""
    return 0 if draft is None else max(draft.nodes, draft.scratch)
