"""Public types: parameters, requests, plans, outputs, and the counters with their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slipstream.params import GREEDY_TEMPERATURE as GREEDY_TEMPERATURE
from slipstream.params import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from slipstream.tree import TokenTree


_TREES_KEPT = 512  # for a reader of a traced request that falls behind: trees are large


@dataclass(frozen=True)
class Plan:
    """How much one sequence drafts in one step; made by the policy. Zero depth or nodes skips drafting."""

    depth: int = 0  # levels below the root
    nodes: int = 0  # drafted nodes, the root not counted
    branch: int = 1  # children per node at most
    min_confidence: float = 0.0  # paths below this joint probability are not extended
    min_level: float = 0.0  # a level is grown only if the nodes above it promise so many accepted tokens
    parts: tuple[Plan, ...] = ()  # of a drafter whose parts are planned one by one, in their order
    rounds: int = 0  # at most, of a burst on a device; 0: one step on the host
    ahead: bool = False  # the next burst of the same sequences may start before this one is reported

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked at all."""
        return self.depth > 0 and self.nodes > 0


@dataclass(frozen=True)
class Limits:
    """Bounds within which the policy decides. The objective is `latency` or `throughput`."""

    drafters: frozenset[str] | None = None  # None: all that are loaded
    nodes: int = 64
    depth: int = 64
    objective: str = "latency"
    max_tpot_ms: float = 0.0  # 0: no bound
    clock: bool = True  # False: costs are those of the saved table, and nothing is learnt from other requests


class Decision(NamedTuple):
    """What the policy decided for one sequence in one step, what it expected, and what the step gave."""

    drafters: tuple[str, ...]  # empty: plain decoding
    probe: bool  # a try, to measure how many tokens this draft yields
    matched: int  # tokens of the repeated suffix, where a drafter looks for one
    expected_tokens: float  # of the sequence in this step
    expected_ms: float
    plain_ms: float  # expected of a step without drafts
    nodes: int  # verified
    tokens: int  # emitted
    draft_ms: float
    verify_ms: float
    steps: int = 1  # rounds on a device are decided several at a time

    @property
    def reason(self) -> str:
        """The decision in one sentence."""
        plain = f"plain decoding gives 1 in {self.plain_ms:.1f} ms"
        if not self.drafters and self.probe:
            return "no draft: the step measured what plain decoding costs"
        if not self.drafters:
            return f"no draft: nothing promised more than plain decoding ({self.plain_ms:.1f} ms a token)"
        who = "+".join(self.drafters)
        seen = f", after {self.matched} repeated token{'s' if self.matched > 1 else ''}," if self.matched else ""
        if self.probe:
            return f"{who}{seen} was tried to learn what it brings"
        return f"{who}{seen} promised {self.expected_tokens:.1f} tokens in {self.expected_ms:.1f} ms; {plain}"


@dataclass(frozen=True)
class WarmUp:
    """The time and the memory that a warm-up took."""

    seconds: float = 0.0
    mib: float = 0.0  # of GPU memory, for graphs and buffers
    graphs: int = 0  # kinds of rounds


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
    verify_ms: float = 0.0  # target pass and verification
    other_ms: float = 0.0
    prefill_ms: float = 0.0  # until the first token (not part of the decode time)
    decode_ms: float = 0.0
    draft_faults: int = 0
    lossy: bool = False
    origins: list[str | None] = field(default_factory=list)  # per emitted token: its drafter, or None
    drafted_by: dict[str, int] = field(default_factory=dict)  # drafter -> nodes that it offered to the host runner
    decisions: list[Decision] = field(default_factory=list)  # per step on the host, if the policy decided

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
        """accepted / drafted: meaningful for chains; for trees see acceptance by depth."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens of all steps after the first over the time since the first.

        If one step emitted all tokens: its tokens over the whole time.
        """
        tokens, ms = (self.decoded, self.decode_ms) if self.decoded else (self.emitted, self.prefill_ms)
        return 1000.0 * tokens / ms if ms > 0 else 0.0

    def outcome_of(self, drafter: str) -> tuple[int, int]:
        """How many nodes of a drafter were emitted, and how many rejected: `usage` of predicted outputs has both."""
        accepted = self.origins.count(drafter)
        return accepted, self.drafted_by.get(drafter, 0) - accepted

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
        for drafter, count in other.drafted_by.items():
            self.drafted_by[drafter] = self.drafted_by.get(drafter, 0) + count
        self.lossy = self.lossy or other.lossy
        self.origins = self.origins + other.origins
        self.decisions = self.decisions + other.decisions

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
class Logprob:
    """Log-probability of one token under the raw distribution (temperature 1, no penalties, nothing cut off)."""

    logprob: float
    rank: int | None = None  # 1: the most likely; of equals, the lower token id
    decoded_token: str | None = None  # None without a tokenizer


Logprobs = dict[int, Logprob]  # of one position, by token id: the actual token, then the most likely ones in order


def best_tokens(entry: Logprobs, count: int) -> list[int]:
    """The `count` likeliest tokens of a position, best first; its entry also has the actual one."""
    return sorted(entry, key=lambda id: entry[id].rank or 0)[:count]


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened, in seconds of `time.perf_counter`."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    chunks: tuple[tuple[float, int], ...] = ()  # when tokens were delivered, and how many of them together

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT in seconds, once there is a token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class Completion:
    """One finished (or, while streaming, unfinished) choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "cancelled", or None while it runs
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    logprobs: list[Logprobs] | None  # one entry per token; None unless asked for
    stats: Stats
    seed: int
    metrics: RequestMetrics | None = None
    cached_tokens: int = 0  # of the prompt, whose K/V were in the cache when it was started

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole answer; None unless `logprobs` were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass
class Output:
    """The result of one prompt. The properties are those of the first choice; `outputs` has all n."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None  # per token of the prompt; the first has none

    @property
    def finished(self) -> bool:
        """Whether all choices are complete."""
        return all(choice.finish_reason is not None for choice in self.outputs)

    @property
    def metrics(self) -> RequestMetrics | None:
        """Arrival, the first token of any choice, and the last token of all."""
        each = [choice.metrics for choice in self.outputs if choice.metrics is not None]
        if not each:
            return None
        firsts = [m.first_token_time for m in each if m.first_token_time is not None]
        lasts = [m.last_token_time for m in each if m.last_token_time is not None]
        arrival = min(m.arrival_time for m in each)
        return RequestMetrics(arrival, min(firsts, default=None), max(lasts, default=None))

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
    def logprobs(self) -> list[Logprobs] | None:
        """Log-probabilities of the first choice, if asked for."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole first choice, if asked for."""
        return self.outputs[0].cumulative_logprob

    @property
    def stats(self) -> Stats:
        """Counters of the first choice."""
        return self.outputs[0].stats


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice, as `LLM.stream` yields it."""

    index: int
    text: str  # new text; held back while it may be part of a stop string or of an incomplete character
    token_ids: list[int]
    origins: list[str | None]
    finish_reason: str | None = None
    completion: Completion | None = None  # the whole choice, with its last delta
    trees: list[TokenTree] = field(default_factory=list)  # of a traced request: the trees of its steps, in order
    decisions: list[Decision | None] = field(default_factory=list)  # per tree: the policy's, if it decided
    logprobs: list[Logprobs] | None = None  # one entry per token; None unless asked for

    def then(self, later: Delta) -> Delta:
        """This delta and the next one of the same choice as one, for a reader that has not read this one yet."""
        scored = None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs
        return Delta(
            index=self.index,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            origins=self.origins + later.origins,
            finish_reason=later.finish_reason,
            completion=later.completion,
            trees=(self.trees + later.trees)[:_TREES_KEPT],  # the trees of the first tokens are kept
            decisions=(self.decisions + later.decisions)[:_TREES_KEPT],
            logprobs=scored,
        )
