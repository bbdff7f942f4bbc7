"""`suffix`: what followed the longest suffix of the text that occurred before, as a tree weighted by frequency.

A suffix automaton over the prompt and the answer so far (and, if `shared`, over earlier answers of this process) gives
every continuation that was seen, with its count. The tree grows best-first by estimated probability, so that a
certain continuation becomes a long chain and an uncertain one a bush, and stops where the estimate falls under
`min_confidence`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.drafters.automaton import ROOT, SuffixAutomaton
from slipstream.drafters.base import Drafter, DraftOptions, Wish
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class SuffixOptions(DraftOptions):
    """`min_match`: shortest repeated suffix to draft from. `shared`: also learn from earlier answers of this process
    (at most `shared_tokens` of them). It is off unless asked for: response times would tell one user what others got.
    """

    depth: int = 16
    nodes: int = 16
    branch: int = 3
    min_confidence: float = 0.2
    min_match: int = 1
    shared: bool = False
    shared_tokens: int = 200_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.min_match >= 1, "min_match", "1 or more")
        self.require(self.shared_tokens >= 1, "shared_tokens", "1 or more")


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
    options_type = SuffixOptions

    def __init__(self, options: SuffixOptions, target: TargetView) -> None:
        super().__init__(options, target)
        self._shared: dict[int, SuffixAutomaton] = {}  # by generation: the younger one and the one before it
        self._generation = 0
        self._young_tokens = 0

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        return [self._one(wish.sequence, wish.plan) for wish in wishes]

    def _one(self, sequence: Sequence, plan: Plan) -> TokenTree:
        own: _Own = sequence.drafting.setdefault(self.name, _Own())
        self._catch_up(own, sequence.tokens)
        automaton = own.automaton
        # The whole text ends in `last`; its link is the longest suffix that also ended somewhere before.
        state = automaton.link[automaton.last] if automaton.last != ROOT else ROOT
        best = (automaton, state, automaton.length[state])
        for generation, other in self._shared.items():
            found, matched = own.elsewhere[generation]
            if matched > best[2]:
                best = (other, found, matched)
        tree = TokenTree(sequence.tokens[-1])
        if best[2] >= self.options.min_match:
            self._grow(tree, *best, plan)
        return tree

    def _catch_up(self, own: _Own, tokens: list[int]) -> None:
        for token in tokens[own.seen :]:
            own.automaton.extend(token)
        for generation, automaton in self._shared.items():
            # A generation that is new to this sequence is entered by its last tokens, not by all of them.
            start = own.seen if generation in own.elsewhere else max(0, len(tokens) - 64)
            state, matched = own.elsewhere.get(generation, (ROOT, 0))
            for token in tokens[start:]:
                state, matched = automaton.advance(state, matched, token)
            own.elsewhere[generation] = (state, matched)
        own.seen = len(tokens)

    def _grow(self, tree: TokenTree, automaton: SuffixAutomaton, state: int, matched: int, plan: Plan) -> None:
        """Best-first: always the open node of highest estimated joint probability."""
        open_nodes = [(-1.0, 0, state, matched)]
        while open_nodes and len(tree) <= plan.nodes:
            joint, node, state, matched = heapq.heappop(open_nodes)
            if node and tree.depths[node] >= plan.depth:
                continue
            for token, probability, following in self._continuations(automaton, state, matched)[: plan.branch]:
                confidence = -joint * probability
                if confidence < plan.min_confidence or len(tree) > plan.nodes:
                    break
                child = tree.add(node, token, origin=self.name, confidence=confidence)
                heapq.heappush(open_nodes, (-confidence, child, following, matched + 1))

    @staticmethod
    def _continuations(automaton: SuffixAutomaton, state: int, matched: int) -> list[tuple[int, float, int]]:
        """(token, estimated probability, state) of what was seen to follow, most frequent first.

        Short matches are often chance, so each estimate gives a share to 'something new', which shrinks with the
        length of the match and with the evidence.
        """
        following = automaton.next[state]
        total = sum(automaton.count[s] for s in following.values())
        unseen = 2.0 / matched
        ranked = sorted(following.items(), key=lambda item: (-automaton.count[item[1]], item[0]))
        return [(token, automaton.count[s] / (total + unseen), s) for token, s in ranked]

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
