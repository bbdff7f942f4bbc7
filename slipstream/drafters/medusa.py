"""`medusa`: several small heads on the target's last hidden state, each for one of the coming places.

The hidden state from which the target chose the root says something about the tokens behind the root, too; the root's
embedding, where heads read it, says which one was chosen. Head 0 guesses the first token behind the root, head 1 the
second, and so on, all at once and none knowing what the others say. So every
guess of a depth fits below every guess of the depth before it, and what is left to choose is the shape of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slipstream.drafters.base import Outcome
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.head import Frame, Head, HeadSettings, Lesson, Losses, distance, hits, mean
from slipstream.drafters.learned import LearnedDrafter, LearnedOptions
from slipstream.drafters.levels import Candidates, Growth
from slipstream.drafters.marginals import best_first
from slipstream.drafters.medusa_loop import StaticDraft
from slipstream.drafters.static_tree import ASSUMED, RANKS, StaticTree, Tally
from slipstream.errors import CorruptFile
from slipstream.models.linear import make_draft_linear
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """`heads`: how many places behind the root are guessed. `decay`: what a head counts against the one before it.
    `root`: the heads also read the root's embedding, which is known before they guess. `own_rows`: heads as they were
    published, with output rows of their own and no second matrix.
    """

    heads: int = 5
    decay: float = 0.8
    root: bool = False
    own_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.heads >= 1, "heads", "1 or more")
        self.require(0.0 < self.decay <= 1.0, "decay", "above 0, 1 at most")
        self.require(not (self.root and self.own_rows), "root", "false where own_rows is true")


class MedusaHead(Head):
    """The heads: h + B silu(A s + a), each with matrices of its own, on the target's last hidden state h, normed.

    They read the state s: h alone, or h and the root's embedding, normed, beside it. The target's norm comes first and
    nothing behind the sum: that is the state which the target's output rows expect, and at the beginning, with B at
    zero, every head says what the target itself says of the root.
    """

    tables = ("rows", "enter.weight", "leave")  # heads stand below each other in them: no single map of states

    def __init__(self, settings: MedusaSettings, frame: Frame) -> None:
        super().__init__(frame)
        width = frame.config.hidden_size
        self.settings = settings
        self.taps = (frame.config.layers - 1,)
        self.enter = nn.Linear(
            width * (1 + settings.root), settings.heads * width
        )  # one head below the other, as matrices are stored
        if settings.own_rows:
            self.rows = nn.Parameter(frame.rows.detach().float().cpu().repeat(settings.heads, 1))
            for weight in self.enter.parameters():
                nn.init.zeros_(weight)  # here too every head begins by saying what the target says of the root
        else:
            self.leave = nn.Parameter(torch.zeros(settings.heads * width, width))

    def states(self, lesson: Lesson) -> torch.Tensor:
        """What the heads read at every token, the next one being the root, [batch, length, width of a state]."""
        hidden = self.rms_norm(lesson.taps[self.taps[0]], self.frame.norm)
        if not self.settings.root:
            return hidden
        roots = functional.pad(lesson.tokens[:, 1:], (0, 1))  # behind the last token there is none to learn from
        return torch.cat([hidden, _unit(self.frame.embed(roots), self.frame.config.norm_eps)], -1)

    def guess(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits of one head, [rows, width of a state] -> [rows, draft tokens]."""
        width = self.frame.config.hidden_size
        own, hidden = slice(depth * width, (depth + 1) * width), states[..., :width]
        inner = functional.silu(functional.linear(states, self.enter.weight[own], self.enter.bias[own]))
        if self.settings.own_rows:
            return functional.linear(hidden + inner, self.rows.chunk(self.settings.heads)[depth])
        return self.logits(hidden + functional.linear(inner, self.leave[own]))

    def losses(self, lesson: Lesson) -> Losses:
        states = self.states(lesson)
        probabilities, best = lesson.at(lesson.probabilities), lesson.at(lesson.best)
        losses, right = [], []
        for depth in range(self.settings.heads):
            # From row i the root is x_(i+1), and this head's token is the one that row i + depth + 1 speaks of.
            ahead = depth + 1
            there = lesson.counting(ahead)
            logits = self.guess(lesson.at(states, ahead), depth)
            losses.append(self.settings.decay**depth * mean(distance(logits, probabilities), there))
            right.append(mean(hits(logits, best), there))
        return Losses(torch.stack(losses).sum(), torch.stack(right).detach())

    @torch.no_grad()
    def facts(self, lessons: Iterable[Lesson]) -> dict[str, Any]:
        """`accuracies`: how often the choice of each rank of each head is what the target wrote, the heads above having
        had theirs among their choices. The shape of the tree is made of it.
        """
        tally = Tally(self.settings.heads)
        for lesson in lessons:
            self._count(lesson, tally)
        return {"accuracies": tally.accuracies} if tally.asked else {}

    def _count(self, lesson: Lesson, tally: Tally) -> None:
        vocab = self.frame.vocab
        states, tokens, length = self.states(lesson), lesson.tokens, lesson.tokens.shape[1]
        texts, rows = lesson.learn.nonzero().unbind(1)
        rows = rows - 1  # the root is behind them, and the target's own token behind the root
        for depth in range(self.settings.heads):
            spoken = rows + depth + 1  # the row of the target that speaks of this head's token
            known = (rows >= 0) & (spoken + 1 < length)
            known &= lesson.learn[texts, spoken.clamp_max(length - 1)]
            texts, rows, spoken = texts[known], rows[known], spoken[known]
            choices = self.guess(states[texts, rows], depth).topk(min(RANKS, len(vocab))).indices
            right = tally.add(depth, vocab[choices], tokens[texts, spoken + 1])
            texts, rows = texts[right], rows[right]


@dataclass(frozen=True)
class MedusaOptions(LearnedOptions):
    """`depth`: at most as many levels as there are heads. `tree`: `static`, the shape for which the heads' accuracies
    speak; `dynamic`, the paths that the heads give the highest probability in this step. Sampled nodes always take the
    static shape: another would have been chosen by looking at their tokens.
    """

    depth: int = 5
    branch: int = RANKS
    tree: str = "static"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.tree in ("static", "dynamic"), "tree", "static, dynamic")


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

        self._heads, self._root = heads, head.settings.root
        self._enter = make_draft_linear(ready(head.enter.weight), ready(head.enter.bias))
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
        if ready:
            hidden = torch.stack([row for row in known.values() if row is not None])
            roots = torch.tensor([growth.tree.tokens[0] for growth in ready], device=self.target.device)
            guesses = self.guesses(hidden, roots, max(growth.plan.depth for growth in ready))
            for growth, logits in zip(ready, guesses, strict=True):
                growth.fed, growth.logits = 1, logits[: growth.plan.depth]
        # Chosen nodes need no levels: their tree is made of all heads at once.
        return [g.logits[:1] if g.sampled and g.logits is not None else None for g in growths]

    def guesses(self, hidden: torch.Tensor, roots: torch.Tensor, levels: int) -> torch.Tensor:
        """[sequences, width] and the roots behind them, [sequences] -> logits [sequences, levels, draft tokens]."""
        states = normed = self.target.norm(hidden)
        if self._root:
            states = torch.cat([normed, _unit(self.target.embed(roots), self.target.config.norm_eps)], -1)
        inner = functional.silu(self._enter(states)).unflatten(1, (self._heads, -1))[:, :levels]
        if self._own:
            own = self._own[:levels]
            return torch.stack([rows(normed + inner[:, depth]) for depth, rows in enumerate(own)], 1)
        hidden = normed + torch.bmm(inner.transpose(0, 1), self._leave[:levels])  # [levels, sequences, width]
        logits = self._output(hidden.transpose(0, 1).flatten(0, 1))
        return logits.view(len(roots), levels, -1)

    def _run(self, growths: list[Growth]) -> torch.Tensor:
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
            places = tuple(tree.children(tree.parents[node]).index(node) for node in tree.path(parent))
            count = self._shape(plan).widths.get(places, 0)
            if count and tree.confidence[parent] >= plan.min_confidence:
                self._draw(growth, row, parent, count)

    def _offer(self, growth: Growth) -> TokenTree:
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
        static = plan.drafts and self.options.tree == "static" and plan.min_confidence == 0.0 and not self.samples
        return StaticDraft(self, self._shape(plan)) if static else None

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


def _unit(embedded: torch.Tensor, eps: float) -> torch.Tensor:
    """Embeddings [..., width] at one length; the heads' matrices have a weight for every place as it is."""
    return functional.rms_norm(embedded, embedded.shape[-1:], eps=eps)
