"""What a drafter really gains: the same prompts, plain and drafted, in turns, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.llm import LLM
from slipstream.types import SamplingParams, Stats

ROUNDS = 2  # the faster run of each counts: other programs can only slow one down


@dataclass(frozen=True)
class Measured:
    """One drafter against plain decoding; decode time only."""

    speedup: float
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens: int
    identical: bool  # to what plain decoding says, token by token


def confirm(
    llm: LLM,
    prompts: Sequence[list[int]],
    drafters: Sequence[Mapping[str, object]],
    max_tokens: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Measured]:
    """Each drafter's speed on the prompts, one answer at a time; the LLM decodes plainly afterwards."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    runs: list[list[tuple[Stats, list[list[int]]]]] = [[] for _ in range(1 + len(drafters))]
    for _ in range(ROUNDS):
        for found, drafter in zip(runs, [None, *drafters], strict=True):
            llm.use(drafter)
            stats, answers = Stats(), []
            for prompt in prompts:
                output = llm.generate(prompt, params)[0]
                stats.add(output.stats)
                answers.append(output.token_ids)
                tick()
            found.append((stats, answers))
    llm.use(None)
    plain, *drafted = [min((stats for stats, _ in found), key=lambda stats: stats.decode_ms) for found in runs]
    said = [[answers for _, answers in found] for found in runs]
    return [
        Measured(
            speedup=_ratio(stats.tokens_per_second, plain.tokens_per_second),
            tokens_per_step=stats.tokens_per_step,
            tokens_per_second=stats.tokens_per_second,
            plain_tokens_per_second=plain.tokens_per_second,
            tokens=stats.emitted,
            identical=all(answers == said[0][0] for answers in (*said[0], *texts)),
        )
        for stats, texts in zip(drafted, said[1:], strict=True)
    ]


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
