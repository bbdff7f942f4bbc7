"""Trees that grow level by level from the logits of any model.

A subclass says how the tokens up to the root reach its model (`_feed_roots`) and how a pass runs (`_run`). This module
decides which nodes a level adds, which of them are fed for the next level, and which are offered.

Nodes are *chosen* by joint probability (when sampling: by log q plus the noise that the target will use, so that draft
and target coincide as often as possible), or *sampled* from q without replacement for verifiers that read q.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from slipstream import noise
from slipstream.attention import Segment, tree_segment
from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.drafters.growing.catch_up import Text
from slipstream.drafters.growing.likeliest import Candidates, likeliest_children
from slipstream.errors import DraftFault, OptionError
from slipstream.sequence import Sequence
from slipstream.tree import Draw, TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class GrowthOptions(DraftOptions):
    """`nodes`: 0 for one per level in a chain, four per level in a tree. `draw`: `top` (chosen nodes) or `sample`
    (sampled nodes, for verifiers that read q); `auto` samples if the verifier reads q and the request samples.
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
        """The plan, with a default number of nodes for the shape."""
        nodes = self.nodes or (self.depth if self.branch == 1 else min(192, 4 * self.depth))
        return Plan(self.depth, nodes, self.branch, self.min_confidence)


@dataclass
class Growth:
    """A tree while it grows. `tree` holds the nodes that were or will be fed to the model, in slot order."""

    sequence: Sequence
    plan: Plan
    tree: TokenTree
    root_slot: int
    sampled: bool
    fed: int = 0  # nodes whose K/V are in the store
    leaves: list[tuple[float, int, int]] = field(default_factory=list)  # (joint, parent, token): offered, never fed
    # The model's hidden states at the fed nodes, one row each in slot order, if anything reads them later.
    hidden: list[torch.Tensor] = field(default_factory=list)
    outputs: npt.NDArray[np.float32] | None = None  # the same of the nodes fed last, if a program ran them
    likeliest: Candidates | None = None  # children of the nodes fed last, if the pass chose them
    logits: torch.Tensor | None = None  # [levels, vocab], if the drafter has those of all levels at once

    def extends_to(self, tree: TokenTree) -> bool:
        """Whether the fed nodes are the first nodes of `tree`, so that their rows are in place."""
        fed = self.fed
        return fed > 0 and (tree.tokens[:fed], tree.parents[:fed]) == (self.tree.tokens[:fed], self.tree.parents[:fed])

    def unseen(self, store: str) -> Segment:
        """The next chunk of the sequence without rows in a store; the root comes last."""
        return Text(self.sequence.table, self.sequence.tokens, self.tree).unseen(store)

    def kept(self, tokens: Seq[int]) -> list[int]:
        """Of the fed nodes, those on the path of the accepted `tokens`.

        The last token is the next root and must be fed again for its logits, even if a node guessed it.
        """
        return [node for node in self.tree.walk(tokens[:-1]) if node < self.fed]

    def bar(self, candidates: Seq[tuple[float, int, int]]) -> float:
        """The joint probability of the last node that would be offered if no candidates but these were to come."""
        joints = [*self.tree.confidence[1:], *(leaf[0] for leaf in self.leaves), *(new[0] for new in candidates)]
        if len(joints) < self.plan.nodes:
            return 0.0
        return heapq.nlargest(self.plan.nodes, joints)[-1]

    def segment(self) -> Segment:
        """The nodes that have not been fed yet."""
        return tree_segment(self.sequence.table, self.root_slot, [self.tree.tokens[0]], self.tree, first_node=self.fed)


Options = TypeVar("Options", bound=GrowthOptions)


class GrowingDrafter(Drafter[Options], Generic[Options]):
    """Draft by passes of a model."""

    growth_type: ClassVar[type[Growth]] = Growth  # a subclass may keep more state per tree

    def _require_layers(self, what: str) -> None:
        """Refuse a target that does not expose its layers. `what`: what the drafter does with them."""
        if not self.target.layered:
            raise OptionError(
                f"{self.name} {what}, and a model run by transformers does not expose them",
                hint="use a drafter that does not read the target's layers",
            )

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _feed_roots(self, growths: list[Growth]) -> Seq[torch.Tensor | None]:
        """Feed the unseen tokens of texts that the model follows, up to the roots; logits [1, vocab] after each root,
        None: grow no levels.
        """

    @abstractmethod
    def _run(self, growths: list[Growth]) -> torch.Tensor:
        """A pass over the nodes of each tree that have not been fed; their logits, tree after tree."""

    def unread(self, sequence: Sequence) -> int:
        seen = sequence.table.lengths.get(self.key)
        return 0 if seen is None else max(0, len(sequence.tokens) - 1 - seen)

    def room(self, sequence: Sequence) -> int:
        """Levels that still fit in the model's own context."""
        return self.target.longest - len(sequence.tokens)

    def follows(self, sequence: Sequence) -> bool:
        """Whether everything that a draft for this sequence reads of the target is available."""
        return True

    def bring_up(self, sequences: Seq[Sequence]) -> bool:
        """Feed the unseen tokens of these sequences, up to the roots; False if the model cannot follow all of them.

        For drafts made on the device: nothing is proposed.
        """
        growths = [self._start(DraftRequest(sequence, Plan(depth=1, nodes=1))) for sequence in sequences]
        self._catch_up(growths)
        for sequence in sequences:
            del sequence.drafting[self.key]
        return all(growth.fed for growth in growths)

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

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self._offer(growth) for growth in self._grow(requests)]

    def _grow(self, requests: Seq[DraftRequest]) -> list[Growth]:
        growths = [self._start(request) for request in requests]
        rows = self._catch_up(growths)
        for level in range(1, max(growth.plan.depth for growth in growths) + 1):
            growing = [(g, r) for g, r in zip(growths, rows, strict=True) if r is not None]
            if not growing:
                break
            for growth, logits in growing:
                self._add_level(growth, logits, level)
            rows = self._feed(growths, level)
        return growths

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        """Bring the model up to the roots; logits [1, vocab] after each of them, None: draft nothing."""
        ready = [growth for growth in growths if growth.plan.drafts and self.follows(growth.sequence)]
        rows = dict(zip(map(id, ready), self._feed_roots(ready), strict=True)) if ready else {}
        for growth in ready:
            growth.fed = 1
        return [rows.get(id(growth)) for growth in growths]

    def _start(self, request: DraftRequest) -> Growth:
        sequence = request.sequence
        levels = min(request.plan.depth, request.plan.nodes, self.room(sequence))
        plan = replace(request.plan, depth=max(0, levels))
        sampled = self.samples and not (self.options.draw == "auto" and sequence.params.greedy)
        growth = self.growth_type(sequence, plan, TokenTree(sequence.tokens[-1]), len(sequence.tokens) - 1, sampled)
        sequence.drafting[self.key] = growth
        return growth

    def _add_level(self, growth: Growth, logits: torch.Tensor, level: int) -> None:
        """Add children of the nodes fed last; `logits` are theirs, in order."""
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
                    raise DraftFault(f"{self.name}: the draft's probabilities are not finite")
                if joint >= plan.min_confidence:
                    candidates.append((joint, parent, token))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        # A child is less likely than its parent: nothing below these would be offered.
        bar = growth.bar(candidates)
        worth = 0 if last else sum(joint > bar for joint, _, _ in candidates[: self.width(plan)])
        if worth and plan.min_level > sum(joint for joint, _, _ in candidates[:worth]):
            worth = 0  # at most so many tokens would be accepted on the next level
        for joint, parent, token in sorted(candidates[:worth], key=lambda c: c[1]):
            tree.add(parent, token, origin=self.name, confidence=joint)
        growth.leaves.extend(candidates[worth:])

    def _candidates(self, growth: Growth, logits: torch.Tensor, parents: Seq[int]) -> Candidates:
        """The likeliest children of each parent, given the parents' logits."""
        paths = [growth.tree.path_tokens(parent) for parent in parents]
        return likeliest_children(growth.sequence.sampler, logits, paths, growth.plan.branch)

    def _draw_level(self, growth: Growth, logits: torch.Tensor, parents: range) -> None:
        """Draw children of these nodes, the most confident first, as many as leave the levels below their share.

        Whether a node gets children depends on the node, how many on counts: never on the children's tokens.
        """
        plan, tree = growth.plan, growth.tree
        levels = plan.depth - tree.depths[parents[0]]  # this one and those below
        room = -(-(plan.nodes - (len(tree) - 1)) // max(1, levels))
        for parent in sorted(parents, key=lambda node: -tree.confidence[node]):
            count = min(plan.branch, room)
            if count > 0 and tree.confidence[parent] >= plan.min_confidence:
                room -= self._draw(growth, logits[parent - parents[0]], parent, count)

    def _draw(self, growth: Growth, row: torch.Tensor, parent: int, count: int) -> int:
        """Draw `count` siblings below a node without replacement, or as many as exist; returns how many."""
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
        """Run the nodes that this level added and that still have a level below them; their logits."""
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
        return growth.tree.best_with(growth.leaves, growth.plan.nodes, origin=self.name)
