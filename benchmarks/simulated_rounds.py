"""Compares `slipstream simulate` with figures that were measured on a GPU elsewhere, from a file of them and traces.

    python -m benchmarks.simulated_rounds benchmarks/h200.json TRACES [TRACES ...] [--costs h200-8b] [--json FILE]

A body computes what the small model computes, so the traces of a small model on a CPU hold for a body, too, except for
near-ties (docs/bodies.md). `benchmarks/round_traces.py` records them with the trees of device rounds. Three kinds of
runs are replayed as `benchmarks.gpu` times them: answers one by one; static batches, timed from the moment when every
answer has its first token until the first answer ends; and batches whose free slots are filled with new requests, whose
prompts are in the cache, timed from the first arrival on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.served import KINDS, lengths
from slipstream.bench.cost_table import PLAIN, CostTable, load_costs
from slipstream.bench.replay import Played, Recorded, play
from slipstream.bench.simulate import plainly, recorded, usual_nodes
from slipstream.bench.traces import TracedAnswer, load
from slipstream.cache import PAGE_SIZE


class Compared(NamedTuple):
    """One figure: tokens a second over plain decoding."""

    run: str
    setting: str
    nodes: int | None
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def compared(measured: dict[str, Any], answers: Sequence[TracedAnswer], costs: CostTable) -> Iterator[Compared]:
    """Every measured figure of a setting that was traced."""
    by_setting: dict[str, list[TracedAnswer]] = {}
    for answer in answers:
        by_setting.setdefault(_methods(answer.setting), []).append(answer)
    one, many, served = measured["answers"], measured["batches"], measured["served"]
    for setting, figure in one["over_plain"].items():
        if traced := by_setting.get(setting):
            speeds = [_decoding(_one_by_one(each, costs)) for each in _both(setting, traced)]
            yield Compared("answers one by one", setting, None, figure, speeds[1] / speeds[0])
    for setting, figures in many["over_plain"].items():
        if traced := by_setting.get(setting):
            for batch, nodes, figure in zip(many["batch"], many["nodes"], figures, strict=True):
                lengths_ = [many["tokens"]] * batch
                speeds = [_decoding([_run(each, lengths_, batch, costs)]) for each in _both(setting, traced, nodes)]
                yield Compared(f"{batch} together", setting, nodes, figure, speeds[1] / speeds[0])
    for setting, figures in served["tok_s"].items():
        if traced := by_setting.get(setting):
            loads = zip(served["requests"], served["at_once"], served["nodes"], served["none"], figures, strict=True)
            for count, batch, nodes, plain, figure in loads:
                asked = [params.max_tokens or 0 for params in lengths(count, KINDS["greedy"])]
                runs = [_run(each, asked, batch, costs) for each in _both(setting, traced, nodes)]
                speed, base = (run.tokens / run.ms for run in reversed(runs))
                yield Compared(f"{count}, {batch} at a time", setting, nodes, figure / plain, speed / base)


class _Way(NamedTuple):
    """A way to replay traced answers: plainly, or with a drafter and a tree size."""

    drafter: str
    answers: list[TracedAnswer]
    nodes: int | None = None

    def answer(self, traced: TracedAnswer, tokens: int | None) -> Recorded:
        """The answer as recorded, with only the prompt tokens that the prefix cache does not hold."""
        plain = self.drafter == PLAIN
        found = plainly(traced, tokens=tokens) if plain else recorded(traced, self.nodes, tokens=tokens)
        return found._replace(prompt=1 + (traced.prompt_tokens - 1) % PAGE_SIZE)


def _both(setting: str, traced: list[TracedAnswer], nodes: int | None = None) -> tuple[_Way, _Way]:
    return _Way(PLAIN, traced), _Way(setting, traced, nodes)


def _one_by_one(way: _Way, costs: CostTable) -> list[Played]:
    found = [way.answer(traced, None) for traced in way.answers]
    return [play([each], 1, costs, way.drafter, usual_nodes(found)) for each in found]


def _run(way: _Way, lengths: Sequence[int], batch: int, costs: CostTable) -> Played:
    """A batch of answers of these lengths; the questions repeat."""
    traced = islice(cycle(way.answers), len(lengths))
    found = [way.answer(each, tokens) for each, tokens in zip(traced, lengths, strict=True)]
    return play(found, batch, costs, way.drafter, usual_nodes(found))


def _decoding(runs: Sequence[Played]) -> float:
    return sum(run.decoded for run in runs) / sum(run.decoding_ms for run in runs)


def _methods(setting: str) -> str:
    """The drafters of a setting, without options."""
    return "+".join(part.partition(":")[0] for part in setting.split("+"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--costs", default="h200-8b")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    answers = [answer for file in given.traces for answer in load(file).answers]
    rows = list(compared(json.loads(given.measured.read_text()), answers, load_costs(given.costs)))
    if not rows:
        parser.error("no setting that was measured is in the traces")
    print("| run | setting | nodes | over plain | simulated | error |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        nodes = "" if row.nodes is None else row.nodes
        figures = f"{row.measured:.2f} | {row.simulated:.2f} | {row.error:+.0%}"
        print(f"| {row.run} | `{row.setting}` | {nodes} | {figures} |")
    print(f"median error of {len(rows)} figures: {median(abs(row.error) for row in rows):.1%}")
    if given.json:
        given.json.write_text(json.dumps([{**row._asdict(), "error": row.error} for row in rows], indent=1))


if __name__ == "__main__":
    main()
