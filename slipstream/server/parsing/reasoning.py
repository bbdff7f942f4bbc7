"""Reasoning parts: what a model thinks between two tags before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.server.parsing.scanner import Scanner, held_back


@dataclass(frozen=True)
class ReasoningStyle:
    """The tags of a reasoning part, and whether an answer begins inside it even where no tag was opened."""

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    special: bool = False  # whether the tags are special tokens


REASONING_STYLES = {
    "qwen3": ReasoningStyle(),
    "deepseek_r1": ReasoningStyle(always=True),
    "mistral": ReasoningStyle("[THINK]", "[/THINK]", special=True),
}


def find_reasoning_style(template: str) -> str | None:
    """The style whose end tag a chat template contains; some templates use it only to cut the part from old turns."""
    names = (name for name, style in REASONING_STYLES.items() if style.end in template)
    return next(names, None)


def begins_inside(style: ReasoningStyle, prompt_end: str) -> bool:
    """Whether the answer to this prompt begins inside a reasoning part."""
    return style.always or prompt_end.rstrip().endswith(style.start)


class ReasoningParser(Scanner):
    """Splits a text into one reasoning part, at its beginning, and content.

    White space between tags and text belongs to the tags. An answer that ends inside the part is reasoning only.
    """

    def __init__(self, style: ReasoningStyle, inside: bool) -> None:
        super().__init__()
        self.needs_special_tokens = style.special
        self._style = style
        self._inside = inside
        self._state = self._beginning

    def _advance(self) -> bool:
        return self._state()

    def _beginning(self) -> bool:
        """Before the first character that is not white space; a start tag may follow one of the prompt."""
        start = self._style.start
        text = self._rest.lstrip()
        if not self._ended and start.startswith(text) and text != start:
            return False
        if text.startswith(start):
            self._rest, self._inside = text[len(start) :], True
        elif self._inside:
            self._rest = text
        self._state = self._before_thought if self._inside else self._answer
        return True

    def _before_thought(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest:
            self._state = self._thought
        return bool(self._rest)

    def _thought(self) -> bool:
        end = self._style.end
        place = self._rest.find(end)
        if place >= 0:
            self._reasoning.append(self._take(place).rstrip())
            self._take(len(end))
            self._state = self._before_answer
            return True
        ready = self._rest if self._ended else self._rest[: len(self._rest) - held_back(self._rest, end)].rstrip()
        self._reasoning.append(self._take(len(ready)))
        return False

    def _before_answer(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest:
            self._state = self._answer
        return bool(self._rest)

    def _answer(self) -> bool:
        self._content.append(self._take(len(self._rest)))
        return False
