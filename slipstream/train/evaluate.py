"""Evaluation by real decoding: how many tokens a drafter gives per step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import DraftFault
from slipstream.llm import LLM
from slipstream.train.synth.loops import loop_start
from slipstream.types import SamplingParams, Stats


@dataclass(frozen=True)
class Score:
    """The result of an evaluation. Looping answers are easy to draft and of no use: they are not counted, unless there
    are no others.
    """

    tokens_per_step: float
    by_depth: list[float]  # [d]: of the steps that offered a node at depth d + 1, the share that accepted one there
    answers: int  # answers that are counted
    looping: int  # looping ones among all answers


class Examiner:
    """Answers held-out prompts greedily with the drafter of a checkpoint, as its users will."""

    def __init__(self, llm: LLM, method: str, prompts: Sequence[list[int]], answer: int) -> None:
        self._llm = llm
        self._method = method
        self._prompts = list(prompts)
        self._params = SamplingParams(temperature=0.0, max_tokens=answer)

    def score(self, checkpoint: Path, **options: int) -> Score:
        """Score a checkpoint whose drafter gets these options (none: the method's default tree)."""
        llm = self._llm
        llm.use({"method": self._method, "checkpoint": str(checkpoint), **options})
        try:
            outputs = llm.generate(self._prompts, self._params)
            faults = llm.engine.draft_faults
        finally:
            llm.use(None)
        if faults:
            raise DraftFault(f"{self._method} failed on {faults} of {len(outputs)} prompts during evaluation")
        straight = [output for output in outputs if loop_start(output.token_ids) is None]
        total = Stats()
        for output in straight or outputs:
            total.add(output.stats)
        pairs = zip(total.accepted_by_depth, total.offered_by_depth, strict=True)
        by_depth = [accepted / offered for accepted, offered in pairs if offered]
        return Score(total.tokens_per_step, by_depth, len(straight or outputs), len(outputs) - len(straight))
