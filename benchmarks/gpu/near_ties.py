"""How close two tokens were where an answer diverged from the plain one, and how common such near-ties are.

Without `exact` a row's logits depend, in their last bits, on the other rows of its pass. That can decide between two
tokens only if they are nearly tied. If a drafter or a kernel were wrong, answers would diverge elsewhere, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.gpu.answers import agreeing
from slipstream import LLM, SamplingParams

_RIVALS = 100  # top tokens that are searched for the two
CLOSE = (0.01, 0.03, 0.1, 0.3)  # nats

Ids = list[int]


@dataclass
class NearTies:
    """Gaps in nats. `partings`: between the two tokens where an answer and the plain one diverge, as the model scores
    them in a new prefill of the text before them. `all`: between the two most likely tokens of every row.
    """

    partings: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.partings:
            return "no answer diverged"
        lines = [
            f"{len(self.partings)} partings, nats between the two tokens: "
            f"median {median(self.partings):.3f}, largest {max(self.partings):.3f}"
        ]
        for limit in CLOSE:
            parted, rows = _share(self.partings, limit), _share(self.all, limit)
            lines.append(f"  under {limit:g}: {parted:.0%} of the partings, {rows:.2%} of all rows")
        return "\n".join(lines)


def add_partings(ties: NearTies, llm: LLM, prompts: Sequence[Ids], plain: Sequence[Ids], others: Sequence[Ids]) -> None:
    """Score the places where answers diverge from the plain ones."""
    texts, pairs = [], []
    for prompt, expected, found in zip(prompts, plain, others, strict=True):
        if expected != found:
            agreed = agreeing(expected, found)
            texts.append(prompt + expected[:agreed])
            pairs.append((expected[agreed], found[agreed]))
    if not texts:
        return
    llm.use("none")
    for output, rivals in zip(llm.generate(texts, _judged(1, _RIVALS)), pairs, strict=True):
        assert output.logprobs is not None
        known = {token: found.logprob for token, found in output.logprobs[0].items()}
        one, other = (known.get(token) for token in rivals)
        ties.partings.append(math.inf if one is None or other is None else abs(one - other))


def add_rows(ties: NearTies, llm: LLM, prompts: Sequence[Ids], length: int) -> None:
    """Score every row of plain answers."""
    llm.use("none")
    for output in llm.generate(list(prompts), _judged(length, 2)):
        for row in output.logprobs or ():
            first, second = sorted((found.logprob for found in row.values()), reverse=True)[:2]
            ties.all.append(first - second)


def _judged(length: int, count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, logprobs=count)


def _share(gaps: list[float], limit: float) -> float:
    return sum(gap < limit for gap in gaps) / max(1, len(gaps))
