"""Answers prompts with every setting in one process and one loaded model, and keeps what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from slipstream.bench.encoding import Encoder
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import PLAIN, Condition, Schedule, Turn
from slipstream.bench.traces import TracedAnswer, drafters_of, steps_of
from slipstream.errors import OptionError, PromptError
from slipstream.llm import LLM
from slipstream.types import Completion, SamplingParams, Stats

_WARM_UP_TOKENS = 24

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class Answer:
    """One answer of one setting. Times are in milliseconds since the request arrived."""

    condition: int
    setting: str  # as the user named it, without the tree size of a sweep
    prompt: int
    turn: int  # of a conversation
    round: int
    group: int  # prompts that were asked together
    prompt_tokens: int
    token_ids: tuple[int, ...]
    ttft_ms: float
    e2e_ms: float
    chunks: tuple[tuple[float, int], ...]  # when tokens were delivered, and how many together
    wall_ms: float  # of the group, from its first arrival to its last token
    stats: Stats
    text: str = ""


@dataclass
class Run:
    """What a bench measures with, and what it has measured."""

    llm: LLM
    prompts: list[BenchPrompt]
    settings: list[str]  # the first is plain decoding
    conditions: list[Condition]
    tokens: int = 128  # at most, of each answer
    answers: list[Answer] = field(default_factory=list)
    traces: list[TracedAnswer] | None = None  # of the base condition; None: not asked for
    skipped: dict[str, str] = field(default_factory=dict)  # prompt -> why
    _history: dict[tuple[int, int], str] = field(default_factory=dict)  # (prompt, turn) -> answer that later turns see

    def __post_init__(self) -> None:
        self.encoder = Encoder(self.llm.get_tokenizer())
        self._sampling = [prompt.engine_sampling() for prompt in self.prompts]

    @cached_property
    def fitting(self) -> list[int]:
        """The prompts that leave room for a whole answer under every condition; the others are noted as skipped."""
        found = []
        for index, prompt in enumerate(self.prompts):
            rows = max(self._rows(index, prompt, condition) for condition in self.conditions)
            if rows > self.llm.max_model_len:
                self.skipped[prompt.name] = f"{rows} tokens with its answers, the model has {self.llm.max_model_len}"
            else:
                found.append(index)
        if not found:
            raise PromptError("no prompt leaves room for its answer", hint="lower --tokens or --context")
        return found

    def _rows(self, index: int, prompt: BenchPrompt, condition: Condition) -> int:
        """Tokens of a whole conversation at most."""
        said = self.encoder.encode(prompt, [""] * len(prompt.turns), condition.context)
        return len(said) + (1 + len(prompt.turns)) * (self._params(index, condition, PLAIN).max_tokens or 0)

    def _params(self, index: int, condition: Condition, setting: str) -> SamplingParams:
        asked = {"temperature": 0.0, "max_tokens": self.tokens, "seed": index, **self._sampling[index]}
        if condition.temperature is not None:
            asked["temperature"] = condition.temperature
        return SamplingParams(**asked, speculate=setting)

    def request(self, index: int, setting: str) -> tuple[list[int], SamplingParams]:
        """The first request of a prompt under the base condition."""
        condition = self.conditions[0]
        return self._encoded(index, 0, condition), self._params(index, condition, condition.setting(setting))

    def warm_up(self) -> None:
        """Run every setting once, so that nothing is compiled or captured during the measurement."""
        first = min(self.fitting, key=lambda index: len(self.encoder.encode(self.prompts[index])))
        for condition in self.conditions:
            for setting in dict.fromkeys(map(condition.setting, self.settings)):
                how = replace(self._params(first, condition, setting), max_tokens=_WARM_UP_TOKENS)
                asked = [(self.encoder.encode(self.prompts[first]), how)] * condition.batch
                for _ in self.llm.answers(asked, condition.batch, text=True):
                    pass

    def measure(self, schedule: Schedule, after: Callable[[Turn], None]) -> None:
        """Take the schedule's turns; `after` each of them the caller may look at `answers`."""
        for turn in schedule:
            condition = self.conditions[turn.condition]
            names = dict(zip(map(condition.setting, self.settings), self.settings, strict=True))
            for setting in turn.settings:
                self.answers += self._group(turn, setting, names[setting])
            after(turn)

    def _group(self, turn: Turn, setting: str, name: str) -> list[Answer]:
        """Answer a group of prompts at once, all turns of their conversations."""
        condition = self.conditions[turn.condition]
        self.llm.reset_prefix_cache()  # no setting profits from what another one has computed
        found: list[Answer] = []
        asking = list(turn.prompts)
        for number in range(1 + max(len(self.prompts[index].turns) for index in asking)):
            asking = [index for index in asking if number <= len(self.prompts[index].turns)]
            requests = [
                (self._encoded(index, number, condition), self._params(index, condition, setting)) for index in asking
            ]
            if self._traces(turn):
                choices = self._traced(requests[0], asking[0], name)
            else:
                choices = self._answered(requests, condition.batch)
            wall = _wall_ms(choices)
            for index, (prompt_ids, _), choice in zip(asking, requests, choices, strict=True):
                self._history.setdefault((index, number), choice.text)
                found.append(_answer(choice, len(prompt_ids), turn, name, index, number, wall))
        return found

    def _answered(self, requests: Sequence[Request], at_once: int) -> list[Completion]:
        """The answers to requests, so many of which run at once."""
        outputs = dict(self.llm.answers(requests, at_once, text=True))
        return [outputs[place].outputs[0] for place in range(len(requests))]

    def _traces(self, turn: Turn) -> bool:
        """Traces are of single requests under the base condition, in the first round."""
        single = turn.condition == 0 and self.conditions[0].batch == 1
        return self.traces is not None and single and turn.round == 0

    def _traced(self, request: Request, index: int, setting: str) -> list[Completion]:
        """The answer to one request, whose trees are kept."""
        deltas = list(self.llm.stream(*request, trace=True))
        completion = deltas[-1].completion
        assert completion is not None and self.traces is not None
        stats, prompt = completion.stats, self.prompts[index]
        steps = tuple(steps_of(deltas, len(request[0])))
        draft_ms, other_ms = stats.draft_ms / max(1, stats.drafting_steps), stats.other_ms / max(1, stats.steps)
        if len(steps) == stats.steps:  # of a reader that fell far behind, trees are dropped
            who, length = drafters_of(deltas), len(request[0])
            self.traces.append(
                TracedAnswer(setting, prompt.category, prompt.name, length, steps, draft_ms, other_ms, who)
            )
        return [completion]

    def _encoded(self, index: int, turn: int, condition: Condition) -> list[int]:
        history = [self._history[index, earlier] for earlier in range(turn)]
        return self.encoder.encode(self.prompts[index], history, condition.context)


def _answer(
    choice: Completion, prompt_tokens: int, turn: Turn, setting: str, prompt: int, number: int, wall_ms: float
) -> Answer:
    times = choice.metrics
    assert times is not None and times.first_token_time is not None and times.last_token_time is not None
    began = times.arrival_time
    return Answer(
        condition=turn.condition,
        setting=setting,
        prompt=prompt,
        turn=number,
        round=turn.round,
        group=turn.group,
        prompt_tokens=prompt_tokens,
        token_ids=tuple(choice.token_ids),
        ttft_ms=1000 * (times.first_token_time - began),
        e2e_ms=1000 * (times.last_token_time - began),
        chunks=tuple((1000 * (when - began), count) for when, count in times.chunks),
        wall_ms=wall_ms,
        stats=choice.stats,
        text=choice.text,
    )


def _wall_ms(choices: Sequence[Completion]) -> float:
    each = [choice.metrics for choice in choices if choice.metrics is not None]
    lasts = [times.last_token_time for times in each if times.last_token_time is not None]
    return 1000 * (max(lasts) - min(times.arrival_time for times in each))


def check_settings(settings: Sequence[str]) -> list[str]:
    """Settings as they are loaded: plain decoding first, each once, in the registry's spelling."""
    from slipstream.drafters.registry import parse_speculate

    found = list(dict.fromkeys([PLAIN, *(str(parse_speculate(setting)) for setting in settings)]))
    if len(found) == 1:
        raise OptionError("there is nothing to compare with plain decoding", hint="as in --speculate suffix")
    return found
