"""`draft_model`: a smaller model of the same vocabulary drafts a chain or a tree.

Its KV cache is a store of its own under the target's page table. `propose` first feeds the tokens that the model has
not seen (one pass for all sequences), then grows the trees (one pass per level). `observe` keeps the rows of the
accepted path and drops the others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.attention import Segment
from slipstream.cache import LayerStore, PagedCache
from slipstream.drafters.base import Outcome
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.device.model_loop import ModelLoop
from slipstream.drafters.device.tree_loop import TreeDraft
from slipstream.drafters.foreign.vocabulary import compare_vocabularies
from slipstream.drafters.growing.catch_up import Text, catch_up, wanted
from slipstream.drafters.growing.tree_growth import GrowingDrafter, Growth, GrowthOptions
from slipstream.errors import OptionError
from slipstream.models.decoder import Decoder
from slipstream.models.model import Model
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree


@dataclass(frozen=True)
class DraftModelOptions(GrowthOptions):
    """`model`: path, hub id or built-in name. `nodes`: 0 for one per level in a chain, four per level in a tree.
    `draw`: `top` (chosen nodes) or `sample` (sampled nodes, for verifiers that read q); `auto` samples if the verifier
    reads q and the request samples.
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
    helps = "any text, if the draft model is 10x cheaper than the target and trained on similar data; not small targets"
    cost = "one pass of the draft model per level; memory for its weights and its KV cache"
    needs = "a model of the target's vocabulary"
    options_type = DraftModelOptions

    @cached_property
    def _model(self) -> Model:
        from slipstream.models.load import load_model

        model, tokenizer = load_model(self.options.model, dtype=self.target.dtype, device=self.target.device)
        compare_vocabularies(
            tokenizer, model.config.vocab_size, self.target.tokenizer, self.target.config.vocab_size
        ).require_same(model.name)
        return model

    def attach(self, cache: PagedCache) -> None:
        self._cache = cache
        self._model.add_store(cache, self.key)

    def room(self, sequence: Sequence) -> int:
        return self._model.config.context - len(sequence.tokens)  # may be shorter than the target's

    def _feed_roots(self, growths: list[Growth]) -> list[torch.Tensor]:
        return self.judge([g.sequence for g in growths], [g.tree for g in growths])

    def _run(self, growths: list[Growth]) -> torch.Tensor:
        return self._logits([growth.segment() for growth in growths])

    def judge(self, sequences: Seq[Sequence], trees: Seq[TokenTree]) -> list[torch.Tensor]:
        """Feed every token that the model has not seen, followed by the trees; logits [nodes, vocab] of each."""
        texts = [Text(s.table, s.tokens, tree) for s, tree in zip(sequences, trees, strict=True)]
        return catch_up(self.key, texts, lambda _, pieces: self._logits(pieces).split(wanted(pieces)))

    def _logits(self, segments: list[Segment]) -> torch.Tensor:
        """A draft pass. Padded vocabularies are cut or extended to the target's size."""
        logits = self._model.forward(self._cache, self.key, segments).logits
        missing = self.target.config.vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        model, plan = self._model, self.plan
        can = isinstance(model, Decoder) and model.captures and model.config.context >= self.target.longest
        if not can or not plan.drafts or plan.min_confidence > 0.0 or self.samples:
            return None  # a tree of fixed shape cannot leave out unlikely nodes
        return TreeDraft(self, plan, ModelLoop)

    @property
    def decoder(self) -> Decoder:
        """The draft model as a `Decoder`."""
        assert isinstance(self._model, Decoder)
        return self._model

    @property
    def layers(self) -> list[LayerStore]:
        """The layers of the store with the draft model's K/V."""
        return self._cache.layers(self.key)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            growth: Growth | None = outcome.sequence.drafting.pop(self.key, None)
            if growth is None or growth.fed == 0:
                continue
            self.keep(outcome.sequence, growth.root_slot, growth.kept(outcome.tokens))

    def keep(self, sequence: Sequence, root_slot: int, nodes: list[int]) -> None:
        """Of the rows after the root, keep those of a path as the next rows of the store; drop the rest."""
        self._cache.commit(sequence.table, self.key, root_slot + 1, [root_slot + node for node in nodes])

    def rollback(self, sequence: Sequence, length: int) -> None:
        sequence.drafting.pop(self.key, None)
        self._cache.truncate(sequence.table, self.key, length)
