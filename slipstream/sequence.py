"""A request and its sequences. State belongs to the sequence: models, drafters and the policy hold nothing of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.cache import PageTable, SavedPages
from slipstream.sampling import Sampler
from slipstream.types import Completion, SamplingParams, Stats, TokenLogprob

if TYPE_CHECKING:
    from slipstream.text import IncrementalDecoder, StopStrings

TARGET = "target"  # name of the target's K/V store


@dataclass(frozen=True)
class Request:
    """One prompt with its parameters; `seed` is always set here, drawn if the user gave none."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int


@dataclass(eq=False)  # two sequences are never the same, however alike they look
class Sequence:
    """One choice of one request, from its prompt to its last token."""

    request: Request
    choice: int
    end_ids: frozenset[int]  # tokens that end the answer (none when EOS is ignored)
    longest: int  # tokens, prompt included, that the context can hold
    decoder: IncrementalDecoder | None = None
    stops: StopStrings | None = None
    tokens: list[int] = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    saved: SavedPages | None = None
    drafting: dict[str, Any] = field(default_factory=dict)  # a drafter's state for this sequence
    drafter_dropped: bool = False
    base: int | None = None  # of a shadow: how many tokens the sequence had that it was made from
    stats: Stats = field(default_factory=Stats)
    text: str = ""
    text_shown: int = 0  # characters that a stream has been given
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.sampler = Sampler(
            self.params, self.request.seed, self.choice, self.request.prompt_ids, self.output_ids, sorted(self.end_ids)
        )

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def settled(self) -> int:
        """How many of the tokens are final. Behind them stand guesses that a drafter follows up and may take back."""
        return len(self.tokens) if self.base is None else self.base

    def shadow(self, key: int | None) -> Sequence:
        """The same text for a drafter to write on in guesses of its own, over the same pages.

        `key`: a seed of its own, where the guesses must be independent of the choices that judge them; None where they
        are to read the same noise.
        """
        request = self.request if key is None else replace(self.request, seed=key)
        twin = Sequence(request, self.choice, self.end_ids, self.longest)
        twin.sampler.take_over(self.sampler)
        twin.tokens[:] = self.tokens
        twin.output_ids[:] = self.output_ids
        twin.table, twin.drafting, twin.base = self.table, self.drafting, self.settled
        return twin

    @property
    def cached(self) -> int:
        """Tokens whose K/V are in the target's store."""
        return self.table.lengths.get(TARGET, 0)

    @property
    def remaining(self) -> int:
        """How many more tokens this sequence may emit."""
        room = self.longest - len(self.tokens)
        limit = self.params.max_tokens
        return room if limit is None else min(room, limit - len(self.output_ids))

    @property
    def finished(self) -> bool:
        """Whether the last token is out."""
        return self.finish_reason is not None

    def completion(self) -> Completion:
        """What the user gets of this sequence."""
        return Completion(
            index=self.choice,
            text=self.text,
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            stats=self.stats,
            seed=self.request.seed,
        )
