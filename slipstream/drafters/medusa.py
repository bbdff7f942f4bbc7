"""`medusa`: several small heads on the target's last hidden state, each for one of the next positions.

The heads read the hidden state from which the target chose the root, and the root's embedding where they were trained
to. Head 0 guesses the first token after the root, head 1 the second, and so on, all at once and independently. So every
guess of a depth fits below every guess of the depth before it, and only the shape of the tree is left to choose.

Heads that read the previous token (as in Hydra) guess level by level instead, once per node.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from slipstream.drafters.base import Outcome
from slipstream.drafters.device.device_draft import DeviceDraft, DeviceKeeper
from slipstream.drafters.device.medusa_loop import HeadsDraft, LastStates
from slipstream.drafters.device.static_loop import StaticDraft
from slipstream.drafters.growing.likeliest import Candidates
from slipstream.drafters.growing.marginals import best_first
from slipstream.drafters.growing.static_tree import ASSUMED, RANKS, StaticTree
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_drafter import HeadDrafter, HeadOptions
from slipstream.drafters.heads.medusa_head import MedusaHead, MedusaSettings, unit
from slipstream.errors import CorruptFile
from slipstream.gpu.lanes import Lanes
from slipstream.models.layers.linear import make_draft_linear
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class MedusaOptions(HeadOptions):
    """`depth`: at most the number of heads. `tree`: `dynamic`, the likeliest paths of this step; `static`, a fixed
    shape computed from the heads' accuracies. Sampled nodes always use the static shape: a dynamic one would depend on
    their tokens.
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


@dataclass
class HeadsGrowth(Growth):
    """A tree whose nodes are all guessed from one state."""

    state: torch.Tensor = field(init=False, repr=False)  # [1, width]: the target's normed hidden state before the root


class MedusaDrafter(HeadDrafter[MedusaOptions]):
    """Draft a whole tree from one hidden state."""

    name = "medusa"
    summary = "trained heads on the last hidden state, each for one of the next positions, as a tree"
    helps = "any text, if a draft must cost next to nothing; a head does not see the guesses of the others"
    cost = "two GEMMs per head and one of a reduced LM head per step, whatever the depth"
    options_type = MedusaOptions
    settings_type = MedusaSettings
    head_type = MedusaHead
    growth_type = HeadsGrowth

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
            raise CorruptFile(f"{self._place}: accuracies of {len(self._accuracies)} heads, but {heads} heads")
        self._shapes: dict[Plan, StaticTree] = {}

    def room(self, sequence: Sequence) -> int:
        return min(self._heads, super().room(sequence))

    def scratch_rows(self, plan: Plan) -> int:
        return 0

    # -- guessing -----------------------------------------------------------------------------------------------------

    def _feed_roots(self, growths: list[Growth]) -> Seq[torch.Tensor | None]:
        known = [self.hidden_of(growth.sequence) for growth in growths]
        normed = self.target.norm(torch.stack([row for row in known if row is not None]))
        if self.by_levels:
            for growth, row in zip(growths, normed.split(1), strict=True):
                assert isinstance(growth, HeadsGrowth)
                growth.state = row
            return list(self._run(growths).split(1))
        roots = torch.tensor([growth.tree.tokens[0] for growth in growths], device=self.target.device)
        guesses = self.guesses(normed, roots, max(growth.plan.depth for growth in growths))
        for growth, logits in zip(growths, guesses, strict=True):
            growth.logits = logits[: growth.plan.depth]
        # Chosen nodes need no levels: their tree is built from all heads at once.
        return [g.logits[:1] if g.sampled and g.logits is not None else None for g in growths]

    def guesses(self, normed: torch.Tensor, roots: torch.Tensor, levels: int) -> torch.Tensor:
        """Logits [sequences, levels, draft tokens] of all heads, given normed states [sequences, width] and the roots
        [sequences] after them.
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
        """Logits [rows, draft tokens] of one head after tokens [rows], given normed states [rows, width]."""
        states = torch.cat([normed, unit(self.target.embed(tokens), self.target.config.norm_eps)], -1)
        return self._output(normed + functional.silu(self._enters[depth](states)) @ self._leave[depth])

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        if self.by_levels:
            states = []
            for growth in growths:
                assert isinstance(growth, HeadsGrowth)
                states.append(growth.state.expand(len(growth.tree) - growth.fed, -1))
            tokens = [token for growth in growths for token in growth.tree.tokens[growth.fed :]]
            depth = growths[0].tree.depths[growths[0].fed]  # the same for all: trees grow level by level together
            return self.followed(torch.cat(states), torch.tensor(tokens, device=self.target.device), depth)
        parts = []
        for growth in growths:
            assert growth.logits is not None
            parts.append(growth.logits[growth.tree.depths[growth.fed :]])
        return torch.cat(parts)

    # -- trees --------------------------------------------------------------------------------------------------------

    def _draw_level(self, growth: Growth, logits: torch.Tensor, parents: range) -> None:
        """Draw as many children per node as the static shape has there: the shape does not depend on tokens."""
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
        candidates, plan, tree = self._choices(growth, growth.logits), growth.plan, growth.tree
        if self.options.tree == "dynamic":
            tokens = [[token for token, _ in depth] for depth in candidates]
            odds = [[probability for _, probability in depth] for depth in candidates]
            for parent, token, joint in best_first(tokens, odds, plan.nodes, plan.min_confidence):
                tree.add(parent, token, origin=self.name, confidence=joint)
            return tree
        places = [0]  # shape node -> tree node; -1: left out
        for parent, rank, _ in self._shape(plan).nodes:
            places.append(self._placed(tree, places[parent], rank, candidates, plan.min_confidence))
        return tree

    def _placed(self, tree: TokenTree, parent: int, rank: int, candidates: Candidates, min_confidence: float) -> int:
        """Add the candidate of this rank below `parent`, if the parent exists and the candidate is likely enough."""
        if parent < 0 or rank >= len(choices := candidates[tree.depths[parent]]):
            return -1
        token, probability = choices[rank]
        joint = tree.confidence[parent] * probability
        return -1 if joint < min_confidence else tree.add(parent, token, origin=self.name, confidence=joint)

    def _choices(self, growth: Growth, logits: torch.Tensor) -> Candidates:
        """The likeliest tokens of each depth, given the first choices of the depths above."""
        spine = self.vocab[logits[:-1].argmax(-1)].tolist()
        shadow = replace(growth, tree=TokenTree.chain(growth.tree.tokens[0], spine))
        if self.options.tree == "static":  # its nodes may have any rank that was counted
            shadow = replace(shadow, plan=replace(growth.plan, branch=max(RANKS, growth.plan.branch)))
        if growth.sequence.params.adjusts:
            logits = self._widened(logits)
        return self._candidates(shadow, logits, range(len(logits)))

    def _shape(self, plan: Plan) -> StaticTree:
        """The static tree of a plan, cached: there are few plans."""
        if plan not in self._shapes:
            self._shapes[plan] = StaticTree.best(self._accuracies[: plan.depth], plan.nodes, plan.branch)
        return self._shapes[plan]

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        plan = self.plan_for(lanes)
        plan = replace(plan, depth=min(plan.depth, self._heads))
        if not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None
        return StaticDraft(self, self._shape(plan)) if self.options.tree == "static" else HeadsDraft(self, plan)

    def device_keepers(self, lanes: Lanes, drafting: Seq[Plan] = ()) -> list[DeviceKeeper]:
        return [LastStates(self, lanes)]

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            outcome.sequence.drafting.pop(self.key, None)
            self.know(outcome.sequence, outcome.taps[self.taps[0]][-1].clone())  # a prefill chunk has many rows

    def know(self, sequence: Sequence, hidden: torch.Tensor) -> None:
        """Keep the hidden state [width] of the last token that the target has seen."""
        sequence.drafting[f"{self.key}.hidden"] = _Known(sequence.cached, hidden)

    def hidden_of(self, sequence: Sequence) -> torch.Tensor | None:
        """The hidden state before the root; None until the prompt is prefilled."""
        known: _Known | None = sequence.drafting.get(f"{self.key}.hidden")
        return known.hidden if known is not None and known.length == len(sequence.tokens) - 1 else None

    def follows(self, sequence: Sequence) -> bool:
        return self.hidden_of(sequence) is not None
