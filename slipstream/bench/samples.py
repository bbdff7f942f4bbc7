"""Traced answers for a report: who wrote which token, one tree of a step, and what the policy decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.bench.measure import Run
from slipstream.bench.schedule import PLAIN, stratified
from slipstream.text import IncrementalDecoder, Tokenizer
from slipstream.tree import TokenTree
from slipstream.types import Delta, Stats

_PROMPTS, _SETTINGS = 2, 4  # at most
_TREE_NODES = 40  # at most, of the tree that is drawn

Json = dict[str, Any]


def take_samples(run: Run) -> list[Json]:
    """A few answers of each setting under the base condition, untimed; they warm the settings up as well."""
    fitting = run.fitting
    order = [fitting[place] for place in stratified([run.prompts[index] for index in fitting])]
    chosen = list({run.prompts[index].category: index for index in reversed(order)}.values())[-_PROMPTS:]
    settings = [name for name in run.settings if name != PLAIN][:_SETTINGS]
    return [_sample(run, index, setting) for index in chosen for setting in settings]


def _sample(run: Run, index: int, setting: str) -> Json:
    prompt_ids, params = run.request(index, setting)
    tokenizer = run.llm.get_tokenizer()
    decoder = IncrementalDecoder(tokenizer, prompt_ids)
    pieces: list[tuple[str, str | None]] = []
    steps: list[tuple[TokenTree, Delta]] = []
    stats = Stats()
    for delta in run.llm.stream(prompt_ids, params, trace=True):
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            pieces.append((decoder.push([token]), origin))
        steps += [(tree, delta) for tree in delta.trees[:1]]
        if delta.completion is not None:
            stats = delta.completion.stats
    pieces.append((decoder.flush(), None))
    prompt = run.prompts[index]
    return {
        "setting": setting,
        "category": prompt.category,
        "prompt": str(prompt.messages[-1]["content"]) if prompt.messages else tokenizer.decode(prompt_ids),
        "pieces": _joined(pieces),
        "tokens": stats.emitted,
        "steps": stats.steps,
        "tree": _drawn(steps, tokenizer),
        "decisions": [_decision(each) for each in getattr(stats, "decisions", [])],
    }


def _joined(pieces: Sequence[tuple[str, str | None]]) -> list[list[str | None]]:
    """Neighbours of one origin as one piece."""
    found: list[list[str | None]] = []
    for text, origin in pieces:
        if found and found[-1][1] == origin:
            found[-1][0] = (found[-1][0] or "") + text
        elif text:
            found.append([text, origin])
    return found


def interest(parents: Sequence[int], accepted: int) -> tuple[int, int]:
    """How much a drawn tree shows: an accepted path of a few tokens, among some branches that were not taken."""
    leaves = len(parents) - len(set(parents) - {-1})
    return min(accepted, 5) + min(leaves, 6), -len(parents)


def _drawn(steps: Sequence[tuple[TokenTree, Delta]], tokenizer: Tokenizer) -> Json | None:
    """The tree that shows most: branches, and a long accepted path."""
    shown = [step for step in steps if 2 <= step[0].drafted <= _TREE_NODES]
    if not shown:
        return None
    tree, delta = max(shown, key=lambda step: interest(step[0].parents, len(step[0].walk(step[1].token_ids))))
    path = tree.walk(delta.token_ids)
    own = delta.token_ids[len(path)] if len(delta.token_ids) > len(path) else None
    return {
        "tokens": [tokenizer.token_text(token) for token in tree.tokens],
        "parents": list(tree.parents),
        "origins": list(tree.origins),
        "confidence": [round(value, 3) for value in tree.confidence],
        "accepted": path,
        "own": None if own is None else tokenizer.token_text(own),
    }


def _decision(decision: Any) -> Json:
    """A decision of the policy as plain data, with its reason."""
    return {**decision._asdict(), "reason": decision.reason}
