"""`cascade`: each level verifies the one below before the target sees the draft.

Written `cascade:suffix+draft_model:model=PATH`. The first level is any drafter. Every level above it is a model that
says, as a chain, exactly what it would say alone, only sooner: the level below guesses, the model checks the guesses in
one pass and adds a token of its own, until the chain is long enough. So a cascade changes what a draft costs and never
what it is: under `match` the chain of chosen tokens is the last model's own, and under a verifier that reads q its
tokens are drawn from the last model's q, because the levels verify each other by rejection. A chain ends after a token,
or at a length that was fixed before any token was seen; a token that was drawn is never dropped for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream import noise
from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, Outcome, Wish
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.levels import likeliest
from slipstream.drafters.registry import AnyDrafter, DrafterSpec, build_several
from slipstream.errors import OptionError
from slipstream.sampling import TreeDistributions
from slipstream.sequence import Sequence
from slipstream.tree import Draw, TokenTree
from slipstream.types import Plan
from slipstream.verify import Match, Rejection

if TYPE_CHECKING:
    import torch

    from slipstream.models.view import TargetView
    from slipstream.verify import Verdict


@dataclass(frozen=True)
class CascadeOptions(DraftOptions):
    """`levels`: two or more drafters, the cheapest first; those after the first are draft models, each larger than the
    one before it. Each keeps its own options: the last one's `depth` is the length of the draft.
    """

    depth: int = 0
    nodes: int = 0
    branch: int = 1
    levels: tuple[DrafterSpec, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unset in (("depth", 0), ("nodes", 0), ("branch", 1), ("min_confidence", 0.0)):
            self.require(getattr(self, name) == unset, name, "an option of each of the levels")
        if len(self.levels) < 2:
            raise OptionError("cascade needs two levels or more", hint="cascade:suffix+draft_model:model=PATH")
        for spec in self.levels[1:]:
            if spec.method != DraftModelDrafter.name:
                raise OptionError(
                    f"{spec.method} cannot verify the level below it",
                    hint="every level after the first is a draft_model",
                )
            if spec.model is None:
                raise OptionError(
                    "a distilled draft_model has a part of the target's vocabulary and cannot verify a level below",
                    hint="draft_model:model=PATH for every level after the first; "
                    "`slipstream export draft_model -m TARGET --format hf-model -o PATH` makes such a model of it",
                )
            level = spec.checked()
            if level.branch != 1 or 0 < level.nodes < level.depth or getattr(level, "draw", "auto") != "auto":
                raise OptionError(
                    "a level above the first writes a chain of `depth` tokens, as the verifier needs them",
                    hint="leave out branch, nodes and draw there",
                )

    @property
    def plan(self) -> Plan:
        """A chain as long as the last model's."""
        length = self.levels[-1].checked().depth
        return Plan(length, length)


@dataclass
class _Draft:
    """A chain while a level writes it: `shadow` is the text with the chain behind it."""

    shadow: Sequence
    chain: TokenTree
    length: int  # tokens wanted
    least: float  # confidence under which the chain ends
    sampled: bool

    @property
    def tip(self) -> int:
        """The last node of the chain."""
        return len(self.chain) - 1

    @property
    def missing(self) -> int:
        """How many tokens the chain still wants."""
        return 0 if self.chain.confidence[self.tip] < self.least else self.length - self.tip


class CascadeDrafter(Drafter[CascadeOptions]):
    """Draft with a model that is itself drafted for."""

    name = "cascade"
    summary = "three models and more: each level verifies the one below before the target sees the draft"
    helps = "a good but costly draft model, on text that a cheaper drafter often knows; else two levels win"
    cost = "one pass of a level's model per run of guesses that it accepts, on every level"
    needs = "draft models of the target's vocabulary on every level but the first"
    options_type = CascadeOptions

    def __init__(self, options: CascadeOptions, target: TargetView) -> None:
        super().__init__(options, target)
        levels = build_several(options.levels, target)
        self._first: AnyDrafter = levels[0]
        self._models = [level for level in levels[1:] if isinstance(level, DraftModelDrafter)]
        self._judges = {False: Match(), True: Rejection()}
        self._first_plan: Plan = self._first.plan
        if self._first.taps:
            raise OptionError(
                f"{self._first.name} reads hidden states of the target, and there are none of a level's guesses",
                hint=f"{self._first.name} alone, or merged with others: suffix+{self._first.name}",
            )

    def rename(self, key: str) -> None:
        super().rename(key)
        for level in self._levels:
            level.rename(f"{key}/{level.key}")

    @property
    def _levels(self) -> list[AnyDrafter]:
        return [self._first, *self._models]

    @property
    def origins(self) -> frozenset[str]:
        return frozenset().union(*(level.origins for level in self._levels))

    @property
    def samples(self) -> bool:
        return self.target.reads_draws

    def attach(self, cache: PagedCache) -> None:
        for level in self._levels:
            level.attach(cache)

    def scratch_rows(self, plan: Plan) -> int:
        lengths = sum(1 + model.options.depth for model in self._models)
        first: int = self._first.scratch_rows(self._first_plan)
        return lengths + self._first_plan.nodes + first

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        sequences = [wish.sequence for wish in wishes]
        lengths = [min(wish.plan.depth, wish.plan.nodes) for wish in wishes]
        try:
            chains = self._chains(len(self._models) - 1, sequences, lengths)
        except Exception:
            for sequence in sequences:
                self.rollback(sequence, len(sequence.tokens))
            raise
        for sequence, chain in zip(sequences, chains, strict=True):
            # The rows of guesses stay where they are, but do not count as the sequence's until it is known which stand.
            stores = {level.key for level in self._levels} & sequence.table.lengths.keys()
            written = {store: sequence.table.lengths[store] for store in stores}
            self._take_back(len(self._models), sequence, len(sequence.tokens))
            sequence.drafting[self.key] = chain, written
        return chains

    def _chains(self, level: int, sequences: Seq[Sequence], lengths: Seq[int]) -> list[TokenTree]:
        """What the model of a level says next, by rounds of guessing below and checking here."""
        drafts = [self._start(level, s, length) for s, length in zip(sequences, lengths, strict=True)]
        while writing := [draft for draft in drafts if draft.missing > 0]:
            trees = self._below(level, writing)
            rows = self._models[level].judge([draft.shadow for draft in writing], trees)
            for draft, tree, logits in zip(writing, trees, rows, strict=True):
                self._extend(level, draft, tree, logits)
        return [draft.chain for draft in drafts]

    def _start(self, level: int, sequence: Sequence, length: int) -> _Draft:
        model = self._models[level]
        sampled = self.target.reads_draws and not sequence.params.greedy
        # Numbers that judge a guess must know nothing of those that made it: each level of each step has its own.
        sampler = sequence.sampler
        key = noise.key(sampler.seed, sampler.choice, sampler.position, level, noise.SHADOW) if sampled else None
        wanted = max(0, min(length, model.options.depth, model.room(sequence)))
        chain = TokenTree(sequence.tokens[-1])
        return _Draft(sequence.shadow(key), chain, wanted, model.options.min_confidence, sampled)

    def _below(self, level: int, drafts: list[_Draft]) -> list[TokenTree]:
        """Guesses for the model of `level`: one fewer than it wants, because it adds a token of its own."""
        shadows = [draft.shadow for draft in drafts]
        if level > 0:
            return self._chains(level - 1, shadows, [draft.missing - 1 for draft in drafts])
        own = self._first_plan
        trees = [TokenTree(shadow.tokens[-1]) for shadow in shadows]
        plans = [replace(own, depth=min(own.depth, draft.missing - 1)) for draft in drafts]
        asking = [i for i, plan in enumerate(plans) if plan.drafts]
        if asking:
            offers = self._first.propose([Wish(shadows[i], plans[i]) for i in asking])
            for i, offer in zip(asking, offers, strict=True):
                cut = offer.cut(plans[i].depth)
                trees[i] = cut if cut.sampled else cut.pruned(own.nodes)
        return trees

    def _extend(self, level: int, draft: _Draft, tree: TokenTree, logits: torch.Tensor) -> None:
        """Check the guesses, write what stands and the model's own token onto the chain, and tell the levels below."""
        shadow, length = draft.shadow, len(draft.shadow.tokens)
        target = TreeDistributions(shadow.sampler, tree, logits)
        verdict = self._judges[draft.sampled](tree, target)
        scouted = {node: target.choose(node) for node in tree.last_scouts()}
        self._write(draft, tree, verdict, target, logits, self._models[level].name)
        self._models[level].keep(shadow, length - 1, verdict.nodes)
        shadow.tokens.extend(verdict.tokens)
        shadow.output_ids.extend(verdict.tokens)
        if level == 0:
            self._first.observe([Outcome(shadow, verdict.tokens, {}, tree, scouted)])
        self._take_back(level, shadow, length + len(verdict.nodes))

    @staticmethod
    def _write(
        draft: _Draft, tree: TokenTree, verdict: Verdict, target: TreeDistributions, logits: torch.Tensor, own: str
    ) -> None:
        parents, origins = [0, *verdict.nodes], [*(tree.origins[node] for node in verdict.nodes), own]
        for parent, token, origin in zip(parents, verdict.tokens, origins, strict=True):
            if draft.sampled:
                draw = Draw(target.probabilities(parent))
                certainty = float(draw.q[token])
            else:
                draw = None
                path = tree.path_tokens(parent)
                certainty = likeliest(draft.shadow.sampler, logits[parent], path, 1)[0][1]
            joint = draft.chain.confidence[draft.tip] * certainty
            draft.chain.add(draft.tip, token, origin=origin, confidence=joint, draw=draw)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _take_back(self, level: int, sequence: Sequence, length: int) -> None:
        """The levels below `level` guessed further than what stands: the first `length` tokens."""
        for below in self._levels[: level + 1]:
            below.rollback(sequence, length)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            sequence = outcome.sequence
            written: tuple[TokenTree, dict[str, int]] | None = sequence.drafting.pop(self.key, None)
            if written is None:
                continue
            chain, lengths = written
            known = len(sequence.tokens) - len(outcome.tokens)
            stands = known + len(chain.walk(outcome.tokens[:-1]))
            for store, length in lengths.items():  # the rows of a chain lie where they belong
                sequence.table.lengths[store] = min(length, stands)

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._take_back(len(self._models), sequence, length)

    def close(self, sequence: Sequence) -> None:
        self._first.close(sequence)
