"""What goes in and what comes out: parameters, requests, plans, outputs, and the counters with their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.errors import OptionError

if TYPE_CHECKING:
    from slipstream.tree import TokenTree

GREEDY_TEMPERATURE = 1e-5  # temperatures below this would overflow the division and are greedy in effect

_NUMBERS = (
    *("n", "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings are vLLM's; everything holds at every node of a tree.

    `max_tokens=None` runs to EOS or to the end of the context. `seed=None` draws a fresh seed for each request;
    the seed that was used is in the output, so that any answer can be had again.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # sees the prompt and the output
    presence_penalty: float = 0.0  # sees the output only
    frequency_penalty: float = 0.0  # sees the output only
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token; 0: the chosen one alone

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check()

    def _check(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise OptionError(f"{name}={value!r} is not a number")

        def need(ok: bool, name: str, range_: str) -> None:
            if not ok:
                raise OptionError(f"{name}={getattr(self, name)!r} is out of range", hint=f"valid: {range_}")

        need(self.n >= 1, "n", "1 or more")
        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 (greedy) or more")
        need(self.top_k >= 0, "top_k", "-1 or 0 (off), or 1 and more")
        need(0 < self.top_p <= 1, "top_p", "above 0, up to 1 (off)")
        need(0 <= self.min_p <= 1, "min_p", "0 (off) to 1")
        need(math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty", "above 0")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "-2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "-2 to 2")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more, or None")
        need(self.min_tokens >= 0, "min_tokens", "0 or more")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        need(self.logprobs is None or 0 <= self.logprobs <= 1000, "logprobs", "0 to 1000, or None")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "an integer of 64 bits, or None")
        need(all(self.stop_strings), "stop", "non-empty strings")
        need(all(b < math.inf for b in self.bias.values()), "logit_bias", "numbers; -inf forbids a token")

    @property
    def greedy(self) -> bool:
        """True where the choice is the largest logit and no noise is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def bias(self) -> Mapping[int, float]:
        """`logit_bias`, always as a mapping."""
        return self.logit_bias or {}

    @property
    def penalised(self) -> bool:
        """True where the logits depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """True where logits are changed before they are compared: by penalties, a bias, or a minimum length."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True)
class Plan:
    """How much one sequence drafts in one step; the policy makes it. Zero depth or nodes is a true bypass."""

    depth: int = 0  # levels below the root
    nodes: int = 0  # drafted nodes, the root not counted
    branch: int = 1  # children per node at most
    min_confidence: float = 0.0  # a path under this joint probability is not drafted further

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked at all."""
        return self.depth > 0 and self.nodes > 0


@dataclass
class Stats:
    """Counters of one request (or, added up, of many).

    A *step* is one target pass that emitted tokens. *drafted* counts tree nodes offered, root and scouts excluded;
    *accepted* those of them on the accepted path; *emitted* the tokens that the user got. Tokens after EOS or a stop
    are neither emitted nor counted as accepted.
    """

    steps: int = 0
    drafting_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    decoded: int = 0  # emitted by steps after the first
    offered_by_depth: list[int] = field(default_factory=list)  # [d]: steps that offered a node at depth d + 1
    accepted_by_depth: list[int] = field(default_factory=list)  # [d]: steps that accepted a node at depth d + 1
    draft_ms: float = 0.0
    verify_ms: float = 0.0  # the target's pass and the check
    other_ms: float = 0.0
    prefill_ms: float = 0.0  # until the first token was there (decode time excludes it)
    decode_ms: float = 0.0
    draft_faults: int = 0
    lossy: bool = False
    origins: list[str | None] = field(default_factory=list)  # per emitted token: the drafter it came from, or None

    @property
    def tokens_per_step(self) -> float:
        """emitted / steps; plain decoding gives 1.0."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps that drafted (vLLM's number)."""
        return 1.0 + self.accepted / self.drafting_steps if self.drafting_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted: meaningful for chains; for trees look at acceptance by depth."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all steps after the first over the time since it: decode speed, time to first token apart."""
        return 1000.0 * self.decoded / self.decode_ms if self.decode_ms > 0 else 0.0

    def add(self, other: Stats) -> None:
        """Add another request's counters to these."""
        for name in ("steps", "drafting_steps", "drafted", "accepted", "emitted", "decoded", "draft_faults"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("draft_ms", "verify_ms", "other_ms", "prefill_ms", "decode_ms"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("offered_by_depth", "accepted_by_depth"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count
        self.lossy = self.lossy or other.lossy
        self.origins = self.origins + other.origins

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return {
            "steps": self.steps,
            "drafting_steps": self.drafting_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "decoded": self.decoded,
            "offered_by_depth": self.offered_by_depth,
            "accepted_by_depth": self.accepted_by_depth,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "other_ms": round(self.other_ms, 3),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "draft_faults": self.draft_faults,
            "lossy": self.lossy,
        }


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted token under the raw distribution (temperature 1), and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass
class Completion:
    """One finished (or, while streaming, unfinished) choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "cancelled", or None while it runs
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    logprobs: list[TokenLogprob] | None
    stats: Stats
    seed: int


@dataclass
class Output:
    """What one prompt gave. The fields of the first choice are at hand directly; `outputs` has all n."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first choice, a final EOS included."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of the first choice, if asked for."""
        return self.outputs[0].logprobs

    @property
    def stats(self) -> Stats:
        """Counters of the first choice."""
        return self.outputs[0].stats


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice, as `LLM.stream` yields it."""

    index: int
    text: str  # new text; held back while it could still become part of a stop string or of a split character
    token_ids: list[int]
    origins: list[str | None]
    finish_reason: str | None = None
    completion: Completion | None = None  # with the last delta of a choice: all of it
    tree: TokenTree | None = None  # what was drafted in this step; `tree.walk(token_ids)` is the accepted path
