"""`draft_model`: a smaller model of the same vocabulary drafts a chain or a tree.

Its K/V lie in a store of their own under the target's page table. `propose` first feeds it the tokens it has not seen
(one pass for all sequences), then grows the trees level by level (one pass a level). `observe` keeps the rows of the
accepted path and forgets the others, so the store is in step whatever was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from slipstream.attention import Segment, tree_segment
from slipstream.cache import LayerStore, PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.device_draft import DeviceDraft
from slipstream.drafters.levels import CHUNK, GrowingDrafter, Growth, GrowthOptions
from slipstream.drafters.model_loop import ModelLoop
from slipstream.drafters.tree_loop import TreeDraft
from slipstream.drafters.vocabulary import compare_vocabularies
from slipstream.errors import OptionError
from slipstream.models.decoder import Decoder
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class DraftModelOptions(GrowthOptions):
    """`model`: path, hub id or built-in name. `nodes`: 0 for as many as a chain has levels, or four per level of a
    tree. `draw`: `top` (chosen nodes) or `sample` (sampled ones, for verifiers that read q); `auto` samples where the
    verifier reads q and the request does.
    """

    model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise OptionError("draft_model needs a model", hint="draft_model:model=PATH")


class DraftModelDrafter(GrowingDrafter[DraftModelOptions]):
    """Draft with another model."""

    name = "draft_model"
    summary = "a smaller model of the same vocabulary, as a chain or a tree"
    helps = "any text, if the draft is 10x cheaper than the target and trained on similar data; not on small targets"
    cost = "one pass of the draft model per level; its weights and its K/V in memory"
    needs = "a model of the target's vocabulary"
    options_type = DraftModelOptions

    def attach(self, cache: PagedCache) -> None:
        from slipstream.models.load import load_model

        model, tokenizer = load_model(self.options.model, dtype=self.target.dtype, device=self.target.device)
        compare_vocabularies(
            tokenizer, model.config.vocab_size, self.target.tokenizer, self.target.config.vocab_size
        ).require_same(model.name)
        self._model = model
        self._cache = cache
        self._model.add_store(cache, self.key)

    def room(self, sequence: Sequence) -> int:
        return self._model.config.context - len(sequence.tokens)  # may be over before the target's

    def _catch_up(self, growths: list[Growth]) -> list[torch.Tensor | None]:
        ready = [g for g in growths if g.plan.drafts]
        rows = self.judge([g.sequence for g in ready], [g.tree for g in ready])
        for growth in ready:
            growth.fed = 1
        found = dict(zip(map(id, ready), rows, strict=True))
        return [found.get(id(g)) for g in growths]

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._logits([growth.segment() for growth in growths])

    def judge(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> list[torch.Tensor]:
        """Feed every token that the model has not seen, and the trees behind them; logits [nodes, vocab] of each."""
        waiting = list(zip(sequences, trees, strict=True))
        rows: dict[Sequence, torch.Tensor] = {}
        while waiting:
            segments = [self._segment(sequence, tree) for sequence, tree in waiting]
            parts = self._logits(segments).split([s.rows - s.logits_from for s in segments])
            for (sequence, _), segment, logits in zip(waiting, segments, parts, strict=True):
                known = min(segment.committed + segment.rows, len(sequence.tokens))
                segment.table.lengths[self.key] = known
                if len(logits):
                    rows[sequence] = logits
            waiting = [(sequence, tree) for sequence, tree in waiting if sequence not in rows]
        return [rows[sequence] for sequence in sequences]

    def _segment(self, sequence: Sequence, tree: TokenTree) -> Segment:
        """The next unseen tokens, and the tree if these are the last of them."""
        # The root is fed again where a proposal is made anew, because the first one broke behind this point.
        seen = min(sequence.table.lengths[self.key], len(sequence.tokens) - 1)
        chunk = sequence.tokens[seen : seen + CHUNK]
        last = seen + len(chunk) == len(sequence.tokens)
        return tree_segment(sequence.table, seen, chunk, tree if last else None)

    def _logits(self, segments: list[Segment]) -> torch.Tensor:
        """A draft pass. Padded vocabularies are cut or filled up to the target's size."""
        logits = self._model.forward(self._cache, self.key, segments).logits
        missing = self.target.config.vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        model, plan = self._model, self.plan
        can = isinstance(model, Decoder) and model.captures and model.config.context >= self.target.longest
        if not can or not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None  # a tree of one shape has no room for nodes that are not worth it
        return TreeDraft(self, plan, ModelLoop)

    @property
    def decoder(self) -> Decoder:
        """The draft model, where it is one of ours."""
        assert isinstance(self._model, Decoder)
        return self._model

    @property
    def layers(self) -> list[LayerStore]:
        """Its K/V."""
        return self._cache.layers(self.key)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            growth: Growth | None = outcome.sequence.drafting.pop(self.key, None)
            if growth is None or growth.fed == 0:
                continue
            self.keep(outcome.sequence, growth.root_slot, growth.kept(outcome.tokens))

    def keep(self, sequence: Sequence, root_slot: int, nodes: list[int]) -> None:
        """Of the rows behind the root, those of a path become the next rows of the store; the rest is forgotten."""
        self._cache.commit(sequence.table, self.key, root_slot + 1, [root_slot + node for node in nodes])

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._cache.truncate(sequence.table, self.key, length)
