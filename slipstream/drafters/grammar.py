"""`grammar`: drafts the text that a request's grammar forces, and every allowed token where only a few are.

Text that the grammar forces is certain: each token is the only one in the mask. Where the mask has a few tokens (true
or false, an enumeration, a comma or a bracket), each becomes a branch, with what is forced after it. Where the model is
free, the draft ends. A request without a grammar gets no draft.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.grammar import Constraint
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

_FEW = 64  # allowed tokens; with more of them the model is free


@dataclass(frozen=True)
class GrammarOptions(DraftOptions):
    """`branch`: how many answers to a choice are drafted at most; a choice of more of them ends the draft."""

    depth: int = 16
    nodes: int = 16
    branch: int = 4


class GrammarDrafter(Drafter[GrammarOptions]):
    """Draft the text that the grammar forces."""

    name = "grammar"
    summary = "what a request's grammar forces, and all answers where it leaves few"
    helps = "JSON by a schema: names, punctuation, enumerations; without structured_outputs it drafts nothing"
    cost = "a few microseconds per node"
    needs = "requests with structured_outputs"
    options_type = GrammarOptions
    by_request = True

    def host_only(self, sequence: Sequence) -> bool:
        return sequence.constraint is not None

    def signal(self, sequence: Sequence) -> Signal:
        """Certain tokens; 1 if there are a few answers to choose from."""
        constraint = sequence.constraint
        if constraint is None:
            return Signal(matched=0, least=1)
        if forced := len(constraint.forced([])):
            return Signal(forced, least=1, certain=forced)
        return Signal(int(0 < len(self._answers(constraint, [])) <= self.options.branch), least=1)

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._one(request) for request in requests]

    def extend(self, request: DraftRequest, tree: TokenTree) -> None:
        """Add what is forced after the nodes of others: it is as likely as they are."""
        constraint, plan = request.sequence.constraint, request.plan
        if constraint is None:
            return
        for node in range(1, len(tree)):
            if tree.origins[node] == self.name or tree.scouts[node]:
                continue
            path, confidence = tree.path_tokens(node), tree.confidence[node]
            for token in constraint.forced(path)[: max(0, plan.depth - len(path))]:
                if len(tree) > plan.nodes and tree.child(node, token) is None:
                    return
                node = tree.add(node, token, origin=self.name, confidence=confidence)

    def _one(self, request: DraftRequest) -> TokenTree:
        sequence, plan = request.sequence, request.plan
        tree = TokenTree(sequence.tokens[-1])
        if sequence.constraint is not None:
            self._grow(tree, sequence.constraint, plan)
        return tree

    def _grow(self, tree: TokenTree, constraint: Constraint, plan: Plan) -> None:
        """Extend the likeliest node first, as long as there is room."""
        open_nodes = [(-1.0, 0)]  # (negative joint confidence, node)
        while open_nodes and len(tree) - 1 < plan.nodes:
            joint, node = heapq.heappop(open_nodes)
            path = tree.path_tokens(node)
            forced = constraint.forced(path)[: plan.depth - len(path)]
            for token in forced[: plan.nodes - (len(tree) - 1)]:
                node = tree.add(node, token, origin=self.name, confidence=-joint)
            if forced:
                heapq.heappush(open_nodes, (joint, node))
                continue
            answers = self._answers(constraint, path) if len(path) < plan.depth else []
            share = joint / len(answers) if answers else 0.0
            if len(answers) > plan.branch or -share < plan.min_confidence:
                continue
            for token in answers[: plan.nodes - (len(tree) - 1)]:
                child = tree.add(node, token, origin=self.name, confidence=-share)
                heapq.heappush(open_nodes, (share, child))

    def _answers(self, constraint: Constraint, path: Seq[int]) -> list[int]:
        """The allowed tokens after `path` if they are few: of several with a common prefix, the longest."""
        allowed, tokenizer = constraint.few(path, _FEW), self.target.tokenizer
        assert tokenizer is not None, "a grammar has one"
        if len(allowed) == 1:
            return allowed
        pieces = {token: tokenizer.piece(token) for token in allowed}
        return [t for t, piece in pieces.items() if not any(_longer(other, piece) for other in pieces.values())]


def _longer(other: bytes, piece: bytes) -> bool:
    return len(other) > len(piece) and other.startswith(piece)
