"""Trees that grow level by level from the logits of a model, whichever model that is.

A drafter of this kind says how the tokens before the tree reach its model (`_catch_up`) and how a pass is run
(`_run`). The rest is here: which nodes a level adds, which of them are fed for the next level, what is offered.

Nodes are *chosen* by joint probability (when sampling: by log q plus the noise that the target will read, so that
draft and target coincide as often as possible), or *sampled* from q without replacement for verifiers that read q.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from slipstream import noise
from slipstream.attention import Segment, tree_segment
from slipstream.drafters.base import Drafter, DraftOptions, Wish
from slipstream.errors import DraftFault
from slipstream.sampling import Sampler
from slipstream.sequence import Sequence
from slipstream.tree import Draw, TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class GrowthOptions(DraftOptions):
    """`nodes`: 0 for as many as a chain has levels, or four per level of a tree. `draw`: `top` (chosen nodes) or
    `sample` (sampled ones, for verifiers that read q); `auto` samples where the verifier reads q and the request does.
    """

    depth: int = 4
    nodes: int = 0
    branch: int = 1
    draw: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.draw in ("auto", "top", "sample"), "draw", "auto, top, sample")

    @property
    def plan(self) -> Plan:
        """The plan, with the number of nodes that suits the shape where none is given."""
        nodes = self.nodes or (self.depth if self.branch == 1 else min(192, 4 * self.depth))
        return Plan(self.depth, nodes, self.branch, self.min_confidence)


CHUNK = 512  # tokens of a prompt fed per pass when a model of a drafter's own catches up


@dataclass
class Growth:
    """A tree while it grows. `tree` holds the nodes that were (or will be) fed to the model, in slot order."""

    sequence: Sequence
    plan: Plan
    tree: TokenTree
    root_slot: int
    sampled: bool
    fed: int = 0  # nodes whose K/V are in the store
    leaves: list[tuple[float, int, int]] = field(default_factory=list)  # (joint, parent, token): offered, never fed
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the nodes fed, if the drafter keeps them
    logits: torch.Tensor | None = None  # [levels, vocab], if the drafter knows those of all levels beforehand

    def extends_to(self, tree: TokenTree) -> bool:
        """Whether the nodes that were fed are the first nodes of `tree`, and so lie where its rows will."""
        fed = self.fed
        return fed > 0 and (tree.tokens[:fed], tree.parents[:fed]) == (self.tree.tokens[:fed], self.tree.parents[:fed])

    def unseen(self, seen: int) -> Segment:
        """The next tokens of the sequence that a model has not seen, `seen` of them being known to it.

        A piece of them at a time; the root is the last of all, and its logits are wanted.
        """
        # The root is fed again where a proposal is made anew, because the first one broke behind this point.
        seen = min(seen, self.root_slot)
        chunk = self.sequence.tokens[seen : seen + CHUNK]
        last = seen + len(chunk) == len(self.sequence.tokens)
        return tree_segment(self.sequence.table, seen, chunk, self.tree if last else None)

    def kept(self, tokens: Seq[int]) -> list[int]:
        """Of the nodes that were fed, those on the path of the accepted `tokens`.

        The last token is the next root and must be fed again for its logits, even if a node guessed it.
        """
        return [node for node in self.tree.walk(tokens[:-1]) if node < self.fed]

    def bar(self, candidates: Seq[tuple[float, int, int]]) -> float:
        """The joint probability of the last node that would be offered if these were all that is still to come."""
        joints = [*self.tree.confidence[1:], *(leaf[0] for leaf in self.leaves), *(new[0] for new in candidates)]
        if len(joints) < self.plan.nodes:
            return 0.0
        return heapq.nlargest(self.plan.nodes, joints)[-1]

    def segment(self) -> Segment:
        """The nodes that have not been fed yet."""
        return tree_segment(self.sequence.table, self.root_slot, [self.tree.tokens[0]], self.tree, first_node=self.fed)


Options = TypeVar("Options", bound=GrowthOptions)
Candidates = list[list[tuple[int, float]]]  # for each parent, tokens with the probability that the target takes them


class GrowingDrafter(Drafter[Options], Generic[Options]):
    """Draft by passes of a model."""

    # -- what a kind of model has to say ------------------------------------------------------------------------------

    @abstractmethod
    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        """Feed what the model has not seen, up to the roots; logits [1, vocab] after each root, None: draft nothing."""

    @abstractmethod
    def _run(self, growths: list[Growth]) -> torch.Tensor:
        """A pass over the nodes of each tree that have not been fed; their logits, tree after tree."""

    def room(self, sequence: Sequence) -> int:
        """Levels that the model's own context still has room for."""
        return self.target.longest - len(sequence.tokens)

    def follows(self, sequence: Sequence) -> bool:
        """Whether everything is there that a draft for this sequence has to read of the target."""
        return True

    # -- growing ------------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> bool:
        return self.options.draw == "sample" or (self.options.draw == "auto" and self.target.reads_draws)

    def scratch_rows(self, plan: Plan) -> int:
        return 1 + self.width(plan) * plan.depth if plan.drafts else 0

    @staticmethod
    def width(plan: Plan) -> int:
        """Nodes fed per level: one for a chain, enough for the node budget to reach the last level in a tree."""
        return 1 if plan.branch == 1 else max(plan.branch, plan.nodes // max(1, plan.depth))

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        return [self._offer(growth) for growth in self._grow(wishes)]

    def _grow(self, wishes: Seq[Wish]) -> list[Growth]:
        growths = [self._start(wish) for wish in wishes]
        rows = self._catch_up(growths)
        for level in range(1, max(growth.plan.depth for growth in growths) + 1):
            growing = [(g, r) for g, r in zip(growths, rows, strict=True) if r is not None]
            if not growing:
                break
            for growth, logits in growing:
                self._add_level(growth, logits, level)
            rows = self._feed(growths, level)
        return growths

    def _start(self, wish: Wish) -> Growth:
        sequence = wish.sequence
        levels = min(wish.plan.depth, wish.plan.nodes, self.room(sequence))
        plan = replace(wish.plan, depth=max(0, levels))
        sampled = self.samples and not (self.options.draw == "auto" and sequence.params.greedy)
        growth = Growth(sequence, plan, TokenTree(sequence.tokens[-1]), len(sequence.tokens) - 1, sampled)
        sequence.drafting[self.key] = growth
        return growth

    def _add_level(self, growth: Growth, logits: torch.Tensor, level: int) -> None:
        """Children of the nodes that were fed last; `logits` are theirs, in order."""
        first = growth.fed - len(logits)
        parents = range(first, growth.fed)
        if growth.sampled:
            self._draw_level(growth, logits, parents)
        else:
            self._choose_level(growth, logits, parents, last=level == growth.plan.depth)

    def _choose_level(self, growth: Growth, logits: torch.Tensor, parents: range, last: bool) -> None:
        plan, tree = growth.plan, growth.tree
        candidates: list[tuple[float, int, int]] = []
        for parent, children in zip(parents, self._candidates(growth, logits, parents), strict=True):
            for token, probability in children:
                joint = tree.confidence[parent] * probability
                if math.isnan(joint):
                    raise DraftFault(f"{self.name} has no probabilities: its numbers are not finite")
                if joint >= plan.min_confidence:
                    candidates.append((joint, parent, token))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        # What is below a node is less likely than the node: nothing below these would be offered.
        bar = growth.bar(candidates)
        worth = 0 if last else sum(joint > bar for joint, _, _ in candidates[: self.width(plan)])
        for joint, parent, token in sorted(candidates[:worth], key=lambda c: c[1]):
            tree.add(parent, token, origin=self.name, confidence=joint)
        growth.leaves.extend(candidates[worth:])

    def _candidates(self, growth: Growth, logits: torch.Tensor, parents: Seq[int]) -> Candidates:
        """The likeliest children of each parent, whose logits are given."""
        sampler, tree, count = growth.sequence.sampler, growth.tree, growth.plan.branch
        return [likeliest(sampler, row, tree.path_tokens(p), count) for p, row in zip(parents, logits, strict=True)]

    def _draw_level(self, growth: Growth, logits: torch.Tensor, parents: range) -> None:
        """Draw children of these nodes, the surest of them first, as many as leave the levels below their share.

        Whether a node gets children is decided by the node, and how many by counts: never by the children's tokens.
        """
        plan, tree = growth.plan, growth.tree
        levels = plan.depth - tree.depths[parents[0]]  # this one and those below
        room = -(-(plan.nodes - (len(tree) - 1)) // max(1, levels))
        for parent in sorted(parents, key=lambda node: -tree.confidence[node]):
            count = min(plan.branch, room)
            if count > 0 and tree.confidence[parent] >= plan.min_confidence:
                room -= self._draw(growth, logits[parent - parents[0]], parent, count)

    def _draw(self, growth: Growth, row: torch.Tensor, parent: int, count: int) -> int:
        """Draw `count` siblings below a node without replacement, or as many as there can be; how many."""
        tree, sampler = growth.tree, growth.sequence.sampler
        q = sampler.probabilities(row, tree.path_tokens(parent))
        draw = Draw(q)
        ids = q.nonzero()[:, 0]
        keys = q[ids].log() + noise.gumbel(sampler.step_key(parent, noise.DRAFT), ids)
        order = torch.topk(keys, min(count, len(ids))).indices
        for token in ids[order].tolist():
            joint = tree.confidence[parent] * float(q[token])
            tree.add(parent, token, origin=self.name, confidence=joint, draw=draw)
        return len(order)

    def _feed(self, growths: list[Growth], level: int) -> list[torch.Tensor | None]:
        """Run the nodes that were added by this level and still have a level below them; their logits."""
        feeding = [g for g in growths if g.fed and len(g.tree) > g.fed and level < g.plan.depth]
        if not feeding:
            return [None] * len(growths)
        parts = self._run(feeding).split([len(g.tree) - g.fed for g in feeding])
        rows = dict(zip(map(id, feeding), parts, strict=True))
        for growth in feeding:
            growth.fed = len(growth.tree)
        return [rows.get(id(g)) for g in growths]

    def _offer(self, growth: Growth) -> TokenTree:
        if growth.sampled:
            return growth.tree
        offer = TokenTree(growth.tree.tokens[0])
        offer.merge(growth.tree)
        for joint, parent, token in growth.leaves:
            offer.add(parent, token, origin=self.name, confidence=joint)
        return offer.pruned(growth.plan.nodes)


def likeliest(sampler: Sampler, row: torch.Tensor, path: Seq[int], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after `path` by a draft's logits, with the probability that the target takes them.

    When sampling, the noise that the target will read is known and counted in.
    """
    if sampler.params.greedy:
        ids, scores = None, sampler.adjusted(row, path).float()
    else:
        support = sampler.support(row, path)
        ids, scores = support.ids, sampler.perturbed(support, path)
    probabilities = torch.softmax(scores, dim=0)
    top = torch.topk(probabilities, min(count, len(probabilities)))
    chosen = top.indices if ids is None else ids[top.indices]
    return [(int(t), float(p)) for t, p in zip(chosen.tolist(), top.values.tolist(), strict=True)]
