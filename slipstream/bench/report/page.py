"""Puts a report together: one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from slipstream.bench.condition_table import ALL
from slipstream.bench.intervals import Interval
from slipstream.bench.report import charts
from slipstream.bench.report.charts import Series
from slipstream.bench.report.samples import samples
from slipstream.bench.report.serving import server_sections
from slipstream.bench.report.sweeps import sweep_sections
from slipstream.bench.schedule import PLAIN

Json = Mapping[str, Any]

_PARTS = (("first token", "p1"), ("draft", "p2"), ("verify", "p3"), ("other", "p4"))
_LATENCIES = {
    "ttft_ms": ("Time to first token", "ms from arrival"),
    "tpot_ms": ("Time per output token", "ms per token after the first"),
    "chunk_gap_ms": ("Gap between deliveries", "ms between two steps; a step delivers several tokens at once"),
    "e2e_ms": ("End to end", "ms from arrival to the last token"),
}


def render(results: Json) -> str:
    """The whole page."""
    style = (files("slipstream.bench.report") / "style.css").read_text(encoding="utf-8")
    sections = server_sections(results) if "points" in results else _engine_sections(results)
    name = escape(str(results["model"]["name"]))
    body = "".join(sections) + _provenance(results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>slipstream bench: {name}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _engine_sections(results: Json) -> Iterable[str]:
    base = results["conditions"][0]
    figures = base["figures"]
    series = [Series(name, f"s{1 + number % 5}") for number, name in enumerate(n for n in figures if n != PLAIN)]
    yield _head(results)
    yield _verdicts(results)
    yield _section(
        "Speed-up by category",
        "Tokens per second from arrival to last token, over those of plain decoding on the same prompts in the same "
        "process. Bars with 95% intervals (stratified bootstrap over prompts); the dashed line is plain decoding.",
        charts.speedups(_category_rows(figures, series), series) + legend(series),
    )
    yield _table(figures)
    yield _section("Where the time goes", _TIME, charts.time_split(_time_rows(figures), _PARTS) + _parts_legend())
    depths = charts.by_depth(
        {s.name: _of(figures, s.name, "accepted_by_depth", []) for s in series},
        {s.name: _of(figures, s.name, "accepted_given_parent", []) for s in series},
        series,
    )
    if depths:
        yield _section(
            "Acceptance by depth",
            _DEPTH,
            f'<div class="pair">{_figure(depths, "")}{_depth_notes(figures, series)}</div>' + legend(series),
        )
    yield from sweep_sections(results["conditions"], series, section=_section, legend=legend)
    everyone = [Series(PLAIN, "s0"), *series]
    panels = "".join(
        _figure(f"<h3>{title}</h3>" + charts.latencies(title, [(s, _of(figures, s.name, key)) for s in everyone]), note)
        for key, (title, note) in _LATENCIES.items()
    )
    yield _section(
        "Latency percentiles",
        "The large dot is the median; smaller ones are the 90th, 95th and 99th percentiles.",
        f'<div class="pair">{panels}</div>',
    )
    yield from samples(results.get("samples", []), series, section=_section)


_TIME = (
    "Milliseconds per token, by what they were spent on. A drafter pays if it shortens the bar: its draft costs less "
    "than the passes that it saves."
)
_DEPTH = (
    "How often the drafted token at each depth was accepted: solid, of all steps that drafted (the points add up to "
    "the acceptance length less one); dashed, of the steps in which the one before it was accepted."
)


def _head(results: Json) -> str:
    figures = results["conditions"][0]["figures"]
    model, machine = results["model"], results.get("machine", {})
    best, speed = _best(figures)
    plain, drafted = figures[PLAIN][ALL], figures[best][ALL]
    weights = "" if model["quantize"] == "none" else f", weights in {model['quantize']}"
    where = machine.get("gpus") or [machine.get("cpu", "")]
    note = f"{model['name']}, {model['dtype']}{weights}, on {where[0]}; {results['conditions'][0]['name']}"
    if plain is None or drafted is None:
        return f"<h1>{escape(model['name'])}</h1><p class='soft'>{escape(note)}</p>"
    tiles = [
        _tile(f"{speed.value:.2f}x", _interval_text(speed, best), "main" if speed.value >= 1 else "main bad"),
        _tile(f"{drafted['tok_s'][0]:.0f} tok/s", f"instead of {plain['tok_s'][0]:.0f} tok/s"),
        _tile(
            f"{drafted['tokens_per_step']:.2f}",
            f"tokens per step; from {drafted['break_even_tokens_per_step'] or 1:.2f} it pays",
        ),
        _tile(
            f"{drafted['identical']['answers']} of {drafted['identical']['of']}", "answers identical to plain decoding"
        ),
    ]
    if drafted.get("cost_per_million_tokens") is not None:
        saved = f"per million tokens, instead of {plain['cost_per_million_tokens']:.2f}"
        tiles.append(_tile(f"{drafted['cost_per_million_tokens']:.2f}", saved))
    lossy = "" if not drafted["lossy"] else "<p><b>Lossy:</b> the verifier may change what the model says.</p>"
    return (
        f"<h1>{escape(_headline(model['name'], best, speed))}</h1><p class='soft'>{escape(note)}</p>"
        f'<div class="hero">{"".join(tiles)}</div>{lossy}'
    )


def _headline(model: str, best: str, speed: Interval) -> str:
    if speed.below_one:
        return f"Drafting does not pay for {model} here"
    if speed.low is not None and not speed.above_one:
        return f"Drafting makes no difference for {model} here"
    return f"{model} answers {speed.value:.2f}x as fast with {best}"


def _best(figures: Json) -> tuple[str, Interval]:
    """The setting with the highest speed-up over all."""
    found = {
        name: Interval(*each[ALL]["speedup"])
        for name, each in figures.items()
        if name != PLAIN and each[ALL] is not None
    }
    if not found:
        return next(name for name in figures if name != PLAIN), Interval(1.0)
    best = max(found, key=lambda name: found[name].value)
    return best, found[best]


def _interval_text(speed: Interval, name: str) -> str:
    span = "" if speed.low is None else f", 95% interval {speed.low:.2f} to {speed.high:.2f}"
    return f"with {name}{span}"


def _tile(value: str, note: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(note)}</span></div>'


def _verdicts(results: Json) -> str:
    rows = []
    for category, sentence in results["verdicts"].items():
        kind = "good" if sentence.startswith("use ") else "bad" if sentence.startswith("do not") else ""
        rows.append(f'<li><i class="{kind}"></i><b>{escape(category)}</b><span>{escape(sentence)}</span></li>')
    return f'<section><h2>Verdicts</h2><ul class="verdicts">{"".join(rows)}</ul></section>'


def _category_rows(figures: Json, series: Sequence[Series]) -> list[tuple[str, list[Sequence[float | None]]]]:
    rows = []
    for category, first in figures[series[0].name].items():
        if first is not None:
            count = first["prompts"]
            rows.append((f"{category} ({count})", [figures[each.name][category]["speedup"] for each in series]))
    return rows


def _time_rows(figures: Json) -> list[tuple[str, dict[str, float]]]:
    rows = []
    for name, each in figures.items():
        total = each[ALL]
        if total is None or total["step_ms"] is None:
            continue
        steps, answers = total["step_ms"], total["answers"]
        per_token = total["tokens"] / answers
        first = total["ttft_ms"]["mean"] / per_token
        decode_steps = (per_token / total["tokens_per_step"] - 1) / per_token  # steps after the first, per token
        parts = {part: steps[part] * decode_steps for part in ("draft", "verify", "other")}
        rows.append((name, {"first token": first, **parts}))
    return rows


def _table(figures: Json) -> str:
    heads = ["setting", "tok/s", "speed-up", "decode", "tokens/step", "break-even", "acc. length", "rows/step"]
    heads += ["TTFT p50", "TPOT p50", "E2E p50", "p99", "identical"]
    rows = []
    for name, each in figures.items():
        total = each[ALL]
        if total is None:
            continue
        cells = [
            name,
            f"{total['tok_s'][0]:.1f}",
            f"{total['speedup'][0]:.2f}x",
            f"{total['decode_speedup'][0]:.2f}x",
            f"{total['tokens_per_step']:.2f}",
            "" if total["break_even_tokens_per_step"] is None else f"{total['break_even_tokens_per_step']:.2f}",
            f"{total['acceptance_length']:.2f}",
            f"{total['rows_per_step']:.1f}",
            f"{total['ttft_ms']['p50']:.0f}",
            "" if total["tpot_ms"] is None else f"{total['tpot_ms']['p50']:.1f}",
            f"{total['e2e_ms']['p50']:.0f}",
            f"{total['e2e_ms']['p99']:.0f}",
            f"{total['identical']['answers']}/{total['identical']['of']}",
        ]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = "Times in ms. <i>decode</i>: speed-up without the first token. <i>break-even</i>: tokens/step to pay off."
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div><p class="note">{note}{_beyond(figures)}</p>'


def _beyond(figures: Json) -> str:
    """What intervals are for, and how wide they are for other prompts."""
    spans = []
    for name, each in figures.items():
        low, high = (each[ALL] or {}).get("speedup_beyond", (None, None, None))[1:]
        if name != PLAIN and low is not None:
            spans.append(f"{escape(name)} {low:.2f}x to {high:.2f}x")
    note = " Intervals are for the prompts of this file; for others of these kinds: "
    return note + ", ".join(spans) + "." if spans else ""


def _depth_notes(figures: Json, series: Sequence[Series]) -> str:
    rows = []
    for each in series:
        total = figures[each.name][ALL]
        if total is not None:
            spread = total["acceptance_length_by_request"]
            rows.append(
                f"<tr><td>{escape(each.name)}</td><td>{total['acceptance_length']:.2f}</td>"
                f"<td>{spread['p10']:.2f}</td><td>{spread['p50']:.2f}</td><td>{spread['p90']:.2f}</td></tr>"
            )
    head = "<tr><th>acceptance length</th><th>pooled</th><th>p10</th><th>p50</th><th>p90</th></tr>"
    note = "1 + accepted tokens per step that drafted: over all steps, and the percentiles over answers."
    return f'<div><table>{head}{"".join(rows)}</table><p class="note">{note}</p></div>'


def _parts_legend() -> str:
    return legend([Series(name, kind) for name, kind in _PARTS])


def legend(series: Iterable[Series]) -> str:
    """What the colours mean."""
    items = "".join(f'<li><i class="{each.kind}"></i>{escape(each.name)}</li>' for each in series)
    return f'<ul class="legend">{items}</ul>'


def _section(title: str, note: str, content: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="soft">{escape(note)}</p>{content}</section>'


def _figure(content: str, caption: str) -> str:
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{content}{under}</figure>"


def _of(figures: Json, setting: str, key: str, default: Any = None) -> Any:
    total = figures[setting][ALL]
    return default if total is None else total[key]


def _provenance(results: Json) -> str:
    machine, versions = results.get("machine", {}), results.get("versions", {})
    facts = {
        "measured": results.get("created", ""),
        "command": "slipstream " + " ".join(results.get("command", [])),
        "processor": "{cpu}, {cores} cores, {torch_threads} threads".format_map(machine) if machine else "",
        "GPU": ", ".join(machine.get("gpus", [])) or "none",
        "system": machine.get("system", ""),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "commit": results.get("commit") or "an installed package",
        "peak memory": _memory(results.get("peak_memory", {})),
        "prompts": _workload(results),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(str(fact))}</dd>" for name, fact in facts.items() if fact)
    return f"<footer><h3>How this was measured</h3><dl>{listed}</dl></footer>"


def _memory(peak: Json) -> str:
    return ", ".join(f"{name.removesuffix('_bytes')} {count / 2**20:,.0f} MiB" for name, count in peak.items())


def _workload(results: Json) -> str:
    found = results.get("workload")
    if not found:
        return ""
    kinds = ", ".join(f"{name} {count}" for name, count in found["categories"].items())
    skipped = f"; {len(found['skipped'])} were too long and left out" if found["skipped"] else ""
    return f"{found['prompts']} ({kinds}), answers of up to {found['tokens']} tokens{skipped}"
