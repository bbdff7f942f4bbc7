"""Sections with sample answers: who wrote which token, a tree, and the decisions of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from slipstream.bench.report import charts
from slipstream.bench.report.charts import Series
from slipstream.bench.report.tree_chart import token_tree
from slipstream.bench.samples import interest

Json = Mapping[str, Any]

_LONGEST_PROMPT = 260  # characters
_KINDS = ("s1", "s2", "s3", "s4", "s5")


def samples(
    taken: Sequence[Json], series: Sequence[Series], *, section: Callable[[str, str, str], str]
) -> Iterator[str]:
    """What settings did on a few prompts."""
    if not taken:
        return
    origins = _origins(taken)
    kinds = {name: _KINDS[number % len(_KINDS)] for number, name in enumerate(origins)}
    shown = "".join(_said(each, kinds) for each in _chosen(taken, series))
    marks = "".join(f'<li><i class="{kinds[name]}"></i>drafted by {escape(name)}</li>' for name in origins)
    note = "Marked tokens were drafted and accepted; the others are the model's own, one at the end of each step."
    yield section("Who wrote it", note, f'<ul class="legend">{marks}<li>unmarked: the model itself</li></ul>{shown}')
    trees = [each for each in taken if each["tree"] is not None and len(each["tree"]["accepted"]) > 0]
    if trees:
        best = max(trees, key=lambda each: interest(each["tree"]["parents"], len(each["tree"]["accepted"])))
        tree = best["tree"]
        note = (
            f"One step of {best['setting']}: {len(tree['tokens']) - 1} tokens drafted as a tree, verified in one pass, "
            f"{len(tree['accepted'])} accepted (filled), and one of the model's own (bold frame)."
        )
        yield section("A step", note, f'<div class="scroll">{token_tree(tree, kinds)}</div>')
    decided = [each for each in taken if each["decisions"]]
    if decided:
        ways = list(dict.fromkeys("+".join(step["drafters"]) for each in decided for step in each["decisions"]))
        several = [way for way in ways if way and way not in kinds]
        fresh = {way: _KINDS[(len(kinds) + number) % len(_KINDS)] for number, way in enumerate(several)}
        colours = {way: kinds.get(way) or fresh[way] for way in ways if way}
        drawn = "".join(
            f"<figure><h3>{escape(each['setting'])}: {escape(each['category'])}</h3>"
            f"{charts.decisions(each['decisions'], colours)}</figure>"
            for each in decided[:2]
        )
        marks = "".join(f'<li><i class="{kind}"></i>{escape(way)}</li>' for way, kind in colours.items())
        note = "What the policy decided in each step of an answer. Hover over a bar for its reason."
        yield section(
            "Decisions", note, f'{drawn}<ul class="legend">{marks}<li><i class="plain"></i>no draft</li></ul>'
        )


def _chosen(taken: Sequence[Json], series: Sequence[Series]) -> list[Json]:
    """The samples of the last setting, which is the richest."""
    last = series[-1].name if series else ""
    return [each for each in taken if each["setting"] == last] or list(taken[:2])


def _origins(taken: Sequence[Json]) -> list[str]:
    found = [origin for each in taken for _, origin in each["pieces"] if origin]
    found += [origin for each in taken if each["tree"] for origin in each["tree"]["origins"] if origin]
    return list(dict.fromkeys(found))


def _said(sample: Json, kinds: Mapping[str, str]) -> str:
    prompt = " ".join(sample["prompt"].split())
    prompt = prompt if len(prompt) <= _LONGEST_PROMPT else f"{prompt[:_LONGEST_PROMPT]} …"
    pieces = "".join(
        f'<mark class="{kinds[origin]}" title="{escape(origin)}">{escape(text)}</mark>' if origin else escape(text)
        for text, origin in sample["pieces"]
    )
    counted = f"{sample['tokens']} tokens in {sample['steps']} steps of the model"
    return (
        f'<div class="said"><q>{escape(sample["category"])}: {escape(prompt)}</q><pre>{pieces}</pre>'
        f'<p class="note">{escape(sample["setting"])}: {counted}</p></div>'
    )
