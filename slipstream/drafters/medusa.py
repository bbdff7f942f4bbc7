"""`medusa`: several small heads on the target's last hidden state, each for one of the coming places.

The hidden state from which the target chose the root says something about the tokens behind the root, too; the root's
embedding, where heads read it, says which one was chosen. Head 0 guesses the first token behind the root, head 1 the
second, and so on, all at once and none knowing what the others say. So every guess of a depth fits below every guess of
the depth before it, and what is left to choose is the shape of the tree.

Heads that read the token before their own (as in Hydra) guess level by level instead, a guess for every node.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from slipstream.drafters.base import Outcome
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.head import Head
from slipstream.drafters.learned import LearnedDrafter, LearnedOptions
from slipstream.drafters.levels import Candidates, Growth
from slipstream.drafters.marginals import best_first
from slipstream.drafters.medusa_head import MedusaHead, MedusaSettings, unit
from slipstream.drafters.medusa_loop import HeadsDraft
from slipstream.drafters.static_loop import StaticDraft
from slipstream.drafters.static_tree import ASSUMED, RANKS, StaticTree
from slipstream.errors import CorruptFile
from slipstream.models.linear import make_draft_linear
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class MedusaOptions(LearnedOptions):
    """`depth`: at most as many levels as there are heads. `tree`: `dynamic`, the paths that the heads give the highest
    probability in this step; `static`, the shape for which the heads' accuracies speak. Sampled nodes always take the
    static shape: another would have been chosen by looking at their tokens.
    """

    depth: int = 5
    branch: int = RANKS
    tree: str = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.tree in ("dynamic", "static"), "tree", "dynamic, static")


@dataclass(frozen=True)
class _Known:
    """The target's last hidden state of a sequence."""

    length: int  # tokens up to it
    hidden: torch.Tensor  # [width]


class MedusaDrafter(LearnedDrafter[MedusaOptions]):
    """Draft a whole tree from one hidden state."""

    name = "medusa"
    summary = "trained heads on the last hidden state, each for one of the coming places, as a tree"
    helps = "any text, where a drafter must cost next to nothing; heads do not know what was guessed before them"
    cost = "two products per head and one of a reduced output head a step, whatever the depth"
    options_type = MedusaOptions
    settings_type = MedusaSettings
    head_type = MedusaHead

    def _build(self, head: Head) -> None:
        super()._build(head)
        assert isinstance(head, MedusaHead) and head.enter.bias is not None
        dtype, device, heads = self.target.dtype, self.target.device, head.settings.heads

        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype)

        self._heads, self._root, self.by_levels = heads, head.settings.root, head.settings.before
        weight, bias = ready(head.enter.weight), ready(head.enter.bias)
        if self.by_levels:
            parts = zip(weight.chunk(heads), bias.chunk(heads), strict=True)
            self._enters = [make_draft_linear(*part) for part in parts]
        else:
            self._enter = make_draft_linear(weight, bias)
        own = head.rows.chunk(heads) if head.settings.own_rows else ()
        self._own = [make_draft_linear(ready(rows)) for rows in own]
        if not own:
            leave = ready(head.leave).unflatten(0, (heads, -1))
            self._leave = leave.transpose(1, 2).contiguous()  # [heads, width, width]
            self._output = make_draft_linear(ready(head.frame.rows))
        self._accuracies: Seq[Seq[float]] = self.trained.figures.get("accuracies") or [ASSUMED] * heads
        if len(self._accuracies) != heads:
            raise CorruptFile(f"{self._place}: accuracies of {len(self._accuracies)} heads, and there are {heads}")
        self._shapes: dict[Plan, StaticTree] = {}

    def room(self, sequence: Sequence) -> int:
        return min(self._heads, super().room(sequence))

    def scratch_rows(self, plan: Plan) -> int:
        return 0

    # -- guessing -----------------------------------------------------------------------------------------------------

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        known = {id(growth): self.hidden_of(growth.sequence) for growth in growths if growth.plan.drafts}
        ready = [growth for growth in growths if known.get(id(growth)) is not None]
        if not ready:
            return [None] * len(growths)
        normed = self.target.norm(torch.stack([row for row in known.values() if row is not None]))
        if self.by_levels:
            for growth, row in zip(ready, normed.split(1), strict=True):
                growth.hidden = [row]
            rows = dict(zip(map(id, ready), self._run(ready).split(1), strict=True))
            for growth in ready:
                growth.fed = 1
            return [rows.get(id(growth)) for growth in growths]
        roots = torch.tensor([growth.tree.tokens[0] for growth in ready], device=self.target.device)
        guesses = self.guesses(normed, roots, max(growth.plan.depth for growth in ready))
        for growth, logits in zip(ready, guesses, strict=True):
            growth.fed, growth.logits = 1, logits[: growth.plan.depth]
        # Chosen nodes need no levels: their tree is made of all heads at once.
        return [g.logits[:1] if g.sampled and g.logits is not None else None for g in growths]

    def guesses(self, normed: torch.Tensor, roots: torch.Tensor, levels: int) -> torch.Tensor:
        """What all heads say, given normed states [sequences, width] and the roots [sequences] behind them: logits
        [sequences, levels, draft tokens].
        """
        states = normed
        if self._root:
            states = torch.cat([normed, unit(self.target.embed(roots), self.target.config.norm_eps)], -1)
        inner = functional.silu(self._enter(states)).unflatten(1, (self._heads, -1))[:, :levels]
        if self._own:
            own = self._own[:levels]
            return torch.stack([rows(normed + inner[:, depth]) for depth, rows in enumerate(own)], 1)
        hidden = normed + torch.bmm(inner.transpose(0, 1), self._leave[:levels])  # [levels, sequences, width]
        logits = self._output(hidden.transpose(0, 1).flatten(0, 1))
        return logits.view(len(roots), levels, -1)

    def followed(self, normed: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """What one head says behind tokens [rows], given normed states [rows, width]: logits [rows, draft tokens]."""
        states = torch.cat([normed, unit(self.target.embed(tokens), self.target.config.norm_eps)], -1)
        return self._output(normed + functional.silu(self._enters[depth](states)) @ self._leave[depth])

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        if self.by_levels:
            hidden = torch.cat([growth.hidden[0].expand(len(growth.tree) - growth.fed, -1) for growth in growths])
            tokens = [token for growth in growths for token in growth.tree.tokens[growth.fed :]]
            depth = growths[0].tree.depths[growths[0].fed]  # of all: trees grow level by level together
            return self.followed(hidden, torch.tensor(tokens, device=self.target.device), depth)
        parts = []
        for growth in growths:
            assert growth.logits is not None
            parts.append(growth.logits[growth.tree.depths[growth.fed :]])
        return torch.cat(parts)

    # -- trees --------------------------------------------------------------------------------------------------------

    def _draw_level(self, growth: Growth, logits: torch.Tensor, parents: range) -> None:
        """Below each node as many draws as the static shape has children there: no token is looked at."""
        tree, plan = growth.tree, growth.plan
        for parent, row in zip(parents, logits, strict=True):
            count = self._width_below(growth, parent)
            if count and tree.confidence[parent] >= plan.min_confidence:
                self._draw(growth, row, parent, count)

    def _width_below(self, growth: Growth, node: int) -> int:
        """How many children a node has in the static shape."""
        tree = growth.tree
        places = tuple(tree.children(tree.parents[above]).index(above) for above in tree.path(node))
        return self._shape(growth.plan).widths.get(places, 0)

    def _choose_level(self, growth: Growth, logits: torch.Tensor, parents: range, last: bool) -> None:
        if self.options.tree == "dynamic":
            super()._choose_level(growth, logits, parents, last)
            return
        tree = growth.tree
        for parent, children in zip(parents, self._candidates(growth, logits, parents), strict=True):
            for token, probability in children[: self._width_below(growth, parent)]:
                joint = tree.confidence[parent] * probability
                if joint >= growth.plan.min_confidence:
                    tree.add(parent, token, origin=self.name, confidence=joint)

    def _offer(self, growth: Growth) -> TokenTree:
        if self.by_levels and not growth.sampled and self.options.tree == "dynamic":
            return super()._offer(growth)
        if growth.sampled or growth.logits is None:
            return growth.tree
        candidates, plan = self._choices(growth, growth.logits), growth.plan
        tree = TokenTree(growth.tree.tokens[0])
        if self.options.tree == "dynamic":
            tokens = [[token for token, _ in depth] for depth in candidates]
            odds = [[probability for _, probability in depth] for depth in candidates]
            for parent, token, joint in best_first(tokens, odds, plan.nodes, plan.min_confidence):
                tree.add(parent, token, origin=self.name, confidence=joint)
            return tree
        places = [0]  # of the nodes of the shape in the tree; -1: left out
        for parent, rank, _ in self._shape(plan).nodes:
            places.append(self._placed(tree, places[parent], rank, candidates, plan.min_confidence))
        return tree

    def _placed(self, tree: TokenTree, parent: int, rank: int, candidates: Candidates, min_confidence: float) -> int:
        """Add the candidate of this rank below `parent`, if both are there and worth it."""
        if parent < 0 or rank >= len(choices := candidates[tree.depths[parent]]):
            return -1
        token, probability = choices[rank]
        joint = tree.confidence[parent] * probability
        return -1 if joint < min_confidence else tree.add(parent, token, origin=self.name, confidence=joint)

    def _choices(self, growth: Growth, logits: torch.Tensor) -> Candidates:
        """The likeliest tokens of each depth, as they would be behind the first choices of the depths above."""
        spine = self.vocab[logits[:-1].argmax(-1)].tolist()
        behind = replace(growth, tree=TokenTree.chain(growth.tree.tokens[0], spine))
        if self.options.tree == "static":  # its nodes may be of any rank that was counted
            behind = replace(behind, plan=replace(growth.plan, branch=max(RANKS, growth.plan.branch)))
        if growth.sequence.params.adjusts:
            logits = self._widened(logits)
        return self._candidates(behind, logits, range(len(logits)))

    def _shape(self, plan: Plan) -> StaticTree:
        """The static tree for a plan: there are few plans, and each is met in many steps."""
        if plan not in self._shapes:
            self._shapes[plan] = StaticTree.best(self._accuracies[: plan.depth], plan.nodes, plan.branch)
        return self._shapes[plan]

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan = self.plan_for(lanes)
        plan = replace(plan, depth=min(plan.depth, self._heads))
        if not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None
        return StaticDraft(self, self._shape(plan)) if self.options.tree == "static" else HeadsDraft(self, plan)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            outcome.sequence.drafting.pop(self.key, None)
            self.know(outcome.sequence, outcome.taps[self.taps[0]][-1].clone())  # of a prompt's piece, one row of many

    def know(self, sequence: Sequence, hidden: torch.Tensor) -> None:
        """Keep the hidden state [width] of the last token that the target has seen."""
        sequence.drafting[f"{self.key}.hidden"] = _Known(sequence.cached, hidden)

    def hidden_of(self, sequence: Sequence) -> torch.Tensor | None:
        """The hidden state before the root; until its prompt is fed a sequence has none."""
        known: _Known | None = sequence.drafting.get(f"{self.key}.hidden")
        return known.hidden if known is not None and known.length == len(sequence.tokens) - 1 else None

    def follows(self, sequence: Sequence) -> bool:
        return self.hidden_of(sequence) is not None
