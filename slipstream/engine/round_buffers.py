"""The device buffers of rounds, by size of batch, and the copies of their results to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention import LaneTiles
from slipstream.drafters.device.device_draft import DeviceDraft, DeviceKeeper, DeviceLoop
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.endings import Lookout, ends_of
from slipstream.engine.extras import Extras, on_host
from slipstream.engine.lane_map import LaneMap
from slipstream.gpu.lanes import Lanes
from slipstream.models.decoder import Decoder
from slipstream.policy.sizes import most_rounds, stops_burst
from slipstream.policy.tally import BINS, Tally
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

Kind = tuple[Plan, ...] | None  # of rounds: None, bare roots; otherwise trees by these plans of a drafter's parts

FIRST_TOKEN = 2  # where the tokens begin in a lane's result, after the number of accepted nodes and the deepest node


class Passed(NamedTuple):
    """What a target pass over the trees of all lanes gives."""

    logits: torch.Tensor  # [lanes * (1 + nodes), vocab]
    positions: torch.Tensor  # int64 [lanes * (1 + nodes)]
    depths: torch.Tensor  # int64 [lanes, 1 + nodes]
    taps: dict[int, torch.Tensor]  # layer -> [lanes * (1 + nodes), width]


@dataclass(frozen=True, eq=False)
class RoundBuffers:
    """All buffers of rounds for one size of batch."""

    kind: Kind
    lanes: Lanes
    lane_map: LaneMap
    draft: DeviceDraft | None
    loop: DeviceLoop | None
    keepers: Seq[DeviceKeeper]  # the loop, and the state that idle drafters keep up to date
    rounds: int  # at most, of a burst
    tiles: LaneTiles
    results: torch.Tensor  # int64 [2 * rounds, lanes, FIRST_TOKEN + depth + 1 + depth]; bursts use its halves in turn
    results_host: torch.Tensor  # the copy on the host
    counts: torch.Tensor  # int64 [origins, depth, BINS, 2], accumulated over all rounds
    counts_host: torch.Tensor
    trees: torch.Tensor  # int64 [2 * rounds, 3, lanes, 1 + nodes]: tokens, parents and origins of traced rounds
    confidence: torch.Tensor  # float32 [2 * rounds, lanes, 1 + nodes]: log joint probabilities of these nodes
    number: torch.Tensor  # int64 [1]: the line of `results` that the next round writes

    @staticmethod
    def made(model: Decoder, drafter: AnyDrafter, count: int, kind: Kind) -> RoundBuffers:
        """Buffers of `count` lanes for rounds of one kind."""
        config, device = model.config, model.device
        draft = None if kind is None else drafter.device_drafts(count)[kind] if kind else drafter.device_draft(count)
        nodes, depth = (draft.nodes, draft.depth) if draft else (0, 0)
        rounds = most_rounds(drafts=kind is not None or bool(drafter.parts), passive=drafter.is_passive)
        lanes = Lanes(count, nodes, depth, config.context, rounds * (1 + depth) + scratch_rows(draft), device)
        tiles = LaneTiles(lanes.tables, 1 + nodes, config.group, open_rows=nodes > 0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        results = numbers(2 * rounds, count, FIRST_TOKEN + depth + 1 + depth)
        counts = numbers(len(draft.origins) if draft else 0, depth, BINS, 2)
        trees = numbers(2 * rounds, 3, count, 1 + nodes)
        confidence = torch.zeros(2 * rounds, count, 1 + nodes, dtype=torch.float32, device=device)
        loop = None if draft is None else draft.loop(lanes)
        resting = drafter.device_keepers(lanes, kind or ()) if drafter.parts else ()
        keepers: list[DeviceKeeper] = [*([] if loop is None else [loop]), *resting]
        arrays = results, on_host(results), counts, on_host(counts), trees, confidence, numbers(1)
        return RoundBuffers(kind, lanes, LaneMap(count), draft, loop, keepers, rounds, tiles, *arrays)

    @property
    def scratch(self) -> int:
        """Rows after a root that a round may write."""
        return scratch_rows(self.draft)

    def known(self, sequence: Sequence) -> int:
        """How many tokens of a sequence the drafter has already processed."""
        return len(sequence.tokens) - 1 if self.draft is None else self.draft.known(sequence)

    @property
    def origins(self) -> tuple[str, ...]:
        """The drafters of nodes, in the order of the lanes' indices."""
        return () if self.draft is None else self.draft.origins

    def tree(self, line: int, lane: int) -> TokenTree:
        """The tree of a lane in a finished, traced round."""
        tokens, parents, origins = self.trees[line, :, lane].tolist()
        joint = self.confidence[line, lane].exp().clamp(0.0, 1.0).tolist()
        tree, places = TokenTree(tokens[0]), [0]
        for node in range(1, len(tokens)):
            origin = self.origins[origins[node]]
            places.append(tree.add(places[parents[node]], tokens[node], origin=origin, confidence=joint[node]))
        return tree


def scratch_rows(draft: DeviceDraft | None) -> int:
    """Rows after a root that a round may write: the tree's, or those that drafting needs."""
    return 0 if draft is None else max(draft.nodes, draft.scratch)


class RoundTimer:
    """The time of a part of each round: by CUDA events on a GPU, by the host's clock elsewhere."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._times: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Record the start or the end of the part, in turn."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._times.append(event)
        else:
            self._times.append(time.perf_counter())

    def milliseconds(self, rounds: int) -> float:
        """The total of the parts of the first rounds, which are finished."""
        total = 0.0
        for begin, end in zip(self._times[: 2 * rounds : 2], self._times[1 : 2 * rounds : 2], strict=True):
            if isinstance(begin, float) and isinstance(end, float):
                total += 1000.0 * (end - begin)
            else:
                total += begin.elapsed_time(end)  # type: ignore[union-attr, arg-type]
        return total


class Collected:
    """The results of rounds: copied to the host after each round, read while the next one runs."""

    first_line: int

    def __init__(
        self,
        buffers: RoundBuffers,
        sequences: list[Sequence],
        lanes: Seq[int],
        left: Seq[int],
        extras: Extras | None = None,
        after: Collected | None = None,
    ) -> None:
        """`lanes`: those of the sequences. `left`: tokens that each may still get.

        `after`: the previous burst of the same sequences, if its results are not emitted yet.
        """
        first = self.first_line = buffers.rounds if after is not None and after.first_line == 0 else 0
        self._buffers = buffers
        self._results = buffers.results[first : first + buffers.rounds]
        self._host = buffers.results_host[first : first + buffers.rounds]
        self._extras = extras
        self._depth = buffers.lanes.depth
        self._lanes = np.array(lanes)
        self._events: list[torch.cuda.Event] = []
        ends = set().union(*map(ends_of, sequences))
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._lookouts: dict[int, Lookout] = (
            {index: Lookout(s) for index, s in enumerate(sequences) if s.stops is not None}
            if after is None
            else after._lookouts
        )
        self._seen = 0  # rounds that were checked for finished sequences
        self._left = np.array(left)
        self._over = np.zeros(len(sequences), dtype=np.bool_)
        self.drafting, self.verifying = (RoundTimer(on_gpu=self._results.is_cuda) for _ in range(2))

    def send(self, number: int) -> None:
        """Queue the copy of a round's results to the host."""
        if self._results.is_cuda:
            self._host[number].copy_(self._results[number], non_blocking=True)
            if self._extras is not None:
                self._extras.send(self.first_line + number)
            if self._depth:
                self._buffers.counts_host.copy_(self._buffers.counts, non_blocking=True)
            self._events.append(torch.cuda.Event())
            self._events[-1].record()

    @property
    def left(self) -> list[int]:
        """Tokens that each sequence may still get, after the rounds that were checked."""
        left: list[int] = self._left.tolist()
        return left

    def over(self, number: int) -> bool:
        """Whether the burst stops before round `number`.

        Checks the round before the last, while the last one keeps the device busy. If the last round may finish enough
        sequences by their lengths, waits for it too: the next round would be wasted.
        """
        return self._ended(number - 2) or (self._may_end() and self._ended(number - 1))

    def any_ended(self, number: int) -> bool:
        """Whether any sequence has finished in the rounds up to `number`."""
        self._check_ends(number)
        return bool(self._over.any())

    def _may_end(self) -> bool:
        """Whether one more round may finish enough sequences, by their lengths, to stop the burst."""
        return self._many(self._over | (self._left <= 1 + self._depth))

    def _ended(self, number: int) -> bool:
        """Whether enough sequences finished in the rounds up to `number` to stop the burst."""
        self._check_ends(number)
        return self._many(self._over)

    def _check_ends(self, number: int) -> None:
        """Check all rounds up to this one for finished sequences."""
        while self._seen <= number:
            lines = self.read(self._seen, self._seen + 1)[0]
            tokens, counts = lines[:, FIRST_TOKEN : FIRST_TOKEN + self._depth + 1], lines[:, 0] + 1
            counted = np.arange(tokens.shape[1]) < counts[:, None]
            self._left -= counts
            self._over |= (np.isin(tokens, self._ends) & counted).any(1) | (self._left <= 0)
            for index, lookout in self._lookouts.items():
                if not self._over[index]:
                    self._over[index] = lookout.stops_at(tokens[index, : counts[index]].tolist())
            self._seen += 1

    def _many(self, lanes: npt.NDArray[np.bool_]) -> bool:
        return stops_burst(int(lanes.sum()), len(lanes))

    def token_counts(self, rounds: int) -> list[int]:
        """How many tokens each sequence got in the first `rounds` rounds, which are done."""
        counts: list[int] = (self._host.numpy()[:rounds, self._lanes, 0] + 1).sum(0).tolist()
        return counts

    def read(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The results of rounds `first` to `stop`; waits for the last of them."""
        if self._results.is_cuda:
            self._events[stop - 1].synchronize()
        lines: npt.NDArray[np.int64] = self._host.numpy()[first:stop, self._lanes]
        return lines


class AcceptanceCounter:
    """Acceptance counts since they were last read; on the device they only accumulate."""

    def __init__(self, buffers: RoundBuffers) -> None:
        self._buffers = buffers
        self._read = np.zeros(tuple(buffers.counts_host.shape), dtype=np.int64)

    def since(self) -> Tally:
        """The counts added by rounds whose results have been read."""
        now = self._buffers.counts_host.numpy().copy()
        fresh, self._read = now - self._read, now
        return Tally(dict(zip(self._buffers.origins, fresh, strict=True)))
