"""The step: schedule, plan, launch, collect, emit, observe. Nothing here depends on a drafting method."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.device import DeviceRunner
from slipstream.engine.drafting import DrafterSet
from slipstream.engine.endings import emit
from slipstream.engine.host import HostRunner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.state import EngineState
from slipstream.models.model import Model
from slipstream.policy import AutoPolicy, Progress, Report, Tally
from slipstream.policy.costs import pass_shape
from slipstream.sequence import Sequence, Work
from slipstream.types import Plan
from slipstream.verify import Verifier

Runner = HostRunner | DeviceRunner


class Engine:
    """Runs sequences until they finish. `step` is the whole loop body."""

    def __init__(self, model: Model, cache: PagedCache, verifier: Verifier, scheduler: Scheduler) -> None:
        self.model = model
        self.cache = cache
        self.verifier = verifier
        self.scheduler = scheduler
        self.drafters = DrafterSet(model.config.vocab_size)
        self._state = EngineState(model, cache, self.drafters, verifier, scheduler)
        self.tally = Tally()  # of all passes
        # A runner raised this: its state is undefined, and the loop makes the engine anew.
        self.failure: Exception | None = None
        self.set_runners()

    def set_runners(self) -> None:
        """Make the runners that this model and verifier support, and the policy over them."""
        self.device = DeviceRunner(self._state) if DeviceRunner.possible(self._state) else None
        shape = pass_shape(self.model.cheap_rows, self.model.config.weights_read)
        self.policy = AutoPolicy(self.drafters, self.device, shape)
        self.host = HostRunner(self._state, self.policy)

    def step(self) -> list[Progress]:
        """One pass over all work that is ready (on a device: several); empty when the engine is idle."""
        with torch.inference_mode():
            work = self.scheduler.next()
            plans = self.policy.plan(work, waiting=bool(self.scheduler.waiting))
            # Each part is launched before the next one is routed: the host reserves what the device has left.
            launched = [self._launch(runner, part, plans) for runner, part in self.route(work, plans)]
            done: dict[Sequence, Progress] = {}
            for runner, part in launched:
                for report in self._collect(runner, part):
                    self.emit(report)
                    self.policy.observe(report)
                    self.tally.add(report.tally)
                    done.update((item.sequence, item) for item in report.progress)
            return list(done.values())

    def route(self, work: list[Work], plans: dict[Sequence, Plan]) -> Iterator[tuple[Runner, list[Work]]]:
        """Work with a planned burst goes to the device, as far as it has room; the rest to the host.

        Lazy: the part of the host is made after that of the device was launched. Replaces the plans of work that had a
        burst planned and finds no room.
        """
        on_device: set[Sequence] = set()
        if self.device is not None:
            part, left = self.device.admit([item for item in work if plans[item.sequence].rounds], plans)
            plans.update({item.sequence: self.policy.single(item.sequence) for item in left})
            on_device = {item.sequence for item in part}
            yield self.device, part
        yield self.host, [item for item in work if item.sequence not in on_device and not item.sequence.finished]

    def emit(self, report: Report) -> None:
        """Emit the reported tokens. An error here ends only its own sequence."""
        for item in report.progress:
            if not item.sequence.finished:
                try:
                    emit(item)
                except Exception as error:
                    self._state.fail(item.sequence, error)

    # -- an error ends the requests of its part, and no others --------------------------------------------------------

    def _launch(self, runner: Runner, part: list[Work], plans: dict[Sequence, Plan]) -> tuple[Runner, list[Work]]:
        try:
            runner.launch(part, plans)
        except Exception as error:
            self._fail(part, error)
        return runner, part

    def _collect(self, runner: Runner, part: list[Work]) -> Iterator[Report]:
        try:
            yield from runner.collect()
        except Exception as error:
            self._fail(part, error)

    def _fail(self, part: list[Work], error: Exception) -> None:
        self.failure = error
        for item in part:
            if not item.sequence.finished:
                self._state.fail(item.sequence, error)

    # -- from outside -------------------------------------------------------------------------------------------------

    @property
    def draft_faults(self) -> int:
        """How many drafts of the loaded drafters failed, over all requests."""
        return self.drafters.faults.total() + sum(drafter.part_faults.total() for drafter in self.drafters.values())

    def add_drafter(self, name: str, drafter: AnyDrafter) -> None:
        """Add a drafter. Requests may name it from now on."""
        self.drafters.add(name, drafter)

    def remove_drafter(self, name: str) -> None:
        """Remove a drafter that no sequence uses."""
        self.drafters.remove(name)
        if self.device is not None:
            self.device.remove(name)

    def departed(self) -> list[Sequence]:
        """The sequences that left since the last call: finished, cancelled or failed."""
        left, self._state.departed[:] = list(self._state.departed), []
        return left

    def cancel(self, sequence: Sequence) -> None:
        """Cancel a sequence if it is still here; one that just finished is removed too."""
        if not sequence.finished:
            sequence.finish_reason = "cancelled"
        self._state.leave(sequence)
