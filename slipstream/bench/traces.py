"""Acceptance traces: for each step of each answer the offered tree, its confidences, and the accepted path.

A file has one JSON object per line: first a header, with the costs measured on the machine that wrote it, then an
answer each. Traces do not depend on the machine's speed; `simulate` replays them against any machine's costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import CorruptFile, OptionError
from slipstream.tree import TokenTree
from slipstream.types import Delta

FORMAT, VERSION = "slipstream-trace", 1

Json = dict[str, Any]


class Step(NamedTuple):
    """One step: the tree without its root, node by node, and the accepted nodes (numbered from 1)."""

    context: int  # tokens before it
    parents: tuple[int, ...]
    confidence: tuple[float, ...]  # joint probability of the path, by the drafter's own estimate; (): not recorded
    accepted: tuple[int, ...]
    tokens: int  # emitted

    def cut(self, nodes: int | None) -> tuple[int, int]:
        """(nodes, tokens) of this step if only the `nodes` most confident nodes had been offered; None: as it was."""
        if nodes is None or nodes >= len(self.parents) or not self.confidence:
            return len(self.parents), self.tokens
        order = sorted(range(1, len(self.parents) + 1), key=lambda node: (-self.confidence[node - 1], node))
        kept = {0}
        for node in order:  # a path's confidence never grows, so parents come first; ties need the check
            if len(kept) <= nodes and self.parents[node - 1] in kept:
                kept.add(node)
        reached = next((depth for depth, node in enumerate(self.accepted) if node not in kept), len(self.accepted))
        return len(kept) - 1, min(self.tokens, reached + 1)


@dataclass(frozen=True)
class TracedAnswer:
    """The steps of an answer."""

    setting: str
    category: str
    prompt: str
    prompt_tokens: int
    steps: tuple[Step, ...]
    draft_ms: float = 0.0  # per step that drafted
    other_ms: float = 0.0  # per step
    drafters: tuple[str, ...] = ()  # that drew its trees


@dataclass
class Traces:
    """All answers of a file, and its header."""

    header: Json = field(default_factory=dict)
    answers: list[TracedAnswer] = field(default_factory=list)

    @property
    def settings(self) -> list[str]:
        """The settings in order."""
        return list(dict.fromkeys(answer.setting for answer in self.answers))


def steps_of(deltas: Iterable[Delta], prompt_tokens: int) -> Iterator[Step]:
    """The steps of a streamed, traced answer."""
    context = prompt_tokens
    for delta in deltas:
        left = list(delta.token_ids)
        for tree in delta.trees:
            if not left:
                break
            path = tree.walk(left)
            count = min(len(left), len(path) + 1)
            yield _step(tree, path[:count], context, count)
            left, context = left[count:], context + count
        for _ in left:  # plain rounds of a device come without trees
            yield Step(context, (), (), (), 1)
            context += 1


def drafters_of(deltas: Iterable[Delta]) -> tuple[str, ...]:
    """Who drew the trees of a traced answer."""
    found = {origin for delta in deltas for tree in delta.trees for origin in tree.origins}
    return tuple(sorted(origin for origin in found if origin is not None))


def _step(tree: TokenTree, path: Sequence[int], context: int, tokens: int) -> Step:
    """A step without scouts, which can never be accepted; nodes are numbered anew."""
    number, parents, confidence = {0: 0}, [], []
    for node in range(1, len(tree)):
        if not tree.scouts[node]:
            number[node] = len(number)
            parents.append(number[tree.parents[node]])
            confidence.append(round(tree.confidence[node], 4))
    return Step(context, tuple(parents), tuple(confidence), tuple(number[node] for node in path), tokens)


def save(traces: Traces, path: Path) -> None:
    """Write a file of traces."""
    lines = [json.dumps({"format": FORMAT, "version": VERSION, **traces.header}, ensure_ascii=False)]
    for answer in traces.answers:
        steps = [[step.context, step.parents, step.confidence, step.accepted, step.tokens] for step in answer.steps]
        facts = {name: value for name, value in vars(answer).items() if name != "steps"}
        lines.append(json.dumps({**facts, "steps": steps}, ensure_ascii=False))
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def load(path: Path) -> Traces:
    """Read a file of traces; a bad line is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise OptionError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    traces = Traces()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if number == 1:
                if entry.get("format") != FORMAT or entry.get("version") != VERSION:
                    raise CorruptFile(f"{str(path)!r} has no traces of `slipstream bench --trace`")
                traces.header = entry
            else:
                traces.answers.append(_answer(entry))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            raise CorruptFile(f"{str(path)!r} line {number} is not a trace") from None
    if not traces.answers:
        raise CorruptFile(f"{str(path)!r} has no traces")
    return traces


def _answer(entry: Mapping[str, Any]) -> TracedAnswer:
    steps = tuple(
        Step(int(context), tuple(parents), tuple(confidence), tuple(accepted), int(tokens))
        for context, parents, confidence, accepted, tokens in entry["steps"]
    )
    rest = {name: value for name, value in entry.items() if name not in ("steps", "drafters")}
    return TracedAnswer(**rest, steps=steps, drafters=tuple(entry.get("drafters", ())))
