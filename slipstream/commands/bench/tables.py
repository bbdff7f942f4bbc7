"""Results of `slipstream bench` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.commands.shared.terminal import say, show_table

_PLAIN, _ALL, _LOOPING = "none", "all", "looping"
Json = Mapping[str, Any]


def show_results(results: Json) -> None:
    """All tables of a run."""
    if "points" in results:
        _show_server(results)
        return
    model, base = results["model"], results["conditions"][0]
    weights = "" if model["quantize"] == "none" else f", weights in {model['quantize']}"
    say(f"{model['name']}, {model['dtype']} on {model['device']}{weights}; {base['name']}", "title")
    _show_settings(base["figures"])
    _show_categories(base["figures"])
    if len(results["conditions"]) > 1:
        _show_sweeps(results["conditions"])
    say("\nverdicts", "title")
    width = max(map(len, results["verdicts"]))
    for category, sentence in results["verdicts"].items():
        say(f"  {category.ljust(width)}  {sentence}")


def _show_settings(figures: Json) -> None:
    """One line per setting, over all categories."""
    priced = any("cost_per_million_tokens" in (each[_ALL] or {}) for each in figures.values())
    headers = ["setting", "tok/s", "speed-up", "95% interval", "decode", "tokens/step", "break-even", "acc. length"]
    headers += ["TTFT ms", "TPOT ms", "E2E p50", "p95", "identical"] + ["per 1M tokens"] * priced
    rows = []
    for setting, by_category in figures.items():
        each = by_category[_ALL]
        if each is None:
            continue
        rows.append(
            [
                setting,
                f"{each['tok_s'][0]:.1f}",
                _times(each["speedup"][0]),
                _span(each["speedup"]) if setting != _PLAIN else "",
                _times(each["decode_speedup"][0]),
                f"{each['tokens_per_step']:.2f}",
                _number(each["break_even_tokens_per_step"], 2),
                f"{each['acceptance_length']:.2f}",
                _percentile(each["ttft_ms"], "p50"),
                _percentile(each["tpot_ms"], "p50", 1),
                _percentile(each["e2e_ms"], "p50"),
                _percentile(each["e2e_ms"], "p95"),
                f"{each['identical']['answers']}/{each['identical']['of']}",
                *([_number(each.get("cost_per_million_tokens"), 2)] if priced else []),
            ]
        )
    show_table(headers, rows, right=range(1, len(headers)))
    for setting, by_category in figures.items():
        each = by_category[_ALL]
        if setting != _PLAIN and each is not None and each["speedup_beyond"][1] is not None:
            say(f"{setting} on other prompts of these kinds: {_span(each['speedup_beyond'])}", "dim")


def _show_categories(figures: Json) -> None:
    """Speed-ups by category."""
    settings = [name for name in figures if name != _PLAIN]
    first = figures[settings[0]]
    names = [name for name, each in first.items() if each is not None]
    rows = []
    for name in names:
        cells = [figures[setting][name] for setting in settings]
        shown = "looping, kept apart" if name == _LOOPING else name
        rows.append([shown, str(first[name]["prompts"]), *(_speedup(each["speedup"]) for each in cells)])
    say("")
    show_table(["category", "prompts", *settings], rows, right=range(1, len(settings) + 2))


def _show_sweeps(conditions: Sequence[Json]) -> None:
    settings = [name for name in conditions[0]["figures"] if name != _PLAIN]
    rows = []
    for condition in conditions:
        plain = condition["figures"].get(_PLAIN, {}).get(_ALL)
        if plain is None:
            continue
        cells = []
        for setting in settings:
            each = condition["figures"][setting][_ALL]
            cells += [f"{each['tok_s'][0]:.1f}", _speedup(each["speedup"])]
        rows.append([condition["name"], f"{plain['tok_s'][0]:.1f}", *cells])
    say("")
    headers = ["condition", "none tok/s", *(h for name in settings for h in (f"{name} tok/s", "speed-up"))]
    show_table(headers, rows, right=range(1, len(headers)))


def _show_server(results: Json) -> None:
    say(f"{results['model']['name']} at {results['url']}", "title")
    headers = ["load", "requests", "failed", "req/s", "tok/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99"]
    headers += ["E2E ms", "p99", "good req/s"]
    rows = []
    for point in results["points"]:
        latencies = [
            f"{point[f'{which}_{name}_ms']:.1f}" for name in ("ttft", "tpot", "itl", "e2el") for which in _SHOWN
        ]
        good = point.get("request_goodput")
        rows.append(
            [
                point["load"],
                str(point["completed"]),
                str(point["failed"]),
                f"{point['request_throughput']:.2f}",
                f"{point['output_throughput']:.1f}",
                *latencies,
                "" if good is None else f"{good:.2f}",
            ]
        )
    show_table(headers, rows, right=range(1, len(headers)))
    worst = max(point["client_cpu_percent"] for point in results["points"])
    say(f"the client took {worst:.1f}% of a core at most")


_SHOWN = ("median", "p99")


def show_comparison(compared: Json) -> None:
    """Two runs side by side."""
    plain = compared["plain"]
    say(f"{compared['prompts']} prompts in common", "title")
    rows = [
        [row["setting"], *map(_speedup, (row["first"], row["second"], row["change"]))] for row in compared["settings"]
    ]
    show_table(["setting", "first", "second", "second / first"], rows, right=[1, 2, 3])
    change = 100 * (plain["change"][0] - 1)
    say(f"\nplain decoding: {plain['first_tok_s']:.1f} and {plain['second_tok_s']:.1f} tok/s ({change:+.1f}%)")
    for row in compared["settings"]:
        say(row["verdict"], "bold")
    for line in compared["notes"]:
        say(f"note: {line}", "dim")


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _speedup(bounds: Sequence[float | None]) -> str:
    span = _span(bounds)
    return f"{bounds[0]:.2f}x" + (f" ({span})" if span else "")


def _span(bounds: Sequence[float | None]) -> str:
    return "" if bounds[1] is None else f"{bounds[1]:.2f} to {bounds[2]:.2f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percentile(found: Json | None, which: str, digits: int = 0) -> str:
    return "" if found is None else f"{found[which]:.{digits}f}"
