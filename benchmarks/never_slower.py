"""Is `auto` ever slower than plain decoding? A cell for each kind of prompt, temperature, batch and weights' format.

    python -m benchmarks.never_slower FILE [--quantize none int8 int4] [--batch 1 8] [--temperature 0 1] [--rounds 2]
                                      [--speculate auto] [--kinds code chat ...] [--each 16] [--tokens 128]
                                      [--threads 2]
    python -m benchmarks.never_slower FILE --show

Each prompt of the shipped workload is answered with every setting, one right after the other; at a batch of 8 the
prompts of a kind are a closed loop, eight at a time. What was measured is appended to FILE, and a run that was stopped
goes on where it was. Speed-ups are from arrival to last token. Two intervals (95%): *timing* holds for these prompts
and comes from repeated rounds; *prompts* is for others of their kind (bootstrap over prompts).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.encoding import Encoder
from slipstream.bench.intervals import Bootstrap, student
from slipstream.bench.prompts import BenchPrompt, workload
from slipstream.bench.schedule import PLAIN

KINDS = ["code", "structured", "edit", "chat", "story", "reasoning"]


class Cell(NamedTuple):
    """What is decided about: never slower, here."""

    quantize: str
    batch: int
    temperature: float
    kind: str


@dataclass(frozen=True)
class Row:
    """One answer."""

    quantize: str
    batch: int
    temperature: float
    kind: str
    setting: str
    prompt: str
    round: int
    tokens: int
    ttft_ms: float
    e2e_ms: float
    same: bool  # token by token the answer of plain decoding
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        return Cell(self.quantize, self.batch, self.temperature, self.kind)


class Measurement:
    """One loaded model, all settings."""

    def __init__(self, llm: LLM, settings: list[str], tokens: int) -> None:
        self._llm = llm
        self._settings = settings
        self._tokens = tokens
        self._encoder = Encoder(self._llm.get_tokenizer())

    def rows(self, cell: Cell, group: list[BenchPrompt], round_: int, turn: int) -> Iterator[Row]:
        """The answers of all settings to a group of prompts; settings take turns to be the first."""
        start = turn % len(self._settings)
        plain: list[tuple[int, ...]] = []
        found: list[tuple[str, int, Row, tuple[int, ...]]] = []
        for setting in (*self._settings[start:], *self._settings[:start]):
            self._llm.reset_prefix_cache()
            asked = [
                (
                    self._encoder.encode(prompt),
                    SamplingParams(
                        temperature=cell.temperature, seed=place, max_tokens=self._tokens, speculate=setting
                    ),
                )
                for place, prompt in enumerate(group)
            ]
            outputs = dict(self._llm.answers(asked, cell.batch, text=True))
            ids = [tuple(outputs[place].outputs[0].token_ids) for place in range(len(group))]
            if setting == PLAIN:
                plain = ids
            for place, prompt in enumerate(group):
                completion = outputs[place].outputs[0]
                times = completion.metrics
                assert times is not None and times.first_token_time is not None and times.last_token_time is not None
                row = Row(
                    *cell,
                    setting=setting,
                    prompt=prompt.name,
                    round=round_,
                    tokens=len(ids[place]),
                    ttft_ms=round(1000 * (times.first_token_time - times.arrival_time), 3),
                    e2e_ms=round(1000 * (times.last_token_time - times.arrival_time), 3),
                    same=True,
                    stats=completion.stats.as_dict(),
                )
                found.append((setting, place, row, ids[place]))
        for _, place, row, ids_ in found:
            yield replace(row, same=ids_ == plain[place])


def measure(given: argparse.Namespace) -> None:
    """Append what is missing to the file."""
    settings = list(dict.fromkeys([PLAIN, *given.speculate]))
    prompts = {kind: [p for p in workload() if p.category == kind][: given.each] for kind in given.kinds}
    done = {(row.cell, row.prompt, row.round) for row in load(given.file) if row.setting in settings}
    for quantize in given.quantize:
        llm = LLM(quantize=quantize, speculate=None, drafters=settings, cache_tokens=32_768)
        measurement = Measurement(llm, settings, given.tokens)
        for round_, batch, temperature in product(range(given.rounds), given.batch, given.temperature):
            for turn, (kind, group) in enumerate(_groups(prompts, batch)):
                cell = Cell(quantize, batch, temperature, kind)
                if all((cell, prompt.name, round_) in done for prompt in group):
                    continue
                lines = [json.dumps(asdict(row)) for row in measurement.rows(cell, group, round_, turn + round_)]
                with given.file.open("a") as out:
                    out.write("\n".join(lines) + "\n")
        llm.close()


def _groups(prompts: dict[str, list[BenchPrompt]], batch: int) -> Iterator[tuple[str, list[BenchPrompt]]]:
    """Prompts that are asked together: one by one, kinds in turns; or all of a kind."""
    if batch > 1:
        yield from prompts.items()
        return
    for place in range(max(map(len, prompts.values()))):
        for kind, listed in prompts.items():
            if place < len(listed):
                yield kind, [listed[place]]


def load(path: Path) -> list[Row]:
    """What was measured so far."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


# -- figures -----------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A speed-up, its two intervals, and the ratio of the times of the first token."""

    value: float
    timing: float | None  # half the width of the interval, relative
    low: float | None  # of the interval over prompts
    high: float | None
    ttft: float
    identical: bool


def figure(rows: list[Row], setting: str) -> Figure:
    """The figures of a setting over plain decoding, on the prompts and rounds that both have."""
    times: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in rows:
        times[row.setting][f"{row.cell} {row.prompt}", row.round] = row
    keys = sorted(set(times[PLAIN]) & set(times[setting]))
    mine, plain = [times[setting][key] for key in keys], [times[PLAIN][key] for key in keys]
    rounds = sorted({key[1] for key in keys})
    by_round = [_ratio([(m, p) for m, p in zip(mine, plain, strict=True) if m.round == r]) for r in rounds]
    timing = None
    if len(rounds) > 1:
        error = float(np.log(by_round).std(ddof=1)) / len(rounds) ** 0.5
        timing = student(len(rounds) - 1) * error
    names = [key[0] for key in keys]
    first = list(dict.fromkeys(names))
    columns = np.zeros((4, len(first)))
    for name, m, p in zip(names, mine, plain, strict=True):
        columns[:, first.index(name)] += (m.tokens, m.e2e_ms, p.tokens, p.e2e_ms)
    found = Bootstrap([PLAIN] * len(first)).ratio_of_ratios((columns[0], columns[1]), (columns[2], columns[3]))
    ttft = float(np.median([m.ttft_ms for m in mine]) / np.median([p.ttft_ms for p in plain]))
    return Figure(found.value, timing, found.low, found.high, ttft, all(row.same for row in mine))


def _ratio(pairs: list[tuple[Row, Row]]) -> float:
    tokens, ms, plain_tokens, plain_ms = np.sum([(m.tokens, m.e2e_ms, p.tokens, p.e2e_ms) for m, p in pairs], axis=0)
    return float(tokens / ms * plain_ms / plain_tokens)


def show(rows: list[Row]) -> None:
    """A table of all cells, then everything pooled by format of weights and batch size."""
    settings = [s for s in dict.fromkeys(row.setting for row in rows) if s != PLAIN]
    print("| weights | batch | T | kind | " + " | ".join(f"`{s}` | timing | prompts | TTFT" for s in settings) + " |")
    print("| --- | ---: | ---: | --- |" + " ---: | ---: | ---: | ---: |" * len(settings))
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        where = (row.quantize, str(row.batch))
        groups[*where, f"{row.temperature:g}", row.kind].append(row)
        groups[*where, f"{row.temperature:g}", "all"].append(row)
        groups[*where, "all", "all"].append(row)
    worst = []
    for key in sorted(groups, key=lambda key: (*key[:3], key[3] == "all", key[3])):
        shown = []
        for setting in settings:
            if not any(row.setting == setting for row in groups[key]):
                shown.append("| | | ")
                continue
            found = figure(groups[key], setting)
            timing = "" if found.timing is None else f"±{100 * found.timing:.1f}%"
            prompts = "" if found.low is None else f"{found.low:.2f} to {found.high:.2f}"
            differs = "" if found.identical else " texts differ!"
            shown.append(f"{found.value:.3f}x{differs} | {timing} | {prompts} | {found.ttft:.2f}")
            worst.append((found.value, key, setting))
        print(f"| {' | '.join(key)} | {' | '.join(shown)} |")
    value, key, setting = min(worst)
    print(f"\nworst cell: {value:.3f}x, {' '.join(key)}, {setting}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quantize", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--speculate", nargs="+", default=["auto"])
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="show what was measured")
    given = parser.parse_args()
    if not given.show:
        torch.set_num_threads(given.threads)
        measure(given)
    show(load(given.file))


if __name__ == "__main__":
    main()
