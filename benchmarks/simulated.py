"""Compares `slipstream simulate` with a real run: its prediction for every condition that was measured, and its error.

    slipstream bench --minutes 6 --speculate suffix --speculate suffix+eagle3 --batch 1,4 --context 256,1024 \
        --trace trace.jsonl -o out
    python -m benchmarks.simulated out/results.json trace.jsonl [--costs TABLE] [--json FILE]

Traces are of the base condition alone; the other conditions are predicted from them. Speeds are tokens over time from
arrival to last token, times the concurrent requests, over all prompts that were answered under the condition.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.bench.cost_table import costs_of, load_costs
from slipstream.bench.results import load as load_results
from slipstream.bench.schedule import PLAIN, Condition
from slipstream.bench.session import conditions_of
from slipstream.bench.simulate import Scenario, outlook
from slipstream.bench.traces import Traces
from slipstream.bench.traces import load as load_traces


def speeds(rows: list[dict[str, Any]], number: int, batch: int) -> dict[str, float]:
    """Tokens per second of each setting under a condition, on the prompts that all settings have answered."""
    found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for row in rows:
        if row["condition"] == number:
            place = row["prompt"], row["turn"], row["group"], row["round"]
            found.setdefault(row["setting"], {})[place] = row
    common = set.intersection(*map(set, found.values())) if found else set()
    return {
        setting: batch
        * 1000
        * sum(by_place[place]["tokens"] for place in common)
        / sum(by_place[place]["e2e_ms"] for place in common)
        for setting, by_place in found.items()
    }


def compared(results: dict[str, Any], traces: Traces, costs: str | None) -> list[dict[str, Any]]:
    table = costs_of(traces.header["costs"]) if costs is None else load_costs(costs)
    rows = []
    for number, condition in enumerate(conditions_of(results)):
        if condition.temperature not in (None, 0.0) or condition.nodes is not None:
            continue  # another temperature accepts other tokens
        measured = speeds(results["answers"], number, condition.batch)
        asked = {row["prompt"] for row in results["answers"] if row["condition"] == number}
        replayed = Traces(traces.header, [answer for answer in traces.answers if answer.prompt in asked])
        if not measured or not replayed.answers:
            continue
        for each in outlook(replayed, table, _scenario(results, number, condition)):
            rows.append(
                {
                    "condition": str(condition),
                    "setting": each.setting,
                    "measured_tok_s": measured[each.setting],
                    "simulated_tok_s": each.tokens_per_second,
                    "measured_speedup": measured[each.setting] / measured[PLAIN],
                    "simulated_speedup": each.speedup,
                }
            )
    return rows


def _scenario(results: dict[str, Any], number: int, condition: Condition) -> Scenario:
    return Scenario(condition.batch, _context(results, number, condition), condition.group)


def _context(results: dict[str, Any], number: int, condition: Condition) -> int | None:
    """The mean context of a condition that fills prompts up; None if it leaves them as they are."""
    if condition.context is None:
        return None
    each = [r["prompt_tokens"] + r["tokens"] / 2 for r in results["answers"] if r["condition"] == number]
    return int(sum(each) / len(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--costs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = compared(load_results(given.results), load_traces(given.traces), given.costs)
    print("| condition | setting | tok/s | simulated | speed-up | simulated | error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    errors = []
    for row in rows:
        error = row["simulated_speedup"] / row["measured_speedup"] - 1
        errors += [abs(error)] if row["setting"] != PLAIN else []
        speed = f"{row['measured_tok_s']:.1f} | {row['simulated_tok_s']:.1f}"
        gain = f"{row['measured_speedup']:.2f}x | {row['simulated_speedup']:.2f}x | {100 * error:+.0f}%"
        print(f"| {row['condition']} | `{row['setting']}` | {speed} | {gain} |")
    print(f"median error of a speed-up: {100 * median(errors):.0f}%")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
