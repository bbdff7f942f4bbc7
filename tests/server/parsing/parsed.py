"""What a parser makes of a text, whole or in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slipstream.server.parsing import OutputParser, Parsed


@dataclass
class Whole:
    """All parts of an answer, put together as a client does."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments

    def add(self, parsed: Parsed) -> None:
        self.content += parsed.content
        self.reasoning += parsed.reasoning
        for delta in parsed.tool_calls:
            if delta.name is not None:
                assert delta.id is not None and delta.index == len(self.calls)
                assert delta.arguments == "", "the first part of a call has its name alone"
                self.calls.append((delta.id, delta.name, ""))
            else:
                assert delta.id is None and delta.index == len(self.calls) - 1
                assert delta.arguments, "no empty deltas"
                id, name, arguments = self.calls[-1]
                self.calls[-1] = (id, name, arguments + delta.arguments)

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]


def parsed(parser: OutputParser, pieces: Iterable[str]) -> Whole:
    whole = Whole()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish())
    assert parser.called == bool(whole.calls)
    return whole


def counted() -> Callable[[], str]:
    """Ids that are the same each time."""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"
