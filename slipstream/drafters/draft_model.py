"""`draft_model`: a smaller model of the same vocabulary drafts a chain or a tree.

Its K/V lie in a store of their own under the target's page table. `propose` first feeds it the tokens it has not seen
(one pass for all sequences), then grows the trees level by level (one pass a level). `observe` keeps the rows of the
accepted path and forgets the others, so the store is in step whatever was accepted.

Nodes are *chosen* by joint probability (when sampling: by log q plus the noise that the target will read, so that
draft and target coincide as often as possible), or *sampled* from q without replacement for verifiers that read q.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from slipstream import noise
from slipstream.attention import Segment, tree_segment
from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, Outcome, Wish
from slipstream.drafters.vocabulary import compare_vocabularies
from slipstream.errors import OptionError
from slipstream.sequence import Sequence
from slipstream.tree import Draw, TokenTree
from slipstream.types import Plan

_CHUNK = 512  # tokens of a prompt fed per pass when catching up


@dataclass(frozen=True)
class DraftModelOptions(DraftOptions):
    """`model`: path, hub id or built-in name. `draw`: `top` (chosen nodes) or `sample` (sampled ones, for `rejection`);
    `auto` samples where the verifier reads q and the request samples.
    """

    depth: int = 4
    nodes: int = 4
    branch: int = 1
    model: str = ""
    draw: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise OptionError("draft_model needs a model", hint="draft_model:model=PATH")
        self.require(self.draw in ("auto", "top", "sample"), "draw", "auto, top, sample")


@dataclass
class _Growth:
    """A tree while it grows. `tree` holds the nodes that were (or will be) fed to the draft model, in slot order."""

    sequence: Sequence
    plan: Plan
    tree: TokenTree
    root_slot: int
    sampled: bool
    fed: int = 0  # nodes whose K/V are in the store
    leaves: list[tuple[float, int, int]] = field(default_factory=list)  # (joint, parent, token): offered, never fed

    def segment(self) -> Segment:
        """The nodes that have not been fed yet."""
        return tree_segment(
            self.sequence.table, self.root_slot, [self.tree.tokens[0]], self.tree, first_node=self.fed
        )


class DraftModelDrafter(Drafter[DraftModelOptions]):
    """Draft with another model."""

    name = "draft_model"
    summary = "a smaller model of the same vocabulary, as a chain or a tree"
    helps = "any text, if the draft is 10x cheaper than the target and trained on similar data; not on small targets"
    options_type = DraftModelOptions

    def attach(self, cache: PagedCache) -> None:
        from slipstream.models.load import load_model

        model, tokenizer = load_model(self.options.model, dtype=self.target.dtype, device=self.target.device)
        compare_vocabularies(
            tokenizer, model.config.vocab_size, self.target.tokenizer, self.target.config.vocab_size
        ).require_same(model.name)
        self._model = model
        self._cache = cache
        self._model.add_store(cache, self.name)

    def scratch_rows(self, plan: Plan) -> int:
        return 1 + self._width(plan) * plan.depth if plan.drafts else 0

    @staticmethod
    def _width(plan: Plan) -> int:
        """Nodes fed per level: one for a chain, enough for the node budget to reach the last level in a tree."""
        return 1 if plan.branch == 1 else max(plan.branch, plan.nodes // max(1, plan.depth))

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        growths = [self._start(wish) for wish in wishes]
        rows = self._catch_up(growths)
        deepest = max(growth.plan.depth for growth in growths)
        for level in range(1, deepest + 1):
            growing = [(g, r) for g, r in zip(growths, rows, strict=True) if r is not None]
            if not growing:
                break
            for growth, logits in growing:
                self._add_level(growth, logits, level)
            rows = self._feed(growths, level)
        return [self._offer(growth) for growth in growths]

    def _start(self, wish: Wish) -> _Growth:
        sequence = wish.sequence
        root_slot = len(sequence.tokens) - 1
        # The draft's context may be over before the target's.
        room = max(0, self._model.config.context - len(sequence.tokens))
        plan = replace(wish.plan, depth=min(wish.plan.depth, room))
        growth = _Growth(sequence, plan, TokenTree(sequence.tokens[-1]), root_slot, self._samples(sequence))
        sequence.drafting[self.name] = growth
        return growth

    def _samples(self, sequence: Sequence) -> bool:
        if self.options.draw == "auto":
            return self.target.reads_draws and not sequence.params.greedy
        return self.options.draw == "sample"

    def _catch_up(self, growths: list[_Growth]) -> list[torch.Tensor | None]:
        """Feed every token that the draft has not seen; the logits after each root, [1, vocab]."""
        waiting = [g for g in growths if g.plan.drafts]
        rows: dict[int, torch.Tensor] = {}
        while waiting:
            segments, ready = [], []
            for growth in waiting:
                table, tokens = growth.sequence.table, growth.sequence.tokens
                seen = table.lengths[self.name]
                chunk = tokens[seen : seen + _CHUNK]
                whole = seen + len(chunk) == len(tokens)
                segments.append(tree_segment(table, seen, chunk, growth.tree if whole else None, last_node=1))
                if whole:
                    ready.append(growth)
            logits = self._logits(segments)
            for segment in segments:
                segment.table.lengths[self.name] = segment.committed + segment.rows
            for index, growth in enumerate(ready):
                growth.fed = 1
                rows[id(growth)] = logits[index : index + 1]
            waiting = [g for g in waiting if g.fed == 0]
        return [rows.get(id(g)) for g in growths]

    def _logits(self, segments: list[Segment]) -> torch.Tensor:
        """A draft pass. Padded vocabularies are cut or filled up to the target's size."""
        logits = self._model.forward(self._cache, self.name, segments).logits
        missing = self.target.config.vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _add_level(self, growth: _Growth, logits: torch.Tensor, level: int) -> None:
        """Children of the nodes that were fed last; `logits` are theirs, in order."""
        first = growth.fed - len(logits)
        parents = range(first, growth.fed)
        if growth.sampled:
            self._draw_level(growth, logits, parents)
        else:
            self._choose_level(growth, logits, parents, last=level == growth.plan.depth)

    def _choose_level(self, growth: _Growth, logits: torch.Tensor, parents: range, last: bool) -> None:
        plan, tree = growth.plan, growth.tree
        candidates: list[tuple[float, int, int]] = []
        for parent, row in zip(parents, logits, strict=True):
            for token, probability in self._best(growth, parent, row):
                joint = tree.confidence[parent] * probability
                if joint >= plan.min_confidence:
                    candidates.append((joint, parent, token))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        width = 0 if last else self._width(plan)
        for joint, parent, token in sorted(candidates[:width], key=lambda c: c[1]):
            tree.add(parent, token, origin=self.name, confidence=joint)
        growth.leaves.extend(candidates[width:])

    def _best(self, growth: _Growth, parent: int, row: torch.Tensor) -> list[tuple[int, float]]:
        """The likeliest tokens after `parent`, with the probability that the target takes them."""
        sampler = growth.sequence.sampler
        path = growth.tree.path_tokens(parent)
        if sampler.params.greedy:
            ids, scores = None, sampler.adjusted(row, path).float()
        else:
            support = sampler.support(row, path)
            ids, scores = support.ids, sampler.perturbed(support, path)
        probabilities = torch.softmax(scores, dim=0)
        top = torch.topk(probabilities, min(growth.plan.branch, len(probabilities)))
        chosen = top.indices if ids is None else ids[top.indices]
        return [(int(t), float(p)) for t, p in zip(chosen.tolist(), top.values.tolist(), strict=True)]

    def _draw_level(self, growth: _Growth, logits: torch.Tensor, parents: range) -> None:
        """Draw siblings without replacement. What is cut is cut by counts and by the parent, never by the token."""
        plan, tree, sampler = growth.plan, growth.tree, growth.sequence.sampler
        for parent, row in zip(parents, logits, strict=True):
            room = plan.nodes - (len(tree) - 1)
            if room <= 0 or tree.confidence[parent] < plan.min_confidence:
                continue
            q = sampler.probabilities(row, tree.path_tokens(parent))
            draw = Draw(q)
            ids = q.nonzero()[:, 0]
            keys = q[ids].log() + noise.gumbel(sampler.step_key(parent, noise.DRAFT), ids)
            order = torch.topk(keys, min(plan.branch, room, len(ids))).indices
            for token in ids[order].tolist():
                joint = tree.confidence[parent] * float(q[token])
                tree.add(parent, token, origin=self.name, confidence=joint, draw=draw)

    def _feed(self, growths: list[_Growth], level: int) -> list[torch.Tensor | None]:
        """Run the nodes that were added by this level and still have a level below them; their logits."""
        feeding = [g for g in growths if g.fed and len(g.tree) > g.fed and level < g.plan.depth]
        if not feeding:
            return [None] * len(growths)
        segments = [g.segment() for g in feeding]
        logits = self._logits(segments)
        parts = dict(zip(map(id, feeding), logits.split([s.rows for s in segments]), strict=True))
        for growth in feeding:
            growth.fed = len(growth.tree)
        return [parts.get(id(g)) for g in growths]

    def _offer(self, growth: _Growth) -> TokenTree:
        if growth.sampled:
            return growth.tree
        offer = TokenTree(growth.tree.tokens[0])
        offer.merge(growth.tree)
        for joint, parent, token in growth.leaves:
            offer.add(parent, token, origin=self.name, confidence=joint)
        return offer.pruned(growth.plan.nodes)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            growth: _Growth | None = outcome.sequence.drafting.pop(self.name, None)
            if growth is None or growth.fed == 0:
                continue
            # The last token is the next root and must be fed again for its logits, even if a node guessed it.
            kept = [node for node in growth.tree.walk(outcome.tokens[:-1]) if node < growth.fed]
            slots = [growth.root_slot + node for node in kept]
            self._cache.commit(outcome.sequence.table, self.name, growth.root_slot + 1, slots)
