"""`suffix`: what followed the longest suffix of the text that occurred before, as a tree weighted by frequency.

A suffix automaton over the prompt and the answer so far (and, if `shared`, over earlier answers of this process) gives
every continuation that was seen, with its count. The tree grows best-first by estimated probability, so that a
certain continuation becomes a long chain and an uncertain one a bush, and stops where the estimate falls under
`min_confidence`. A `corpus` on disk grows another one in the same way, which is merged with it: retrieval as in REST.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slipstream.drafters.automaton import ROOT, SuffixAutomaton
from slipstream.drafters.base import Drafter, DraftOptions, Wish
from slipstream.drafters.chain_loop import ChainDraft
from slipstream.drafters.corpus import Corpus, Header
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.matches import Following, Match, grow
from slipstream.folders import expanded
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class SuffixOptions(DraftOptions):
    """`min_match`: shortest repeated suffix to draft from. `shared`: also learn from earlier answers of this process
    (at most `shared_tokens` of them). It is off unless asked for: response times would tell one user what others got.
    `corpus`: also draft from the texts in this directory, which `slipstream corpus build` makes; empty for none.
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
            Header.read(expanded(self.corpus))  # what is wrong with it is told before a model is loaded


@dataclass
class _Own:
    """The automaton of one sequence, and where its text stands in the shared ones."""

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
        self._shared: dict[int, SuffixAutomaton] = {}  # by generation: the younger one and the one before it
        self._generation = 0
        self._young_tokens = 0
        self._corpus = Corpus.open(options.corpus) if options.corpus else None
        if self._corpus is not None:
            self._corpus.require_fits(target.tokenizer, target.config.vocab_size)

    @property
    def remembers_others(self) -> bool:
        """Whether it drafts from more than a sequence's own text."""
        return self.options.shared or self._corpus is not None

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        length = min(self.plan.depth, self.plan.nodes)
        return None if self.remembers_others or not self.plan.drafts else ChainDraft(self, length, lanes)

    def matched(self, sequence: Sequence) -> int:
        """How many tokens the longest suffix of a sequence has that occurred before."""
        return self._match(sequence).length

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        return [self._one(wish.sequence, wish.plan) for wish in wishes]

    def _one(self, sequence: Sequence, plan: Plan) -> TokenTree:
        tree = TokenTree(sequence.tokens[-1])
        match = self._match(sequence)
        if match.length >= self.options.min_match:
            grow(tree, match, plan, self.name)
        if self._corpus is not None:
            retrieved = self._corpus.match(sequence.tokens, plan.depth, self.options.min_match)
            if retrieved is not None:
                other = TokenTree(sequence.tokens[-1])
                grow(other, retrieved, plan, self.name)
                tree.merge(other)
        return tree.pruned(plan.nodes)

    def _match(self, sequence: Sequence) -> Match:
        """The longest match in the sequence's own text and in earlier answers; of equal ones that in its own."""
        tokens, settled = sequence.tokens, sequence.settled
        own: _Own = sequence.drafting.setdefault(self.key, _Own())
        self._catch_up(own, tokens, settled)
        automaton = own.automaton
        # The settled text ends in `last`; its link is the longest suffix that also ended somewhere before.
        state = automaton.link[automaton.last] if automaton.last != ROOT else ROOT
        best = _followed(automaton, state, automaton.length[state], tokens[settled:])
        for generation, other in self._shared.items():
            found = _followed(other, *own.elsewhere[generation], tokens[settled:])
            best = found if found.length > best.length else best
        return best

    def _catch_up(self, own: _Own, tokens: list[int], settled: int) -> None:
        """Learn what is final; what may yet be taken back is only followed, never learnt."""
        for token in tokens[own.seen : settled]:
            own.automaton.extend(token)
        for generation, automaton in self._shared.items():
            # A generation that is new to this sequence is entered by its last tokens, not by all of them.
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
        """Keep an answer. A generation holds half the budget; when it is full the one before it is forgotten."""
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
    """Where a text stands in an automaton, once the guesses behind its settled part are followed too."""
    for token in guesses:
        state, matched = automaton.advance(state, matched, token)
    return Match(matched, state, partial(_following, automaton))


def _following(automaton: SuffixAutomaton, state: int) -> Following:
    return [(token, automaton.count[behind], behind) for token, behind in automaton.next[state].items()]
