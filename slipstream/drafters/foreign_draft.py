"""`foreign_draft`: a draft model with another tokenizer writes text, which is offered in the target's tokens.

The draft model reads the sequence's text in its own tokens and continues it. Its text is translated back as far as the
target's tokens are certain (`translate.py`). There is no q that a verifier could compare with p, so verifiers that read
q are refused; under `match` the output is the same as with any drafter.

The draft's tokens may be many more than the target's, so their KV cache has its own pages (`separate_cache.py`). A
proposal keeps the rows of the longest common prefix and feeds the rest: it does not need `observe`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch

from slipstream.cache import PagedCache
from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest
from slipstream.drafters.foreign.separate_cache import Held, SeparateCache
from slipstream.drafters.foreign.translate import PRIMER, Reading, Spelled, make_translator, measure
from slipstream.drafters.growing.likeliest import likeliest_children
from slipstream.errors import OptionError
from slipstream.models.model import Model
from slipstream.sequence import Sequence
from slipstream.text import IncrementalDecoder, Tokenizer
from slipstream.tree import TokenTree

_PRIOR = 32  # weight in tokens of the sample text's ratio against the sequence's own


@dataclass(frozen=True)
class ForeignDraftOptions(DraftOptions):
    """`model`: path, hub id or built-in name of a model with another tokenizer. `depth` counts tokens of the target;
    the draft writes until they are certain, but at most twice as many of its own tokens as that should take.
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


@dataclass
class _Kept:
    """State of a sequence between steps."""

    reading: Reading = field(default_factory=Reading)  # the final tokens
    held: Held = field(default_factory=Held)


@dataclass
class _Draft:
    """A draft while it is written, after a reading of the sequence's text."""

    request: DraftRequest
    reading: Reading
    held: Held
    pending: list[int]  # tokens to feed before the next one can be chosen
    wanted: int  # target tokens that may be offered
    enough: int  # draft tokens that should give as many
    most: int  # upper limit of draft tokens
    decoder: IncrementalDecoder
    text: str = ""
    half: list[int] = field(default_factory=list)  # last tokens, not yet a whole character
    reached: list[int] = field(default_factory=lambda: [0])  # bytes of text at the start and after each token
    joints: list[float] = field(default_factory=lambda: [1.0])  # joint probability up to each token
    ended: bool = False
    ending: int | None = None  # the target's end-of-text token
    spelled: Spelled | None = None  # the text in the target's tokens, once computed

    @property
    def count(self) -> int:
        """Number of tokens written."""
        return len(self.reached) - 1


class _Twins:
    """Tokens that both vocabularies have: `theirs[d]` is the target's id of draft token d, `ours` the inverse."""

    def __init__(self, twins: Mapping[int, int], rows: int, target_rows: int, device: str) -> None:
        self.theirs = {ours: theirs for ours, theirs in twins.items() if ours < rows and theirs < target_rows}
        self.ours = {theirs: ours for ours, theirs in self.theirs.items()}
        self._from = torch.tensor(list(self.theirs), dtype=torch.int64, device=device)
        self._to = torch.tensor(list(self.theirs.values()), dtype=torch.int64, device=device)
        self._size = target_rows

    def carried(self, row: torch.Tensor) -> torch.Tensor:
        """The draft's logits at the target's ids, [target's vocab]; -inf where the draft has no such token."""
        carried = row.new_full((self._size,), float("-inf"))
        carried[self._to] = row[self._from]
        return carried


class ForeignDraftDrafter(Drafter[ForeignDraftOptions]):
    """Draft with a model of another vocabulary."""

    name = "foreign_draft"
    summary = "a smaller model with another vocabulary; its text is translated into a chain of the target's tokens"
    helps = "any text, if the target's family has no small model; a draft with the target's vocabulary is better"
    cost = "one pass of the draft model per token of its own, about a word more than offered; its weights and KV cache"
    needs = "a model with another tokenizer, and a verifier that does not read q"
    options_type = ForeignDraftOptions
    translates = True

    @cached_property
    def _loaded(self) -> tuple[Model, Tokenizer | None]:
        from slipstream.models.load import load_model

        return load_model(self.options.model, dtype=self.target.dtype, device=self.target.device)

    def attach(self, cache: PagedCache) -> None:
        if self.target.reads_draws:
            raise OptionError(
                "foreign_draft cannot serve a verifier that reads q: a probability over another vocabulary cannot be "
                "compared with the target's",
                hint="use the verifier `match`, or draft_model with a draft of the target's vocabulary",
            )
        model, tokenizer = self._loaded
        self._translator = make_translator(model.name, tokenizer, self.target.tokenizer)
        crossing = measure(self._translator)
        self._ratio = crossing.ratio
        self._context = model.config.context
        self._tokenizer = self._translator.draft.tokenizer
        self._rowless = frozenset(
            range(model.config.vocab_size, len(self._tokenizer))
        )  # tokens beyond the model's vocabulary
        self._endings = self._translator.endings()
        twins = self._translator.twins() if crossing.aligned else {}
        rows = min(len(self._tokenizer), model.config.vocab_size)
        self._twins = _Twins(twins, rows, self.target.config.vocab_size, self.target.device)
        # Room for the text of all tokens that the target's cache holds.
        self._store = SeparateCache(model, self.key, math.ceil(cache.capacity * max(1.0, self._ratio)))
        self.separate_bytes = self._store.bytes

    # -- proposing ----------------------------------------------------------------------------------------------------

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        at_work: list[Held] = [request.sequence.drafting.setdefault(self.key, _Kept()).held for request in requests]
        drafts = [self._begin(request, at_work) for request in requests]
        writing = [draft for draft in drafts if draft is not None]
        while writing:
            rows = self._store.feed([(draft.held, draft.pending) for draft in writing])
            writing = [draft for draft, row in zip(writing, rows, strict=True) if self._write(draft, row)]
        return [
            TokenTree(request.sequence.tokens[-1]) if draft is None else self._tree(draft)
            for request, draft in zip(requests, drafts, strict=True)
        ]

    def _begin(self, request: DraftRequest, at_work: list[Held]) -> _Draft | None:
        """What has to be fed for this sequence; None if nothing can be drafted in this step."""
        sequence = request.sequence
        kept: _Kept = sequence.drafting[self.key]
        same = len(kept.reading.fixed)
        read = self._read(kept, sequence)
        if read is None:
            return None
        reading, ids = read
        ratio = (len(ids) + _PRIOR * self._ratio) / (len(sequence.tokens) + _PRIOR)
        wanted = min(request.plan.depth, request.plan.nodes)
        enough = math.ceil(ratio * wanted)
        most = min(2 * enough + 2, self._context - len(ids))
        if not ids or most < 1 or (self._rowless and not self._rowless.isdisjoint(ids)):
            self._store.release(kept.held)
            return None
        if not self._store.hold(kept.held, ids, same, most, at_work):
            return None
        self._store.share(kept.held, kept.reading.fixed)
        primer = ids[max(len(ids) - PRIMER, len(self._translator.draft.opening)) :]
        decoder = IncrementalDecoder(self._tokenizer, primer, skip_special=False)
        pending = ids[len(kept.held.ids) :]
        return _Draft(request, reading, kept.held, pending, wanted, enough, most, decoder)

    def _read(self, kept: _Kept, sequence: Sequence) -> tuple[Reading, list[int]] | None:
        """The sequence's text in the draft's tokens. Guesses, which may be taken back, are not kept as read."""
        tokens, settled = sequence.tokens, sequence.settled
        final = self._translator.read(kept.reading, tokens[:settled])
        if final is not None:
            kept.reading = final[0]
        return final if settled == len(tokens) else self._translator.read(kept.reading, tokens)

    # -- writing and translating --------------------------------------------------------------------------------------

    def _write(self, draft: _Draft, row: torch.Tensor) -> bool:
        """Add a token, given the logits [vocab] after the last one; returns whether to continue."""
        token, probability = self._choose(draft, row)
        joint = draft.joints[-1] * probability
        if joint < draft.request.plan.min_confidence:
            return False
        if token in self._endings:
            draft.ended, draft.ending = True, self._endings[token]
        else:
            more = draft.decoder.push([token])
            draft.half = [] if more else [*draft.half, token]
            draft.text += more
            draft.pending, draft.spelled = [token], None
        draft.reached.append(len(draft.text.encode()))
        draft.joints.append(joint)
        if draft.ended or draft.count < draft.enough:
            return not draft.ended
        spelled = self._spell(draft)
        return spelled.whole and spelled.settled < draft.wanted and draft.count < draft.most

    def _choose(self, draft: _Draft, row: torch.Tensor) -> tuple[int, float]:
        """The next token and its probability: the draft's likeliest.

        If the target has the same token, the request's parameters apply as they do to the target, and so does the noise
        that the target will use, so that both choose alike as often as possible.
        """
        row = row[: len(self._tokenizer)].float()  # extra rows are padding
        token = int(row.argmax())
        sampler, params = draft.request.sequence.sampler.free, draft.request.sequence.params
        plain = params.greedy and not params.adjusts
        theirs = self._twins.theirs
        if not plain and theirs.keys() >= {token, *draft.half} and (spelled := self._spell(draft)).whole:
            path = spelled.ids + [theirs[half] for half in draft.half]
            (((chosen, probability),),) = likeliest_children(sampler, self._twins.carried(row)[None], [path], 1)
            return self._twins.ours[chosen], probability
        return token, float(torch.softmax(row, dim=0)[token])

    def _spell(self, draft: _Draft) -> Spelled:
        if draft.spelled is None:
            draft.spelled = self._translator.back(draft.reading, draft.text)
        return draft.spelled

    def _tree(self, draft: _Draft) -> TokenTree:
        """The certain part of the text, and its end, in the target's tokens."""
        spelled = self._spell(draft)
        ended = draft.ended and spelled.whole  # nothing follows, so all of it is certain
        # A guess has the probability of the first draft token that reaches as far.
        joints = [draft.joints[bisect_left(draft.reached, end)] for end in spelled.ends if end <= draft.reached[-1]]
        guesses = list(zip(spelled.ids, joints, strict=False))[: None if ended else spelled.settled]
        if ended and draft.ending is not None:
            guesses.append((draft.ending, draft.joints[-1]))
        tree = TokenTree(draft.request.sequence.tokens[-1])
        node = 0
        for token, joint in guesses[: draft.wanted]:
            if token >= self.target.config.vocab_size:  # in the tokenizer, but not in the model
                break
            node = tree.add(node, token, origin=self.name, confidence=joint)
        return tree

    def close(self, sequence: Sequence) -> None:
        kept = sequence.drafting.pop(self.key, None)
        if kept is not None:
            self._store.release(kept.held)
