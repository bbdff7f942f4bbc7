"""The device runner: bursts of rounds with fixed shapes, one burst per drafter."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from slipstream.engine.burst import Burst
from slipstream.engine.constrained import ConstrainedBurst
from slipstream.engine.launched import Launched
from slipstream.engine.state import EngineState
from slipstream.gpu.adjustments import fits_lanes
from slipstream.gpu.lane_scores import TOPS
from slipstream.models.decoder import Decoder
from slipstream.policy import Progress, Report
from slipstream.policy.costs import captured_shape
from slipstream.policy.trust import Signal
from slipstream.sequence import TARGET, Sequence, Work
from slipstream.types import Plan
from slipstream.verify import Match

log = logging.getLogger("slipstream")

_NO_TREES = Plan()


class DeviceRunner:
    """Runs the sequences that rounds support. A drafter that fails here continues on the host."""

    def __init__(self, state: EngineState) -> None:
        assert isinstance(state.model, Decoder)
        self._state = state
        self._model = state.model
        # By drafter, and whether its sequences have grammars; None: it does not support rounds.
        self._bursts: dict[tuple[str, bool], Burst | None] = {}
        self._launched: list[tuple[Burst, Launched]] = []
        self._faults: list[tuple[Sequence, Exception]] = []  # of signals in this step
        self._fits: WeakKeyDictionary[Sequence, bool] = WeakKeyDictionary()  # whether lanes hold its adjustments

    @staticmethod
    def possible(state: EngineState) -> bool:
        """Whether passes can be captured and the verifier is the one that rounds implement."""
        return isinstance(state.model, Decoder) and state.model.captures and isinstance(state.verifier, Match)

    def burst(self, drafter: str, *, constrained: bool = False) -> Burst | None:
        """The bursts of a drafter, if it supports rounds; `constrained`: of sequences with a grammar."""
        key = drafter, constrained
        if key not in self._bursts:
            found = self._state.drafters[drafter]
            try:
                able = found.is_passive or bool(found.parts) or found.device_draft(1) is not None
            except Exception as error:
                self._give_up(drafter, [], error)
                return None
            kind = ConstrainedBurst if constrained else Burst
            self._bursts[key] = kind(self._model, self._state.cache, found) if able else None
        return self._bursts[key]

    def remove(self, drafter: str) -> None:
        """Forget a drafter that left the set."""
        for constrained in (False, True):
            self._bursts.pop((drafter, constrained), None)

    def warm_up(self) -> None:
        """Compile kernels, and make the graphs of all rounds that the loaded drafters can meet.

        Does nothing while requests are running.
        """
        if self._state.scheduler.idle:
            with torch.inference_mode():
                self._model.compile_kernels(self._state.cache, TARGET)
                for name in self._state.drafters:
                    burst = self.burst(name)
                    if burst is not None:
                        burst.warm_up(self._state.scheduler.max_sequences)

    @property
    def graphs(self) -> int:
        """How many kinds of rounds have run: as many graphs."""
        return sum(len(burst.graphs) for burst in self._bursts.values() if burst is not None)

    # -- read by the policy -----------------------------------------------------------------------------------------

    def serves(self, work: Work) -> bool:
        """Whether rounds support this work: decoding only. The host is needed for a prediction, for long lists of
        tokens, and for lists beside a grammar, because both together may leave no token.
        """
        sequence = work.sequence
        if sequence.first_token_at is None or len(work.pending) > 1 or (sequence.params.logprobs or 0) > TOPS:
            return False
        if self._state.drafters.of(sequence).host_only(sequence):
            return False
        if sequence.constraint is not None and sequence.sampler.forbids:
            return False
        if not sequence.params.adjusts:
            return True
        if sequence not in self._fits:
            self._fits[sequence] = fits_lanes(sequence.sampler, self._model.config.vocab_size)
        return self._fits[sequence]

    def shape(self, drafter: str, count: int, *, constrained: bool) -> Plan | None:
        """The tree shape of rounds with `count` sequences; `constrained`: with grammars."""
        burst = self.burst(drafter, constrained=constrained)
        try:
            return None if burst is None else burst.shape(count)
        except Exception as error:
            if self._state.drafters[drafter].is_passive:
                raise
            self._give_up(drafter, [], error)
            return None

    def shapes(self, drafter: str, count: int) -> list[Plan]:
        """The shapes of trees among which the policy picks for rounds with `count` sequences."""
        burst = self.burst(drafter)
        try:
            return [] if burst is None else burst.shapes(count)
        except Exception as error:
            self._give_up(drafter, [], error)
            return []

    def signal(self, sequence: Sequence) -> Signal | None:
        """The signal of the sequence's drafter. If that fails, it is dropped for the sequence after this step."""
        try:
            return self._state.drafters.of(sequence).signal(sequence)
        except Exception as error:
            self._faults.append((sequence, error))
            return Signal(matched=0, least=1)

    def pass_shape(self, rows: int) -> float:
        """A guess at the cost of a pass by its rows."""
        return captured_shape(self._model.config.weights_read)(rows)

    def chain_cost(self, shape: Plan, count: int) -> float:
        """Weights that rounds with such trees read, relative to plain rounds."""
        config = self._model.config
        return config.weights_read(count * (1 + shape.nodes)) / config.weights_read(count)

    # -- running ------------------------------------------------------------------------------------------------------

    def admit(self, work: list[Work], plans: dict[Sequence, Plan]) -> tuple[list[Work], list[Work]]:
        """Reserve slots for the planned bursts; returns (work that runs here, work that must run on the host).

        If a burst was started ahead, sequences that are not in it wait for one step.
        """
        groups: defaultdict[tuple[str, bool], list[Work]] = defaultdict(list)
        for item in work:
            groups[_group(item.sequence)].append(item)
        taken: list[Work] = []
        left: list[Work] = []
        for (name, constrained), group in groups.items():
            burst = self.burst(name, constrained=constrained)
            assert burst is not None
            sequences = [item.sequence for item in group]
            if burst.ahead is not None:
                taken += group
                continue
            try:
                rounds = self._reserved(burst, sequences, plans)
            except Exception as error:
                self._give_up(name, sequences, error, plans[sequences[0]])
                rounds = 0
            for sequence in sequences:
                plans[sequence] = replace(plans[sequence], rounds=rounds)
            (taken if rounds else left).extend(group)
        return taken, left

    @staticmethod
    def _reserved(burst: Burst, sequences: list[Sequence], plans: dict[Sequence, Plan]) -> int:
        """How many rounds have slots. Without room for the trees that a policy chose, plain rounds are planned."""
        plan = plans[sequences[0]]
        rounds = burst.reserve(sequences, plan)
        if not rounds and plan.drafts and plan.parts:
            plans.update(dict.fromkeys(sequences, Plan(rounds=plan.rounds)))
            rounds = burst.reserve(sequences, plans[sequences[0]])
        return rounds

    def launch(self, part: list[Work], plans: dict[Sequence, Plan]) -> None:
        """Launch the planned bursts, and continue those that were started ahead."""
        groups: defaultdict[tuple[str, bool], list[Sequence]] = defaultdict(list)
        for item in part:
            groups[_group(item.sequence)].append(item.sequence)
        for group, burst in list(self._bursts.items()):
            if burst is None or (burst.ahead is None and group not in groups):
                continue
            sequences = groups[group]
            plan = plans[sequences[0]] if sequences else Plan()
            try:
                launched = _begun(burst, sequences, plan)
            except Exception as error:
                self._give_up(group[0], sequences, error, plan)
                continue
            self._launched.append((burst, launched))
            self._state.scheduler.pinned.update(launched.sequences)

    def _give_up(self, drafter: str, sequences: list[Sequence], error: Exception, plan: Plan = _NO_TREES) -> None:
        """Handle a failed launch. Nothing of these rounds was emitted, so the host continues from here, or rounds of
        another kind if the policy has a choice.

        If the drafter is passive, the target itself failed, and so do the requests.
        """
        if self._state.drafters[drafter].is_passive:
            for sequence in sequences:
                self._state.fail(sequence, error)
            return
        burst = self._bursts.get((drafter, False))
        if burst is not None and plan.drafts and plan.parts:
            log.warning("drafter %r failed on the device with trees of %d nodes: %s", drafter, plan.nodes, error)
            burst.give_up(plan)
        else:
            log.warning("drafter %r failed on the device and continues on the host: %s", drafter, error)
            self._bursts[drafter, False] = self._bursts[drafter, True] = None
        self._state.drafters.faults[drafter] += 1

    def collect(self) -> Iterator[Report]:
        """Report all rounds but the last while that one runs; then start the next burst ahead and report the last."""
        bursts, self._launched = self._launched, []
        faults, self._faults = self._faults, []
        self._state.scheduler.pinned.clear()
        for sequence, error in faults:
            self._state.drafters.drop(sequence, error)
        for number, (burst, launched) in enumerate(bursts):
            try:
                yield from self._collect(burst, launched)
            except BaseException:
                for other, _ in bursts[number:]:
                    other.forget()  # it continues from tokens that were not emitted
                raise

    def _collect(self, burst: Burst, launched: Launched) -> Iterator[Report]:
        state, last = self._state, launched.rounds - 1
        for sequence, error in burst.faults:
            state.fail(sequence, error)
        unfinished = [item for item in launched.progress if not item.sequence.finished]  # the others were cancelled
        report, device_ms, failed, rounds = Report(unfinished), 0.0, False, 0
        for first, stop in ((0, last), (last, last + 1)):
            # Skip waiting for the last round if all sequences finished before it.
            if first == stop or all(item.sequence.finished for item in unfinished):
                continue
            burst.read(launched, first, stop)
            rounds = stop
            device_ms = 1000 * (time.perf_counter() - launched.began)
            if stop > last:
                failed = launched.may_go_ahead and not self._went_ahead(burst, launched)
                report = self._report(burst, launched, unfinished, rounds)
            yield report
        if unfinished and rounds <= last:  # nothing was left to wait for in the last round
            report = self._report(burst, launched, unfinished, rounds)
            yield report
        burst.commit(launched, state.guarded)
        if burst.ahead is None:
            burst.settle(launched, state.drafters.guarded)
        if failed:
            burst.forget()
        for item in unfinished:
            if item.sequence.error is None:
                state.publish(item.sequence)
                if burst.ahead is None:  # else the device still writes to its pages
                    state.finish(item.sequence)
        if unfinished:
            report.charge(len(unfinished), 1000 * (time.perf_counter() - launched.began) - device_ms)

    @staticmethod
    def _went_ahead(burst: Burst, launched: Launched) -> bool:
        try:
            burst.go_ahead(launched)
            return True
        except Exception as error:  # this step still has tokens to emit; the next one retries
            log.warning("a round ahead failed: %s", error)
            return False

    @staticmethod
    def _report(burst: Burst, launched: Launched, unfinished: list[Progress], rounds: int) -> Report:
        """The report of a burst's first `rounds` rounds, which are finished and were read."""
        rows = rounds * len(launched.sequences) * (1 + launched.buffers.lanes.nodes)
        draft_ms, verify_ms = (
            timer.milliseconds(rounds) for timer in (launched.collected.drafting, launched.collected.verifying)
        )
        shape, tally = replace(launched.shape, rounds=rounds), burst.tally(launched)
        return Report(unfinished, rows, 0, draft_ms, verify_ms, tally, launched.calls(), launched.cold, shape)


def _group(sequence: Sequence) -> tuple[str, bool]:
    """The group whose sequences share a burst: their drafter, and whether they have a grammar."""
    return sequence.active_drafter, sequence.constraint is not None


def _begun(burst: Burst, sequences: list[Sequence], plan: Plan) -> Launched:
    """Continue the burst that was started ahead, or launch a new one.

    A burst started ahead runs to its end if its sequences are the only work, and for one round otherwise.
    """
    ahead, burst.ahead = burst.ahead, None
    if ahead is not None:
        return burst.go_on(ahead, plan, alone=plan.ahead and ahead.sequences == sequences)
    return burst.launch(sequences, plan, plan.rounds)
