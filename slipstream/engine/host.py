"""The host runner: dynamic trees of any drafter, one pass at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from slipstream.attention import Segment, tree_segment
from slipstream.cache import PAGE_SIZE
from slipstream.drafters import DraftRequest, Outcome
from slipstream.engine.state import EngineState
from slipstream.gpu.device_sampling import choose_trees
from slipstream.models.model import PassOutput
from slipstream.policy import Policy, Progress, Report, Round, Tally
from slipstream.sampling import TreeDistributions, logprobs
from slipstream.sequence import TARGET, Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class _Launched:
    """A pass that is running: what `collect` needs to finish it."""

    work: list[Work]
    trees: dict[Sequence, TokenTree]
    output: PassOutput
    rows: int
    prompt_rows: int
    draft_ms: float
    other_ms: float
    began: float


@dataclass(frozen=True)
class _SequenceRows:
    """One sequence's rows of a pass."""

    work: Work
    tree: TokenTree | None  # None: a chunk of a prompt
    logits: torch.Tensor  # [rows with logits, vocab]
    taps: dict[int, torch.Tensor]  # layer -> [rows, width]


class HostRunner:
    """Drafts trees, runs one ragged pass over all of them, and verifies."""

    def __init__(self, state: EngineState, policy: Policy) -> None:
        self._state = state
        self._policy = policy
        self._launched: _Launched | None = None

    def launch(self, part: list[Work], plans: dict[Sequence, Plan]) -> None:
        """Draft, and run the pass. If the cache is full, the youngest sequences are preempted."""
        state, began = self._state, time.perf_counter()
        plans = {item.sequence: self._affordable(item, plans[item.sequence]) for item in part}
        rows = {item.sequence: self._rows(item, plans[item.sequence]) for item in part}
        work = state.scheduler.reserve(part, rows)
        if not work:
            return
        draft_start = time.perf_counter()
        requests = [DraftRequest(item.sequence, plans[item.sequence]) for item in work if item.decodes]
        trees = self._drafted(requests, draft_start)
        drafted = time.perf_counter()
        segments = [_segment(item, trees.get(item.sequence)) for item in work]
        taps = state.drafters.taps(item.sequence for item in work)
        output = state.model.forward(state.cache, TARGET, segments, taps=taps)
        count = sum(segment.rows for segment in segments)
        prompt_rows = count - sum(len(tree) for tree in trees.values())
        draft_ms, other_ms = 1000 * (drafted - draft_start), 1000 * (draft_start - began)
        self._launched = _Launched(work, trees, output, count, prompt_rows, draft_ms, other_ms, drafted)
        if self._overlaps:
            self._foresee(trees)

    def _drafted(self, requests: list[DraftRequest], began: float) -> dict[Sequence, TokenTree]:
        """The tree that is verified for each request: what the policy selects of the draft, or a bare root."""
        offered = self._state.drafters.propose(requests)
        plain = (r.sequence for r in requests if r.sequence not in offered)
        trees = offered | {sequence: TokenTree(sequence.tokens[-1]) for sequence in plain}
        if offered:
            plans = {request.sequence: request.plan for request in requests}
            self._policy.drafted(1000 * (time.perf_counter() - began))
            trees.update(self._selected(trees, plans))
        return trees

    def _selected(self, trees: dict[Sequence, TokenTree], plans: dict[Sequence, Plan]) -> Mapping[Sequence, TokenTree]:
        try:
            return self._policy.select(trees, plans)
        except Exception as error:
            if len(trees) > 1:  # find the draft on which the selection fails
                return {s: self._selected({s: tree}, plans)[s] for s, tree in trees.items()}
            (sequence,) = trees
            self._state.drafters.drop(sequence, error)
            return {sequence: TokenTree(sequence.tokens[-1])}

    def _affordable(self, item: Work, plan: Plan) -> Plan:
        """The plan, or none if the whole cache could not hold the rows of its draft."""
        return plan if self._rows(item, plan) <= self._state.cache.capacity * PAGE_SIZE else Plan()

    def _rows(self, item: Work, plan: Plan) -> int:
        """Slots that this sequence may write in this step, in any store."""
        below_root = self._state.drafters.scratch_rows(item.sequence, plan) if plan.drafts else 0
        return item.sequence.cached + len(item.pending) + below_root

    def collect(self) -> Iterator[Report]:
        """Verify and commit the pass, if there is one.

        Yields one report. The caller emits its tokens and resumes the generator, which then updates drafters, prefix
        index and page tables.
        """
        launched, self._launched = self._launched, None
        if launched is None:
            return
        state, tally = self._state, Tally()
        progress: list[Progress] = []
        outcomes: list[Outcome] = []
        chosen = self._target_choices(launched)
        for rows in _split_rows(launched):
            if rows.work.sequence.error is not None:  # its grammar failed while the pass ran
                continue
            try:
                outcome, given = self._verified(rows, chosen.get(rows.work.sequence), tally)
            except Exception as error:  # it ends this sequence only
                state.fail(rows.work.sequence, error)
                continue
            outcomes.append(outcome)
            if given is not None:
                trees = [outcome.tree] if outcome.sequence.request.trace and outcome.tree is not None else []
                assert outcome.tree is not None
                progress.append(Progress(outcome.sequence, [given], trees=trees, verified=(outcome.tree, given.nodes)))
        verified = time.perf_counter()
        report = Report(
            progress,
            rows=launched.rows,
            prompt_rows=launched.prompt_rows,
            draft_ms=launched.draft_ms,
            verify_ms=1000 * (verified - launched.began),
            tally=tally,
            calls=state.drafters.take_calls(),
        )
        if not report.prompt_rows:
            state.drafters.passed(report.verify_ms)
        yield report
        outcomes = [outcome for outcome in outcomes if outcome.sequence.error is None]
        state.drafters.observe(outcomes)
        for outcome in outcomes:
            state.publish(outcome.sequence)
            if outcome.tokens:
                state.finish(outcome.sequence)
        report.charge(len(launched.work), launched.other_ms + 1000 * (time.perf_counter() - verified))

    def _verified(self, rows: _SequenceRows, chosen: list[int] | None, tally: Tally) -> tuple[Outcome, Round | None]:
        """Verify and commit one sequence's rows; a chunk of a prompt gives no round."""
        sequence, tree = rows.work.sequence, rows.tree
        _score_prompt(rows.work, rows.logits)
        if tree is None:
            return Outcome(sequence, [], self._commit(rows, [])), None
        target = TreeDistributions(sequence.sampler, tree, rows.logits[-len(tree) :], chosen)
        verdict = self._state.verifier(tree, target)
        scouted = {node: target.choose(node) for node in tree.last_scouts()}
        taps = self._commit(rows, verdict.nodes)
        tally.add_tree(tree, verdict.nodes)
        sequence.stats.lossy = self._state.verifier.lossy
        origins = [tree.origins[node] for node in verdict.nodes]
        deepest = max(d for d, scout in zip(tree.depths, tree.scouts, strict=True) if not scout)
        offered = [origin for origin, scout in zip(tree.origins[1:], tree.scouts[1:], strict=True) if not scout]
        given = Round(verdict.tokens, origins, tree.drafted, deepest, 1, verdict.nodes, target, offered)
        return Outcome(sequence, verdict.tokens, taps, tree, scouted), given

    @property
    def _overlaps(self) -> bool:
        """Whether a pass can still run after its launch. On a CPU it cannot: there choices are computed lazily."""
        return self._state.model.device != "cpu"

    def _running(self) -> Callable[[], bool]:
        """Whether the pass that was just launched is still running."""
        if not torch.cuda.is_available():
            return lambda: True
        over = torch.cuda.Event()
        over.record()
        return lambda: not over.query()

    def _foresee(self, trees: dict[Sequence, TokenTree]) -> None:
        """While the pass runs: compute the masks of the nodes of sequences whose mask comes before the choice."""
        running = self._running()
        for sequence, tree in trees.items():
            if sequence.constraint is not None and (sequence.params.cuts or self._state.verifier.uses_draws):
                try:
                    sequence.constraint.foresee(tree, running)
                except Exception as error:  # it ends this sequence only
                    self._state.fail(sequence, error)

    def _target_choices(self, launched: _Launched) -> dict[Sequence, list[int] | None]:
        """The target's choices at all nodes, fetched from a GPU in one copy; elsewhere they are made lazily."""
        state = self._state
        if not self._overlaps or state.verifier.uses_draws or any(map(_scores_prompt, launched.work)):
            return {}
        trees = [(w.sequence, launched.trees[w.sequence]) for w in launched.work if w.sequence in launched.trees]
        chosen = choose_trees([s.sampler for s, _ in trees], [tree for _, tree in trees], launched.output.logits)
        return {sequence: choices for (sequence, _), choices in zip(trees, chosen, strict=True)}

    def _commit(self, rows: _SequenceRows, nodes: list[int]) -> dict[int, torch.Tensor]:
        """Commit the pending rows and the accepted path; returns the hidden states of those rows for the drafter."""
        state, sequence = self._state, rows.work.sequence
        start, lead = sequence.cached, len(rows.work.pending)
        slots = [*range(start, start + lead), *(start + lead - 1 + node for node in nodes)]
        state.cache.commit(sequence.table, TARGET, start, slots)
        taps = state.drafters.taps([sequence])
        if not taps:
            return {}
        if state.model.device == "cpu" and slots[-1] - start == len(slots) - 1:  # the first rows of the pass
            return {layer: rows.taps[layer][: len(slots)] for layer in taps}
        kept = torch.tensor([slot - start for slot in slots], device=state.model.device)
        return {layer: rows.taps[layer].index_select(0, kept) for layer in taps}


def _split_rows(launched: _Launched) -> Iterator[_SequenceRows]:
    """Each sequence's rows of the pass."""
    row = logits_row = 0
    for work in launched.work:
        tree = launched.trees.get(work.sequence)
        rows = len(work.pending) + (0 if tree is None else len(tree) - 1)
        wanted = _wanted_rows(work, tree)
        logits = launched.output.logits[logits_row : logits_row + wanted]
        taps = {layer: hidden[row : row + rows] for layer, hidden in launched.output.taps.items()}
        yield _SequenceRows(work, tree, logits, taps)
        row, logits_row = row + rows, logits_row + wanted


def _scores_prompt(item: Work) -> bool:
    """Whether this work feeds tokens of a prompt whose log-probabilities were requested."""
    sequence = item.sequence
    asked = sequence.params.prompt_logprobs is not None and sequence.choice == 0
    return asked and sequence.cached < len(sequence.request.prompt_ids)


def _wanted_rows(item: Work, tree: TokenTree | None) -> int:
    """Rows of the pass whose logits are read: the tree's, and those of a prompt that is scored."""
    before = len(item.pending) - (tree is not None) if _scores_prompt(item) else 0
    return before + (0 if tree is None else len(tree))


def _score_prompt(item: Work, logits: torch.Tensor) -> None:
    """Keep the log-probabilities of the prompt tokens that follow those just fed."""
    sequence = item.sequence
    top, prompt = sequence.params.prompt_logprobs, sequence.request.prompt_ids
    if top is not None and _scores_prompt(item):
        known = sequence.prompt_logprobs or [None]  # the first token has no predecessor
        tokens = prompt[len(known) : sequence.cached + len(item.pending) + 1]
        rows = logits[len(known) - 1 - sequence.cached :]
        sequence.prompt_logprobs = known + [
            logprobs(row, token, top, sequence.spell) for row, token in zip(rows, tokens, strict=False)
        ]


def _segment(item: Work, tree: TokenTree | None) -> Segment:
    segment = tree_segment(item.sequence.table, item.sequence.cached, item.pending, tree)
    if _scores_prompt(item):
        return replace(segment, logits_from=0)
    # Tensors that drafting prepared for a tree only fit if all rows are the tree's own.
    if tree is None or tree.prepared is None or len(item.pending) > 1:
        return segment
    prepared, tree.prepared = tree.prepared, None
    return replace(segment, prepared=prepared)
