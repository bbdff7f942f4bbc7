"""Bursts of sequences with a grammar: one round each, whose choices the host checks before they are accepted.

While the target's pass runs, the host reads the drafted trees. Where top-k, top-p or min-p cut, it makes the masks of
all nodes inside the grammar meanwhile, and they are applied before the choice. Everywhere else the choice is made
without a mask: the best of all tokens, if it is allowed, is the best of the allowed ones. Only if a choice on the
accepted path is refused, the mask of its node is computed, and the choices are made again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.burst import Burst
from slipstream.engine.extras import Extras, Level, on_host
from slipstream.engine.launched import Launched
from slipstream.engine.round_buffers import Passed, RoundBuffers
from slipstream.errors import OptionError
from slipstream.gpu.lane_masks import LaneMasks
from slipstream.models.decoder import Decoder
from slipstream.sequence import Sequence
from slipstream.types import Plan


class ConstrainedBurst(Burst):
    """The bursts of a drafter for sequences with a grammar."""

    def __init__(self, model: Decoder, cache: PagedCache, drafter: AnyDrafter) -> None:
        super().__init__(model, cache, drafter)
        self._checks: dict[RoundBuffers, _Checks] = {}
        self._seated: dict[int, Sequence] = {}  # by lane

    def launch(self, sequences: list[Sequence], plan: Plan, rounds: int) -> Launched:
        """Run one round: the next one has to know which tokens were emitted."""
        self.faults = []
        return super().launch(sequences, plan, min(rounds, 1))

    def filled(self, sequences: list[Sequence], plan: Plan) -> tuple[RoundBuffers, list[int], Extras | None]:
        """The buffers, lanes and extras of `Burst.filled`; notes which sequence has which lane."""
        buffers, lanes, extras = super().filled(sequences, plan)
        self._seated = dict(zip(lanes, sequences, strict=True))
        return buffers, lanes, extras

    def verify(self, buffers: RoundBuffers, level: Level, traced: bool) -> None:
        """The second half of a round in parts: the pass, the choices until none is refused, and the rest."""
        if buffers not in self._checks:
            self._checks[buffers] = _Checks(buffers, self._model.config.vocab_size)
        checks, shape = self._checks[buffers], (buffers.lanes.size, buffers.kind)
        checks.send_trees()
        self.graphs.run((*shape, "pass"), lambda: checks.keep(self._passed(buffers)))
        checks.begin()
        self._any(checks.mask_nodes)
        while True:
            masks = checks.sent_masks()
            choose = partial(self._choose, buffers, checks, level, masks)
            self.graphs.run((*shape, level, masks is not None, "choose"), choose)
            checks.read_choices()
            if not self._any(checks.refused):
                break
        self.graphs.run(
            (*shape, level, traced, "settle"),
            lambda: self._settle(buffers, checks.passed, checks.chosen, level, traced),
        )

    def _choose(self, buffers: RoundBuffers, checks: _Checks, level: Level, masks: LaneMasks | None) -> None:
        checks.chosen.copy_(self._chosen(buffers, checks.passed, level, masks))

    def _any(self, check: Callable[[int, Sequence], bool]) -> bool:
        """Whether `check` is true for any lane. A grammar that fails ends its own request."""
        found = False
        for lane, sequence in list(self._seated.items()):
            try:
                found |= check(lane, sequence)
            except Exception as error:
                self.faults.append((sequence, error))
                del self._seated[lane]
        return found


class _Checks:
    """The buffers through which the host and the parts of a round exchange data, for one batch size."""

    def __init__(self, buffers: RoundBuffers, vocabulary: int) -> None:
        lanes = self._lanes = buffers.lanes
        self._masks = LaneMasks(lanes, vocabulary)
        self._held: Passed | None = None
        self.chosen = torch.zeros_like(lanes.tokens)
        self._tokens, self._parents, self._choices = map(on_host, (lanes.tokens, lanes.parents, self.chosen))
        self._drafted = torch.cuda.Event() if lanes.tokens.is_cuda else None

    # -- the device's part --------------------------------------------------------------------------------------------

    def keep(self, passed: Passed) -> None:
        """Copy the results of the pass to tensors with fixed addresses."""
        if self._held is None:
            taps = {layer: hidden.clone() for layer, hidden in passed.taps.items()}
            self._held = Passed(passed.logits.clone(), passed.positions.clone(), passed.depths.clone(), taps)
            return
        pairs = [*zip(self._held[:3], passed[:3], strict=True)]
        pairs += [(self._held.taps[layer], hidden) for layer, hidden in passed.taps.items()]
        for kept, fresh in pairs:
            kept.copy_(fresh)

    @property
    def passed(self) -> Passed:
        """The logits, positions and taps of the last pass."""
        assert self._held is not None
        return self._held

    # -- between host and device --------------------------------------------------------------------------------------

    def send_trees(self) -> None:
        """Queue the copy of the drafted trees to the host, before the pass."""
        if self._drafted is not None:
            self._tokens.copy_(self._lanes.tokens, non_blocking=True)
            self._parents.copy_(self._lanes.parents, non_blocking=True)
            self._drafted.record()

    def begin(self) -> None:
        """Wait for the trees, not for the pass."""
        if self._drafted is not None:
            self._drafted.synchronize()
        self._masks.clear()

    def sent_masks(self) -> LaneMasks | None:
        """The masks of this round, on their way to the device; None: there are none yet."""
        if not self._masks:
            return None
        self._masks.send()
        return self._masks

    def read_choices(self) -> None:
        """Wait for the choices."""
        if self.chosen.is_cuda:
            self._choices.copy_(self.chosen)

    # -- the host's part ----------------------------------------------------------------------------------------------

    def mask_nodes(self, lane: int, sequence: Sequence) -> bool:
        """Set the masks of all nodes inside the grammar, if masks must be applied before the choice; returns False."""
        assert sequence.constraint is not None
        if sequence.params.cuts:
            tokens, parents = self._tokens[lane].tolist(), self._parents[lane].tolist()
            paths: list[list[int] | None] = [[]]
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if node:
                    above = paths[parent]
                    paths.append(None if above is None else [*above, token])
                if (path := paths[node]) is None:
                    continue
                forbidden = sequence.constraint.forbidden(path)
                if forbidden is None:
                    paths[node] = None
                else:
                    self._masks.set(lane * len(tokens) + node, forbidden)
        return False

    def refused(self, lane: int, sequence: Sequence) -> bool:
        """Whether the grammar refuses a choice on the accepted path; that node has a mask from now on."""
        assert sequence.constraint is not None
        tokens, parents, choices = (part[lane].tolist() for part in (self._tokens, self._parents, self._choices))
        path: list[int] = []
        node: int | None = 0
        while node is not None and sequence.end_ids.isdisjoint(path):
            row, token = lane * len(tokens) + node, choices[node]
            if not sequence.constraint.allows(path, token):
                forbidden = sequence.constraint.forbidden(path)
                if forbidden is None or row in self._masks:
                    raise OptionError("structured_outputs: no token is allowed")
                self._masks.set(row, forbidden)
                return True
            path.append(token)
            children = range(node + 1, len(tokens))
            node = next((child for child in children if parents[child] == node and tokens[child] == token), None)
        return False
