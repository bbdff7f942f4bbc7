"""A request and its sequences. All state belongs to the sequence, none to models, drafters or the policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.cache import PageTable, SavedPages
from slipstream.sampling import BadWords, Sampler, Spell
from slipstream.types import Completion, Limits, Logprobs, RequestMetrics, SamplingParams, Stats

if TYPE_CHECKING:
    from slipstream.grammar import Constraint
    from slipstream.text import IncrementalDecoder, StopStrings

TARGET = "target"  # name of the target's K/V store
PLAIN = "none"  # name of the drafter that never drafts


@dataclass(frozen=True)
class Request:
    """One prompt with its parameters; `seed` is always set here, drawn if the user gave none."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    bad_words: BadWords | None = None  # the bad words of the parameters, as token ids
    with_text: bool = True  # whether its tokens are decoded to text
    trace: bool = False  # whether its deltas carry the verified trees
    grammar: str | None = None  # the grammar of its structured outputs, as llguidance writes it
    prediction: tuple[int, ...] = ()  # the predicted output of the parameters, as token ids
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # by `time.perf_counter`: it ends with an error if it still runs then


@dataclass(eq=False)  # compared by identity
class Sequence:
    """One choice of one request, from its prompt to its last token."""

    request: Request
    choice: int
    end_ids: frozenset[int]  # tokens that end the sequence (none when EOS is ignored)
    longest: int  # tokens, prompt included, that the context can hold
    decoder: IncrementalDecoder | None = None
    stops: StopStrings | None = None
    spell: Spell | None = None  # for logprobs
    constraint: Constraint | None = None  # its position in its grammar; a given constraint is copied
    tokens: list[int] = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    saved: SavedPages | None = None
    drafting: dict[str, Any] = field(default_factory=dict)  # a drafter's state for this sequence
    drafter: str = PLAIN  # its name in the engine's set
    limits: Limits | None = None  # of the request, within which the policy decides
    needs: tuple[str, ...] = ()  # stores of that drafter in which a page found in the cache must have rows
    dropped: set[str] = field(default_factory=set)  # drafters that failed on it
    base: int | None = None  # of a shadow: the length of the sequence it was made from
    stats: Stats = field(default_factory=Stats)
    text: str = ""
    text_shown: int = 0  # characters that were streamed
    logprobs: list[Logprobs] = field(default_factory=list)
    found: int = 0  # tokens of the prompt that were in the cache when it was started
    prompt_logprobs: list[Logprobs | None] | None = None  # of the first choice, for the part of the prompt that was fed
    finish_reason: str | None = None
    error: Exception | None = None  # the error that ended this sequence
    stop_reason: str | int | None = None
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)  # when tokens were emitted, and how many together

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        request, ends = self.request, sorted(self.end_ids)
        if self.constraint is not None:
            self.constraint = self.constraint.following(self.output_ids)
        self.sampler = Sampler(
            request.params,
            request.seed,
            self.choice,
            request.prompt_ids,
            self.output_ids,
            ends,
            request.bad_words,
            self.constraint,
        )

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def active_drafter(self) -> str:
        """The name of its drafter; PLAIN after that drafter failed on this sequence."""
        return PLAIN if self.drafter in self.dropped else self.drafter

    @property
    def settled(self) -> int:
        """How many tokens are final. In a shadow, a drafter's guesses follow, which may be rejected."""
        return len(self.tokens) if self.base is None else self.base

    def shadow(self, key: int | None) -> Sequence:
        """The same tokens for a drafter to extend with its guesses, over the same pages.

        `key`: a separate seed, if the guesses must be independent of the target's choices; None if they share its
        noise.
        """
        request = self.request if key is None else replace(self.request, seed=key)
        twin = Sequence(request, self.choice, self.end_ids, self.longest, constraint=self.constraint)
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
        """Whether the last token was emitted."""
        return self.finish_reason is not None

    def completion(self) -> Completion:
        """The result for the user."""
        return Completion(
            index=self.choice,
            text=self.text,
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            stats=self.stats,
            seed=self.request.seed,
            metrics=self.metrics,
            cached_tokens=self.found,
        )

    @property
    def metrics(self) -> RequestMetrics:
        """When the request arrived and when its tokens were emitted."""
        first = self.first_token_at
        last = None if first is None else first + self.stats.decode_ms / 1000
        return RequestMetrics(self.arrived, first, last, tuple(self.chunks))


@dataclass(frozen=True)
class Work:
    """The work of one sequence in a step: `pending` tokens to feed; if they reach the root, it also decodes."""

    sequence: Sequence
    pending: list[int]

    @property
    def decodes(self) -> bool:
        """Whether the last pending token is the last token of the sequence, so that its logits choose the next one."""
        return self.sequence.cached + len(self.pending) == len(self.sequence.tokens)
