"""The step: plan, propose, select, forward, verify, commit, observe, emit. No line here knows a drafting method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.choices import choose_trees
from slipstream.drafters import Outcome, Wish
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.burst import Burst, Launched, make_burst
from slipstream.engine.endings import emit
from slipstream.engine.scheduler import Scheduler, Work
from slipstream.models.model import Model, PassOutput
from slipstream.policy import FixedPolicy
from slipstream.sampling import TreeDistributions
from slipstream.sequence import TARGET, Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan
from slipstream.verify import Verifier

log = logging.getLogger("slipstream")
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What a step did for one sequence."""

    sequence: Sequence
    new_tokens: int
    root: int  # the last token before the step
    offered: TokenTree | None = None  # None: rounds on the device, whose trees nobody has

    @property
    def tree(self) -> TokenTree:
        """The tree of the step; of rounds a lone root."""
        return TokenTree(self.root) if self.offered is None else self.offered


@dataclass
class _Launched:
    """A step whose pass is under way: what `collect` needs to finish it."""

    work: list[Work]
    trees: dict[Sequence, TokenTree]
    output: PassOutput
    draft_ms: float
    other_ms: float
    began: float = field(default_factory=time.perf_counter)


class Engine:
    """Runs sequences until they end. `step` is the whole loop body."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        drafter: AnyDrafter,
        verifier: Verifier,
        policy: FixedPolicy,
        scheduler: Scheduler,
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafter = drafter
        self.verifier = verifier
        self.policy = policy
        self.scheduler = scheduler
        self.draft_faults = 0
        self.burst = make_burst(model, cache, drafter, verifier)

    def step(self) -> list[Progress]:
        """One pass over everything that is ready to run (plain decoding: maybe several); empty when all is idle."""
        with torch.inference_mode():
            began = time.perf_counter()
            work = self.scheduler.next()
            progress: list[Progress] = []
            if self.burst is not None:
                progress = self._run_burst(self.burst, work)
                taken = {item.sequence for item in progress}
                work = [w for w in work if w.sequence not in taken]
            launched = self.launch(work, began)
            return progress + (self.collect(launched) if launched else [])

    def _run_burst(self, burst: Burst, work: list[Work]) -> list[Progress]:
        """Several rounds at once for those that decode, if nothing stands against it."""
        began = time.perf_counter()
        ready = burst.ready(work)
        alone = len(work) == len(ready) and not self.scheduler.waiting
        try:
            launched = self._new_or_begun(burst, ready, alone)
        except Exception as error:
            if self.drafter.blind:
                raise
            # Nothing of it has been given out, and a draft may fail: single steps go on from here.
            log.warning("drafter %r failed on the device and goes on by the host: %s", self.drafter.name, error)
            self.burst = None
            self.draft_faults += 1
            return []
        if launched is None:
            return []
        sequences = [sequence for sequence in launched.sequences if not sequence.finished]  # the others were cancelled
        failed = False

        def go_ahead() -> None:
            nonlocal failed
            try:
                burst.go_ahead(launched)
            except Exception as error:  # this step has tokens to give out; the next one tries again, and may fail
                log.warning("a round ahead failed: %s", error)
                failed = True

        goes_on = alone and launched.sequences == ready
        try:
            counts, device_ms = burst.collect(launched, go_ahead if goes_on else lambda: None)
        except BaseException:
            burst.forget()  # what has begun builds on tokens that were not given out
            raise
        if burst.ahead is None:
            burst.settle(launched, self._guarded)
        if failed:
            burst.forget()
        given = dict(zip(launched.sequences, counts, strict=True))
        progress = [Progress(s, given[s], s.tokens[-1 - given[s]]) for s in sequences]
        for sequence in sequences:
            self.cache.share(sequence.table, TARGET, sequence.tokens)
            if burst.ahead is None:  # or its pages are being written
                self._finish(sequence)
        other_ms = 1000 * (time.perf_counter() - began) - device_ms
        for sequence in sequences:
            sequence.stats.verify_ms += device_ms / len(sequences)
            sequence.stats.other_ms += other_ms / len(sequences)
        return progress

    @staticmethod
    def _new_or_begun(burst: Burst, ready: list[Sequence], alone: bool) -> Launched | None:
        """Rounds for those that are ready; or for those of a burst that has begun: the rest of it if they are all there
        is and go on, and otherwise the one round.
        """
        ahead, burst.ahead = burst.ahead, None
        if ahead is not None:
            return burst.go_on(ahead, ahead.most if alone and ahead.sequences == ready else 1)
        rounds = burst.reserve(ready) if ready else 0
        return burst.launch(ready, rounds) if rounds else None

    def launch(self, work: list[Work], began: float) -> _Launched | None:
        """Plan, draft, and run the pass."""
        plans = {w.sequence: self._plan(w) for w in work}
        work = self.scheduler.reserve(work, {w.sequence: self._rows(w, plans[w.sequence]) for w in work})
        if not work:
            return None
        drafting = time.perf_counter()
        trees = self._propose([Wish(w.sequence, plans[w.sequence]) for w in work if w.decodes])
        drafted = time.perf_counter()
        segments = [self._segment(w, trees.get(w.sequence)) for w in work]
        output = self.model.forward(self.cache, TARGET, segments, taps=self.drafter.taps)
        return _Launched(work, trees, output, 1000 * (drafted - drafting), 1000 * (drafting - began), drafted)

    @staticmethod
    def _segment(work: Work, tree: TokenTree | None) -> Segment:
        segment = tree_segment(work.sequence.table, work.sequence.cached, work.pending, tree)
        # What drafting has prepared of a tree serves only where all rows are the tree's own.
        if tree is None or tree.prepared is None or len(work.pending) > 1:
            return segment
        prepared, tree.prepared = tree.prepared, None
        return replace(segment, prepared=prepared)

    def _plan(self, work: Work) -> Plan:
        """The policy's plan, or none where the whole cache could not hold the rows of such a draft."""
        plan = self.policy.plan(work.sequence) if work.decodes else Plan()
        return plan if self._rows(work, plan) <= self.cache.capacity * PAGE_SIZE else Plan()

    def _rows(self, work: Work, plan: Plan) -> int:
        """Slots that this sequence may write in this step, in any store."""
        below_root = max(plan.nodes, self.drafter.scratch_rows(plan)) if plan.drafts else 0
        return work.sequence.cached + len(work.pending) + below_root

    def collect(self, launched: _Launched) -> list[Progress]:
        """Verify, commit and emit what a pass gave."""
        progress, outcomes = [], []
        chosen = self._chosen(launched)
        row = logits_row = 0
        for work in launched.work:
            sequence, lead = work.sequence, len(work.pending)
            tree = launched.trees.get(sequence)
            below = 0 if tree is None else len(tree) - 1
            rows, row = slice(row, row + lead + below), row + lead + below
            if tree is None:
                outcomes.append(Outcome(sequence, [], self._commit(sequence, lead, [], launched, rows)))
                continue
            logits = launched.output.logits[logits_row : logits_row + len(tree)]
            logits_row += len(tree)
            target = TreeDistributions(sequence.sampler, tree, logits, chosen.get(sequence))
            verdict = self.verifier(tree, target)
            scouted = {node: target.choose(node) for node in tree.last_scouts()}
            taps = self._commit(sequence, lead, verdict.nodes, launched, rows)
            count = emit(sequence, tree, verdict, target)
            sequence.stats.lossy = self.verifier.lossy
            progress.append(Progress(sequence, count, tree.tokens[0], tree))
            outcomes.append(Outcome(sequence, verdict.tokens, taps, tree, scouted))
        verified = time.perf_counter()
        followed = [o for o in outcomes if not o.sequence.drafter_dropped]
        self._observe([o for o in followed if not o.sequence.finished])
        for outcome in followed:
            if outcome.sequence.finished:
                self._guarded(outcome.sequence, lambda o=outcome: self.drafter.depart(o))  # type: ignore[misc]
        for work in launched.work:
            self.cache.share(work.sequence.table, TARGET, work.sequence.tokens)
        for item in progress:
            self._finish(item.sequence)
        self._charge(launched, progress, verified)
        return progress

    def _chosen(self, launched: _Launched) -> dict[Sequence, list[int] | None]:
        """The target's choices at all nodes, made on a GPU and fetched in one go; made lazily everywhere else."""
        if self.model.device == "cpu" or self.verifier.uses_draws or not launched.trees:
            return {}
        trees = [(w.sequence, launched.trees[w.sequence]) for w in launched.work if w.sequence in launched.trees]
        chosen = choose_trees([s.sampler for s, _ in trees], [tree for _, tree in trees], launched.output.logits)
        return {sequence: choices for (sequence, _), choices in zip(trees, chosen, strict=True)}

    def _commit(
        self, sequence: Sequence, lead: int, nodes: list[int], launched: _Launched, rows: slice
    ) -> dict[int, torch.Tensor]:
        """Keep the pending rows and the accepted path; returns the tapped hidden states of those rows."""
        start = sequence.cached
        root = start + lead - 1
        slots = [*range(start, start + lead), *(root + node for node in nodes)]
        self.cache.commit(sequence.table, TARGET, start, slots)
        taps = launched.output.taps
        if not taps:
            return {}
        kept = torch.tensor([slot - start for slot in slots], device=self.model.device)
        return {layer: hidden[rows].index_select(0, kept) for layer, hidden in taps.items()}

    def _finish(self, sequence: Sequence) -> None:
        if sequence.finished:
            self._leave(sequence)
        else:
            self.cache.trim(sequence.table, len(sequence.tokens))

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence, if that has not been done; one that has just come to its end, too, if it is still here."""
        if not sequence.finished:
            sequence.finish_reason = "cancelled"
        if self.scheduler.holds(sequence):
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Let go of everything that was kept for it."""
        self._guarded(sequence, lambda: self.drafter.close(sequence))
        sequence.drafting.clear()
        self.scheduler.remove(sequence)

    # -- drafts may fail; requests may not ----------------------------------------------------------------------------

    def _propose(self, wishes: list[Wish]) -> dict[Sequence, TokenTree]:
        trees = {wish.sequence: TokenTree(wish.sequence.tokens[-1]) for wish in wishes}
        asking = [wish for wish in wishes if wish.plan.drafts]
        if not asking:
            return trees
        try:
            proposed = self.drafter.propose(asking)
            if len(proposed) != len(asking):
                raise ValueError(f"{len(proposed)} trees for {len(asking)} sequences")
        except Exception as error:
            if len(asking) == 1:
                self._drop(asking[0].sequence, error)
                return trees
            for wish in asking:  # one of them is to blame: ask for each alone
                trees.update(self._propose([wish]))
            return trees
        for wish, tree in zip(asking, proposed, strict=True):
            accepted = self._guarded(wish.sequence, lambda w=wish, t=tree: self._checked(w, t))  # type: ignore[misc]
            if accepted is not None:
                trees[wish.sequence] = accepted
        return trees

    def _checked(self, wish: Wish, tree: TokenTree) -> TokenTree:
        tree.check(wish.sequence.tokens[-1], self.model.config.vocab_size)
        return self.policy.select(tree, wish.plan)

    def _observe(self, outcomes: list[Outcome]) -> None:
        try:
            self.drafter.observe(outcomes)
        except Exception as error:
            if len(outcomes) == 1:
                self._drop(outcomes[0].sequence, error)
                return
            for outcome in outcomes:
                self._observe([outcome])

    def _guarded(self, sequence: Sequence, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:
            self._drop(sequence, error)
            return None

    def _drop(self, sequence: Sequence, error: Exception) -> None:
        """The drafter failed this request: go on without it."""
        sequence.drafter_dropped = True
        sequence.stats.draft_faults += 1
        self.draft_faults += 1
        log.warning(
            "drafter %r failed on request %s and is dropped for it: %s", self.drafter.name, sequence.request.id, error
        )

    def _charge(self, launched: _Launched, progress: list[Progress], verified: float) -> None:
        """Share the step's time out among the sequences that drafted, verified and emitted in it."""
        if not progress:
            return
        share = 1.0 / len(launched.work)
        tail = 1000 * (time.perf_counter() - verified)
        for item in progress:
            stats = item.sequence.stats
            stats.draft_ms += launched.draft_ms * share
            stats.verify_ms += 1000 * (verified - launched.began) * share
            stats.other_ms += (launched.other_ms + tail) * share
