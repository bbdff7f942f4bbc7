"""`cascade`: each level verifies the one below before the target sees the draft.

Written `cascade:suffix+draft_model:model=PATH`. The first level is any drafter. Every level above it is a model that
writes the same chain that it would write alone, in fewer passes: the level below guesses, the model verifies the
guesses in one pass and adds a token of its own, until the chain is long enough. A cascade changes the cost of a draft,
not its content: under `match` the chosen tokens are those of the last model, and under a verifier that reads q the
tokens are distributed by the last model's q, because the levels verify each other by rejection sampling. A chain ends
after a token, or at a length fixed before any token was seen; a sampled token is never dropped because of its value.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream import noise
from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.drafters.growing.likeliest import likeliest_children
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
    one before it. Each keeps its own options: `depth` of the last level is the length of the draft.
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
                    "a level above the first drafts a chain of `depth` tokens",
                    hint="leave out branch, nodes and draw there",
                )

    @property
    def plan(self) -> Plan:
        """A chain as long as the last model's."""
        length = self.levels[-1].checked().depth
        return Plan(length, length)


@dataclass
class _Draft:
    """A chain that a level is writing. `shadow`: the sequence followed by the chain."""

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
        """Tokens still to be written."""
        return 0 if self.chain.confidence[self.tip] < self.least else self.length - self.tip


class CascadeDrafter(Drafter[CascadeOptions]):
    """Draft with a model that is itself accelerated by a drafter."""

    name = "cascade"
    summary = "three or more models: each level verifies the one below before the target sees the draft"
    helps = (
        "a good but slow draft model, on text that a cheaper drafter often predicts; otherwise two levels are faster"
    )
    cost = "one pass of a level's model per accepted run of guesses, on every level"
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
                f"{self._first.name} reads hidden states of the target, and a level's guesses have none",
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

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        sequences = [request.sequence for request in requests]
        lengths = [min(request.plan.depth, request.plan.nodes) for request in requests]
        try:
            chains = self._chains(len(self._models) - 1, sequences, lengths)
        except Exception:
            for sequence in sequences:
                self.rollback(sequence, len(sequence.tokens))
            raise
        for sequence, chain in zip(sequences, chains, strict=True):
            # The guesses' rows stay in place but do not count as the sequence's until it is known which are accepted.
            stores = {level.key for level in self._levels} & sequence.table.lengths.keys()
            written = {store: sequence.table.lengths[store] for store in stores}
            self._take_back(len(self._models), sequence, len(sequence.tokens))
            sequence.drafting[self.key] = chain, written
        return chains

    def _chains(self, level: int, sequences: Seq[Sequence], lengths: Seq[int]) -> list[TokenTree]:
        """The chains that the model of a level writes, by rounds of guessing below and verifying here."""
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
        # The noise that verifies a guess must be independent of the noise that drew it: each level and step has its
        # own.
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
        plans = [replace(own, depth=min(own.depth, draft.missing - 1)) for draft in drafts]
        requests = [DraftRequest(shadow, plan) for shadow, plan in zip(shadows, plans, strict=True) if plan.drafts]
        offers = self._first.propose(requests) if requests else []
        pairs = zip(requests, offers, strict=True)
        trees = {request.sequence: offer.limited(request.plan.depth, own.nodes) for request, offer in pairs}
        return [trees.get(shadow) or TokenTree(shadow.tokens[-1]) for shadow in shadows]

    def _extend(self, level: int, draft: _Draft, tree: TokenTree, logits: torch.Tensor) -> None:
        """Verify the guesses, append the accepted ones and the model's own token, and update the levels below."""
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
                rows, paths = logits[parent : parent + 1], [tree.path_tokens(parent)]
                (((_, certainty),),) = likeliest_children(draft.shadow.sampler, rows, paths, 1)
            joint = draft.chain.confidence[draft.tip] * certainty
            draft.chain.add(draft.tip, token, origin=origin, confidence=joint, draw=draw)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _take_back(self, level: int, sequence: Sequence, length: int) -> None:
        """Roll the levels below `level` back to the first `length` tokens."""
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
            accepted = known + len(chain.walk(outcome.tokens[:-1]))
            for store, length in lengths.items():  # the rows of a chain are already in place
                sequence.table.lengths[store] = min(length, accepted)

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._take_back(len(self._models), sequence, length)

    def close(self, sequence: Sequence) -> None:
        self._first.close(sequence)
