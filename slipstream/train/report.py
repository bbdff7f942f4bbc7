"""The report of a training: its numbers as JSON, and a self-contained page of plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from typing import Any

from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.train.plot import Line, plot
from slipstream.train.state import Record

NUMBERS, PAGE = "report.json", "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; }
svg { width: 100%; height: auto; } h2 { margin-top: 2rem; }
"""


def files(drafter: Trained, record: Record) -> dict[str, str]:
    """The report's files, by name."""
    numbers = {
        "method": drafter.method,
        "settings": drafter.settings,
        "target": asdict(drafter.target),
        "provenance": drafter.provenance,
        "figures": drafter.figures,
        "record": asdict(record),
    }
    return {NUMBERS: json.dumps(numbers, indent=1) + "\n", PAGE: _page(drafter, record)}


def _page(drafter: Trained, record: Record) -> str:
    title = escape(f"{drafter.method} for {drafter.target.name}")
    figures, training = drafter.figures, drafter.provenance.get("training", {})
    sections = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        "<p>Tokens per step are measured by greedy decoding of held-out prompts; looping answers are left out.</p>",
        _table({"tokens per step": _rounded(figures["tokens_per_step"]), **_shapes(figures)}),
        "<h2>Loss</h2>",
        plot([Line("training", [(entry["step"], entry["loss"]) for entry in record.losses])], "step", "loss"),
        "<h2>Accuracy by depth, given the tokens before (training)</h2>",
        plot(_depths(record.losses, "accuracy"), "step", "share", top=1.0),
        "<h2>Accepted by depth (held-out prompts)</h2>",
        plot(_depths(record.marks, "by_depth"), "step", "share", top=1.0),
        "<h2>Tokens per step (held-out prompts)</h2>",
        plot(
            [Line("", [(score["step"], score["tokens_per_step"]) for score in record.marks])], "step", "tokens per step"
        ),
        "<h2>How it was made</h2>",
        _table({**training, **drafter.provenance.get("arguments", {}), "torch": drafter.provenance.get("torch", "")}),
        "</body></html>\n",
    ]
    return "\n".join(sections)


def _shapes(figures: dict[str, Any]) -> dict[str, str]:
    """Tokens per step by the shape of the draft and by the storage of the weights."""
    shapes = {"as a chain": _rounded(figures["chain"]["tokens_per_step"])}
    shapes |= {f"as a tree of {nodes} nodes": _rounded(value) for nodes, value in figures["nodes"].items()}
    shapes |= {f"stored as {form}": _rounded(value) for form, value in figures["stored"].items()}
    return {**shapes, "stored as": figures["stored_as"]}


def _depths(entries: list[dict[str, Any]], name: str) -> list[Line]:
    """One line per depth; an entry may have fewer depths than others."""
    depths = max((len(entry[name]) for entry in entries), default=0)
    return [
        Line(f"depth {depth + 1}", [(e["step"], e[name][depth]) for e in entries if depth < len(e[name])])
        for depth in range(depths)
    ]


def _table(pairs: dict[str, Any]) -> str:
    rows = (f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>" for name, value in pairs.items())
    return f"<table>{''.join(rows)}</table>"


def _rounded(value: float) -> str:
    return f"{value:.3f}"
