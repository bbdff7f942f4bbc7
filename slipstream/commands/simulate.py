"""`slipstream simulate`: what recorded drafts would give on another machine, at another batch size or context."""

from __future__ import annotations

from typing import Annotated, Any

from slipstream.checks import integer
from slipstream.commands.bench.options import numbers, price_per_hour
from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import print_json, say, show_table
from slipstream.errors import OptionError
from slipstream.folders import expanded


def simulate(
    trace: Annotated[
        str, Described("traces of `bench --trace`, or what `serve --capture` wrote", metavar="FILE", positional=True)
    ],
    costs: Annotated[
        str | None,
        Described(
            "costs of a machine: a table, other traces, or h200-8b (default: those of the traces)", metavar="COSTS"
        ),
    ] = None,
    batch: Annotated[str, Described("requests at once, as in 1,8,64", metavar="LIST")] = "1",
    context: Annotated[int | None, Described("tokens of context (default: as recorded)")] = None,
    price: Annotated[str | None, Described("of the machine, as in 2.5/h: gives costs", metavar="PRICE")] = None,
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> None:
    """Replay acceptance traces against the costs of a machine: speed-up, tokens per second, the best setting."""
    from slipstream.bench.captured import captured_traces
    from slipstream.bench.cost_table import costs_of, load_costs
    from slipstream.bench.traces import load

    per_hour, batches = price_per_hour(price), numbers("batch", batch, int, 1)
    if context is not None:
        integer("context", context, 1)
    place = expanded(trace)
    traces = captured_traces(place) if place.is_dir() else load(place)
    if costs is None and "costs" not in traces.header:
        raise OptionError(f"{trace!r} has no costs of its own", hint="give a table with --costs")
    table = costs_of(traces.header["costs"]) if costs is None else load_costs(costs)
    found = _found(traces, table, batches, context, per_hour)
    if as_json:
        print_json(found, indent=1)
    else:
        _show(found)


def _found(traces: Any, table: Any, batches: list[int], context: int | None, price: float | None) -> dict[str, Any]:
    from dataclasses import asdict

    from slipstream.bench.session import cost_per_million
    from slipstream.bench.simulate import SIZES, Scenario, best, outlook

    scenarios = []
    for batch in batches:
        rows = outlook(traces, table, Scenario(batch, context), sizes=SIZES)
        listed = [{**asdict(row), "name": row.name} for row in rows]
        for row in listed:
            if price is not None:
                row["cost_per_million_tokens"] = cost_per_million(price, row["tokens_per_second"])
        scenarios.append({"batch": batch, "context": context, "best": best(rows).name, "settings": listed})
    return {"machine": table.machine, "command": table.command, "scenarios": scenarios}


def _show(found: dict[str, Any]) -> None:
    say(f"costs of {found['machine']}", "title")
    priced = "cost_per_million_tokens" in found["scenarios"][0]["settings"][0]
    headers = ["batch", "setting", "tok/s", "speed-up", "tokens/step", "step ms"] + ["per 1M tokens"] * priced
    rows = []
    for scenario in found["scenarios"]:
        for row in scenario["settings"]:
            if row["nodes"] is not None and row["name"] != scenario["best"]:
                continue  # of other tree sizes only the best is shown
            mark = " *" if row["name"] == scenario["best"] else ""
            doubt = "" if row["covered"] else " (beyond the table)"
            cells = [str(scenario["batch"]), row["name"] + mark, f"{row['tokens_per_second']:,.1f}"]
            cells += [f"{row['speedup']:.2f}x{doubt}", f"{row['tokens_per_step']:.2f}", f"{row['step_ms']:.2f}"]
            rows.append(cells + ([f"{row['cost_per_million_tokens']:.3f}"] if priced else []))
    show_table(headers, rows, right=[0, *range(2, len(headers))])
    say("\n* the best of all settings and tree sizes")
    if found["command"]:
        say(f"costs were measured by: {found['command']}", "dim")
