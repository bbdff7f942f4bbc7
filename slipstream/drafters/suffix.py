"""`suffix`: a frequency-weighted tree of what followed the longest suffix of the text that occurred before.

A suffix automaton over the prompt and the answer so far (and, if `shared`, over earlier answers of this process) gives
every continuation seen, with its count. The tree grows best-first by estimated probability: a certain continuation
becomes a long chain, an uncertain one a wide tree. It stops where the estimate falls below `min_confidence`. Matches
in a `corpus` on disk grow into the same tree: retrieval as in REST.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.drafters.device.chain_loop import ChainDraft
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.retrieval.automaton import ROOT, SuffixAutomaton
from slipstream.drafters.retrieval.corpus import Corpus, Header
from slipstream.drafters.retrieval.matches import Following, Match, grow
from slipstream.folders import expanded
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class SuffixOptions(DraftOptions):
    """`min_match`: shortest repeated suffix to draft from. `shared`: also learn from earlier answers of this process
    (at most `shared_tokens` tokens). Off by default: response times would reveal to one user what others got. `corpus`:
    also draft from the texts in this directory, made by `slipstream corpus build`; empty for none.
    """

    depth: int = 16
    nodes: int = 16
    branch: int = 3
    min_confidence: float = 0.2
    min_match: int = 1
    shared: bool = False
    shared_tokens: int = 200_000
    corpus: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.min_match >= 1, "min_match", "1 or more")
        self.require(self.shared_tokens >= 1, "shared_tokens", "1 or more")
        if self.corpus:
            Header.read(expanded(self.corpus))  # errors are raised before a model is loaded


@dataclass
class _Own:
    """The automaton of one sequence, and its states in the shared ones."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    seen: int = 0
    elsewhere: dict[int, tuple[int, int]] = field(default_factory=dict)  # generation -> state, matched


class SuffixDrafter(Drafter[SuffixOptions]):
    """Draft from repetition."""

    name = "suffix"
    summary = "a frequency-weighted tree of what followed the longest repeated suffix"
    helps = "copying, editing, summaries, code, JSON, agents; on text that never repeats it drafts nothing"
    cost = "a few dictionary look-ups per node; with a corpus, a search of it on disk"
    options_type = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self._shared: dict[int, SuffixAutomaton] = {}  # by generation: the current one and the one before
        self._generation = 0
        self._young_tokens = 0
        self._corpus = Corpus.open(options.corpus) if options.corpus else None
        if self._corpus is not None:
            self._corpus.require_fits(target.tokenizer, target.config.vocab_size)

    @classmethod
    def usual(cls, options: SuffixOptions, *, on_cpu: bool) -> Plan:
        plan = options.plan
        return plan if on_cpu else Plan(plan.depth, plan.nodes)  # device rounds have one chain, whatever its confidence

    @property
    def remembers_others(self) -> bool:
        """Whether it drafts from more than a sequence's own text."""
        return self.options.shared or self._corpus is not None

    @property
    def fits_a_device(self) -> bool:
        """Whether the options allow one chain from the sequence's own text alone."""
        return self.plan.drafts and not self.remembers_others and not self.given & {"branch", "min_confidence"}

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan = self.plan
        return ChainDraft(self, min(plan.depth, plan.nodes)) if self.fits_a_device else None

    def signal(self, sequence: Sequence) -> Signal:
        return Signal(self.matched(sequence), self.options.min_match)

    def matched(self, sequence: Sequence) -> int:
        """Length of the longest suffix of a sequence that occurred before."""
        return self._match(sequence).length

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request.sequence, request.plan) for request in requests]

    def _one(self, sequence: Sequence, plan: Plan) -> TokenTree:
        tree = TokenTree(sequence.tokens[-1])
        match = self._match(sequence)
        if match.length >= self.options.min_match:
            grow(tree, match, plan, self.name)
        if self._corpus is not None:
            retrieved = self._corpus.match(sequence.tokens, plan.depth, self.options.min_match)
            if retrieved is not None:
                grow(tree, retrieved, plan, self.name)
        return tree.pruned(plan.nodes)

    def _match(self, sequence: Sequence) -> Match:
        """The longest match in the sequence's own text and in earlier answers; its own text wins ties."""
        tokens, settled = sequence.tokens, sequence.settled
        own: _Own = sequence.drafting.setdefault(self.key, _Own())
        self._catch_up(own, tokens, settled)
        automaton = own.automaton
        # The settled text ends in state `last`; its link is the longest suffix that also ended earlier.
        state = automaton.link[automaton.last] if automaton.last != ROOT else ROOT
        best = _followed(automaton, state, automaton.length[state], tokens[settled:])
        for generation, other in self._shared.items():
            found = _followed(other, *own.elsewhere[generation], tokens[settled:])
            best = found if found.length > best.length else best
        return best

    def _catch_up(self, own: _Own, tokens: list[int], settled: int) -> None:
        """Add settled tokens to the automaton. Tokens that may be taken back are only followed."""
        for token in tokens[own.seen : settled]:
            own.automaton.extend(token)
        for generation, automaton in self._shared.items():
            # For a generation that is new to this sequence only the last tokens are followed.
            start = own.seen if generation in own.elsewhere else max(0, settled - 64)
            state, matched = own.elsewhere.get(generation, (ROOT, 0))
            for token in tokens[start:settled]:
                state, matched = automaton.advance(state, matched, token)
            own.elsewhere[generation] = (state, matched)
        own.seen = settled

    def close(self, sequence: Sequence) -> None:
        if self.options.shared and sequence.output_ids:
            self._learn(sequence.output_ids)

    def _learn(self, tokens: list[int]) -> None:
        """Keep an answer. A generation holds half the budget; when it is full the one before it is dropped."""
        if not self._shared or self._young_tokens >= self.options.shared_tokens // 2:
            self._generation += 1
            self._shared[self._generation] = SuffixAutomaton()
            self._shared.pop(self._generation - 2, None)
            self._young_tokens = 0
        young = self._shared[self._generation]
        young.start()
        for token in tokens:
            young.extend(token)
        self._young_tokens += len(tokens)


def _followed(automaton: SuffixAutomaton, state: int, matched: int, guesses: list[int]) -> Match:
    """The match of a text in an automaton, after following the guesses after its settled part too."""
    for token in guesses:
        state, matched = automaton.advance(state, matched, token)
    return Match(matched, state, partial(_following, automaton))


def _following(automaton: SuffixAutomaton, state: int) -> Following:
    return [(token, automaton.count[target], target) for token, target in automaton.next[state].items()]
