"""`foreign_draft`: a draft model with another tokenizer drafts text, which is offered in the target's tokens.

The draft reads the text of the sequence in its own tokens, writes on, always its likeliest token, and what it wrote is
translated back as far as the target's tokens are certain (`translate.py`). There is no q that a verifier could compare
with p, so verifiers that read q are refused; under `match` the draft is as invisible as any.

The draft's tokens are not the target's, and may be many more, so their K/V lie in a cache of the drafter's own. A
proposal keeps of the rows there what the text still begins with, and feeds the rest: nothing has to be observed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache, PageTable
from slipstream.drafters.base import Drafter, DraftOptions, Wish
from slipstream.drafters.translate import Reading, agreeing, make_translator, measure
from slipstream.errors import CacheFull, OptionError
from slipstream.sequence import Sequence
from slipstream.text import IncrementalDecoder
from slipstream.tree import TokenTree

_CHUNK = 512  # tokens of a prompt fed per pass when catching up
_PRIOR = 32  # tokens that the sample text's ratio weighs against the sequence's own
_PRIMER = 16  # tokens that decoding needs of what came before


@dataclass(frozen=True)
class ForeignDraftOptions(DraftOptions):
    """`model`: path, hub id or built-in name of a model with a tokenizer of its own. `depth` counts tokens of the
    target; the draft writes until they are certain, at most twice as many of its own as that should take.
    """

    depth: int = 4
    nodes: int = 4
    branch: int = 1
    model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.branch == 1, "branch", "1: `foreign_draft` offers one chain")
        if not self.model:
            raise OptionError("foreign_draft needs a model", hint="foreign_draft:model=PATH")


@dataclass(eq=False)
class _Kept:
    """What is kept of a sequence: its text as far as it is final, and the draft's tokens whose K/V are in the pages."""

    reading: Reading = field(default_factory=Reading)
    ids: list[int] = field(default_factory=list)
    table: PageTable | None = None


@dataclass(eq=False)
class _Writing:
    """A draft while it is written, behind a reading of the sequence's text."""

    wish: Wish
    kept: _Kept
    table: PageTable
    reading: Reading
    pending: list[int]  # tokens that have to be fed before the next one can be chosen
    enough: int  # tokens that should be as many as the plan wants, and
    most: int  # tokens at which writing ends in any case
    decoder: IncrementalDecoder
    tree: TokenTree
    text: str = ""
    joint: float = 1.0  # probability under the draft of all that was written
    reached: list[int] = field(default_factory=list)  # bytes of text after each token, and
    certainty: list[float] = field(default_factory=list)  # its joint probability

    @property
    def wanted(self) -> int:
        """How many tokens of the target may be offered."""
        return min(self.wish.plan.depth, self.wish.plan.nodes)


class ForeignDraftDrafter(Drafter[ForeignDraftOptions]):
    """Draft with a model of another vocabulary."""

    name = "foreign_draft"
    summary = "a smaller model of another vocabulary, as a chain; its text is translated into the target's tokens"
    helps = "any text, if the family of the target has no small member; one that shares the vocabulary is better"
    cost = "a pass of the draft per token of its own, one word more than is offered; its weights and K/V in memory"
    needs = "a model with another tokenizer, and the verifier `match`"
    options_type = ForeignDraftOptions
    translates = True  # `check` asks what the translation costs instead of refusing the vocabulary

    def attach(self, cache: PagedCache) -> None:
        from slipstream.models.load import load_model

        if self.target.reads_draws:
            raise OptionError(
                "foreign_draft cannot serve a verifier that reads q: probabilities over another vocabulary cannot be "
                "compared with the target's",
                hint="use the verifier `match`, or draft_model with a draft of the target's vocabulary",
            )
        self._model, tokenizer = load_model(self.options.model, dtype=self.target.dtype, device=self.target.device)
        self._translator = make_translator(self._model.name, tokenizer, self.target.tokenizer)
        self._ratio = measure(self._translator).ratio
        self._tokenizer = self._translator.draft.tokenizer
        self._endings = self._translate_endings()
        # Room for the text of as many tokens as the target's cache holds.
        self._cache = PagedCache(math.ceil(cache.capacity * max(1.0, self._ratio)), cache.device)
        self._model.add_store(self._cache, self.key)
        self._open: dict[_Kept, None] = {}  # those with pages, the least recently used first

    def _translate_endings(self) -> dict[int, int | None]:
        """For each token that ends the draft's text: the target's token that says so, its namesake if there is one."""
        target = self._translator.target.tokenizer
        first = next(iter(target.eos_ids), None)
        namesakes = {target.token(id): id for id in target.eos_ids}
        return {id: namesakes.get(self._tokenizer.token(id), first) for id in self._tokenizer.eos_ids}

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        busy = {wish.sequence.drafting.setdefault(self.key, _Kept()) for wish in wishes}
        begun = [self._begin(wish, busy) for wish in wishes]
        writing = [draft for draft in begun if draft is not None]
        while writing:
            rows = self._feed(writing)
            writing = [draft for draft, row in zip(writing, rows, strict=True) if self._write(draft, row)]
        return [
            TokenTree(wish.sequence.tokens[-1]) if draft is None else draft.tree
            for wish, draft in zip(wishes, begun, strict=True)
        ]

    def _begin(self, wish: Wish, busy: set[_Kept]) -> _Writing | None:
        """What has to be fed for this sequence; None where nothing can be drafted in this step."""
        sequence = wish.sequence
        kept: _Kept = sequence.drafting[self.key]
        certain = len(kept.reading.fixed)
        read = self._read(kept, sequence)
        if read is None:
            return None
        reading, ids = read
        ratio = (len(ids) + _PRIOR * self._ratio) / (len(sequence.tokens) + _PRIOR)
        enough = math.ceil(ratio * wish.plan.depth)
        most = min(2 * enough + 2, self._model.config.context - len(ids))
        if not ids or most < 1 or max(ids[certain:], default=0) >= self._model.config.vocab_size:
            return None
        table = self._pages(kept, ids, len(ids) + most, busy)
        if table is None:
            return None
        # The last token is fed again, also where it is known, for the logits behind it.
        start = min(certain, len(kept.ids))
        same = min(start + agreeing(kept.ids[start:], ids[start:]), len(ids) - 1)
        self._cache.truncate(table, self.key, same)
        del kept.ids[same:]
        self._cache.share(table, self.key, kept.reading.fixed)  # other sequences may begin with the same text
        primer = ids[max(len(ids) - _PRIMER, len(self._translator.draft.opening)) :]
        decoder = IncrementalDecoder(self._tokenizer, primer, skip_special=False)
        tree = TokenTree(sequence.tokens[-1])
        return _Writing(wish, kept, table, reading, ids[same:], enough, most, decoder, tree)

    def _read(self, kept: _Kept, sequence: Sequence) -> tuple[Reading, list[int]] | None:
        """The sequence's text in the draft's tokens. Guesses that another drafter may take back are not kept as read."""
        tokens, settled = sequence.tokens, sequence.settled
        final = self._translator.read(kept.reading, tokens[:settled])
        if final is not None:
            kept.reading = final[0]
        return final if settled == len(tokens) else self._translator.read(kept.reading, tokens)

    def _pages(self, kept: _Kept, ids: list[int], rows: int, busy: set[_Kept]) -> PageTable | None:
        """Pages for so many rows; sequences that do not draft in this step make room. None if there is too little."""
        if rows > self._cache.capacity * PAGE_SIZE:
            self._forget(kept)
            return None
        if kept.table is None:
            kept.table = self._cache.open(ids)
            kept.ids = ids[: kept.table.lengths[self.key]]
        self._open.pop(kept, None)
        self._open[kept] = None
        while True:
            try:
                self._cache.reserve(kept.table, rows)
                return kept.table
            except CacheFull:
                idle = next((other for other in self._open if other not in busy), None)
                self._forget(idle or kept)  # what one alone cannot use, the others can
                if idle is None:
                    return None

    def _forget(self, kept: _Kept) -> None:
        """Give the pages back; the text will be fed anew when there is room."""
        if kept.table is not None:
            self._cache.release(kept.table)
            self._open.pop(kept, None)
            kept.table, kept.ids = None, []

    def _feed(self, writing: list[_Writing]) -> list[torch.Tensor]:
        """Feed what is pending, a chunk of each in every pass; the logits [vocab] behind the last token of each."""
        waiting, rows = writing, dict[_Writing, torch.Tensor]()
        while waiting:
            segments = []
            for draft in waiting:
                chunk = draft.pending[:_CHUNK]
                last = TokenTree(chunk[-1]) if len(chunk) == len(draft.pending) else None
                segments.append(tree_segment(draft.table, len(draft.kept.ids), chunk, last))
            logits = iter(self._model.forward(self._cache, self.key, segments).logits)
            for draft, segment in zip(waiting, segments, strict=True):
                draft.kept.ids += segment.tokens
                draft.table.lengths[self.key] = len(draft.kept.ids)
                draft.pending = draft.pending[segment.rows :]
                if not draft.pending:
                    rows[draft] = next(logits)
            waiting = [draft for draft in waiting if draft.pending]
        return [rows[draft] for draft in writing]

    # -- writing and translating --------------------------------------------------------------------------------------

    def _write(self, draft: _Writing, row: torch.Tensor) -> bool:
        """Add the likeliest token; whether to go on."""
        row = row[: len(self._tokenizer)].float()  # more rows than tokens are padding
        token = int(row.argmax())
        draft.joint *= float(torch.softmax(row, dim=0)[token])
        if draft.joint < draft.wish.plan.min_confidence or token in self._endings:
            self._translate(draft, token)
            return False
        draft.text += draft.decoder.push([token])
        draft.reached.append(len(draft.text.encode()))
        draft.certainty.append(draft.joint)
        draft.pending = [token]
        if len(draft.reached) < draft.enough:
            return True
        self._translate(draft)
        return len(draft.tree) <= draft.wanted and len(draft.reached) < draft.most

    def _translate(self, draft: _Writing, last: int | None = None) -> None:
        """Offer the text in the target's tokens, and the end of the text if `last` is one."""
        ended = last in self._endings and draft.joint >= draft.wish.plan.min_confidence
        spelled = self._translator.offer(draft.reading, draft.text, ended)
        draft.tree = TokenTree(draft.tree.tokens[0])
        guesses = [
            (token, draft.certainty[bisect_left(draft.reached, end)])
            for token, end in zip(spelled.ids, spelled.ends, strict=True)
        ]
        whole = [0, *spelled.ends][-1] == len(draft.text.encode())
        if ended and whole and (ending := self._endings[last]) is not None:
            guesses.append((ending, draft.joint))
        node = 0
        for token, confidence in guesses[: draft.wanted]:
            node = draft.tree.add(node, token, origin=self.name, confidence=confidence)

    def close(self, sequence: Sequence) -> None:
        kept = sequence.drafting.pop(self.key, None)
        if kept is not None:
            self._forget(kept)
