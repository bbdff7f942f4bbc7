"""Answers of several settings, each beside the answer of plain decoding: what is measured, and the file it is kept in.

A cell is a kind of prompt, a temperature, a batch size and a format of weights. Every row holds the times of a setting
and those of the plain answer of the same visit, so that a setting which is added later has a plain one of its own,
measured seconds before or after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import LLM, SamplingParams
from slipstream.bench.encoding import Encoder
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import PLAIN
from slipstream.policy import saved

LIBRARY = " (library)"  # after the name of weights that were measured without our own kernels
_WARM_UP = "Write a function that adds two numbers, and explain it."


class Cell(NamedTuple):
    """The conditions of a measurement; speed-ups are judged cell by cell."""

    weights: str
    batch: int
    temperature: float
    kind: str


Key = tuple[Cell, str, int, str]


@dataclass(frozen=True)
class Row:
    """One answer of a setting, and the plain one beside it. Times are from arrival."""

    weights: str
    batch: int
    temperature: float
    kind: str
    setting: str
    prompt: str
    round: int
    tokens: int
    ttft_ms: float
    e2e_ms: float
    wall_ms: float  # of all prompts that were asked together, over their number
    plain_ttft_ms: float
    plain_e2e_ms: float
    plain_wall_ms: float
    same: bool  # token by token the answer of plain decoding
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        return Cell(self.weights, self.batch, self.temperature, self.kind)

    @property
    def key(self) -> Key:
        """The key of a measurement: a row with this key need not be measured again."""
        return self.cell, self.prompt, self.round, self.setting


class _Answer(NamedTuple):
    ids: list[int]
    ttft_ms: float
    e2e_ms: float
    wall_ms: float
    stats: dict[str, Any]


class Measurement:
    """One loaded model that answers with any of its settings."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        self._llm = llm
        self._tokens = tokens
        self._encoder = Encoder(llm.get_tokenizer())

    def warm_up(self, settings: list[str], batch: int = 1) -> None:
        """Warm up: touch memory and compile programs before anything is measured."""
        for setting in (PLAIN, *settings):
            for temperature in (0.0, 1.0):
                how = SamplingParams(temperature=temperature, seed=0, max_tokens=8, speculate=setting)
                self._llm.chat([[{"role": "user", "content": _WARM_UP}]] * batch, [how] * batch)

    def practise(self, setting: str, group: list[BenchPrompt]) -> None:
        """Answers that are not counted, for a setting that learns."""
        self._answers(Cell("", 1, 0.0, ""), group, setting)

    def rows(self, cell: Cell, group: list[BenchPrompt], round_: int, settings: list[str], turn: int) -> list[Row]:
        """The answers of all settings to a group of prompts; settings and plain decoding take turns to be the first."""
        named = [PLAIN, *settings]
        start = turn % len(named)
        found = {setting: self._answers(cell, group, setting) for setting in (*named[start:], *named[:start])}
        return [
            Row(
                *cell,
                setting=setting,
                prompt=prompt.name,
                round=round_,
                tokens=len(mine.ids),
                ttft_ms=mine.ttft_ms,
                e2e_ms=mine.e2e_ms,
                wall_ms=mine.wall_ms,
                plain_ttft_ms=plain.ttft_ms,
                plain_e2e_ms=plain.e2e_ms,
                plain_wall_ms=plain.wall_ms,
                same=mine.ids == plain.ids,
                stats=mine.stats,
            )
            for setting in settings
            for prompt, mine, plain in zip(group, found[setting], found[PLAIN], strict=True)
        ]

    def _answers(self, cell: Cell, group: list[BenchPrompt], setting: str) -> list[_Answer]:
        self._llm.reset_prefix_cache()
        asked = [
            (
                self._encoder.encode(prompt),
                SamplingParams(temperature=cell.temperature, seed=place, max_tokens=self._tokens, speculate=setting),
            )
            for place, prompt in enumerate(group)
        ]
        begun = time.perf_counter()
        outputs = dict(self._llm.answers(asked, cell.batch, text=True))
        wall = (time.perf_counter() - begun) / len(group)
        answers = []
        for place in range(len(group)):
            completion = outputs[place].outputs[0]
            times = completion.metrics
            assert times is not None and times.first_token_time is not None and times.last_token_time is not None
            spent = (times.first_token_time - times.arrival_time, times.last_token_time - times.arrival_time, wall)
            ttft, e2e, share = (round(1000 * seconds, 3) for seconds in spent)
            answers.append(_Answer(list(completion.token_ids), ttft, e2e, share, completion.stats.as_dict()))
        return answers


def learns(setting: str) -> bool:
    """Whether a setting decides by what it has measured."""
    return setting.partition(":")[0] == "auto"


def keep_policy_in(folder: Path) -> None:
    """What the policy learns is read from and kept in this folder, not in the user's cache."""
    saved.directory = lambda: folder


def beside(file: Path) -> Path:
    """The folder for what the policy learns while a file is measured."""
    return file.with_name(f"{file.name}.policy")


def append(path: Path, rows: list[Row]) -> None:
    with path.open("a") as out:
        out.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def load(path: Path) -> list[Row]:
    """What was measured so far; of two rows with the same key the later one counts."""
    return list({row.key: row for row in _lines(path)}.values())


def _lines(path: Path) -> Iterator[Row]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield Row(**json.loads(line))
