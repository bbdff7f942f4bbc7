"""Word wrap for streamed text."""

from __future__ import annotations

import unicodedata

_FENCES = ("```", "~~~")
_VERBATIM = (*_FENCES, "    ", "\t", "|")  # prefixes of lines of code and tables


def cells(text: str) -> int:
    """Terminal columns of a text."""
    return sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # combining or invisible
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class WordWrap:
    """Puts words that would cross the edge of the terminal on the next line.

    A word waits until it is complete. Code (fenced or indented), tables, and words longer than a line pass unchanged,
    so that text copied from the terminal is the model's own.
    """

    def __init__(self, width: int) -> None:
        self._width = max(1, width)
        self._fence = ""  # of the open code block
        self._start_line()

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        return "".join(map(self._character, text))

    def flush(self) -> str:
        """The rest at the end of a line or of the text."""
        shown = ("" if self._decided else self._decide()) + self._settle()
        return shown + (self._gap if self._column + len(self._gap) <= self._width else "")

    def _start_line(self) -> None:
        self._line = ""  # unwrapped
        self._decided = self._verbatim = bool(self._fence)
        self._column = 0  # of the shown text
        self._gap = ""  # spaces before the word; not shown at a line break
        self._word = ""
        self._overlong = False  # the word is longer than a line and no longer waits

    def _character(self, character: str) -> str:
        if character == "\n":
            shown = self.flush()
            mark = self._line.strip()[:3]
            if self._fence:
                self._fence = "" if mark == self._fence else self._fence
            elif mark in _FENCES:
                self._fence = mark
            self._start_line()
            return shown + "\n"
        self._line += character
        if self._decided:
            return character if self._verbatim else self._prose(character)
        undecided = any(mark.startswith(self._line) and mark != self._line for mark in _VERBATIM)
        return "" if undecided else self._decide()

    def _decide(self) -> str:
        """Decide whether the line is prose, and show its held-back start."""
        self._decided, self._verbatim = True, self._line.startswith(_VERBATIM)
        return self._line if self._verbatim else "".join(map(self._prose, self._line))

    def _prose(self, character: str) -> str:
        if character in " \t":
            shown = self._settle()
            self._gap += character
            return shown
        if _cells(character) == 2:  # a line may break before and after it
            shown = self._settle()
            self._word = character
            return shown + self._settle()
        self._word += character
        if not self._overlong and cells(self._word) <= self._width:
            return ""
        shown, self._overlong = self._settle(), True
        return shown

    def _settle(self) -> str:
        """Show the word: on this line if it fits or if the line has no other word."""
        word, gap, size = self._word, self._gap, cells(self._word)
        if not word:
            self._overlong = False
            return ""
        self._word = self._gap = ""
        if self._overlong:  # the terminal wraps it
            self._column = (self._column + size - 1) % self._width + 1
            return word
        if self._column and self._column + len(gap) + size > self._width:
            self._column, gap = 0, "\n"
        else:
            self._column += len(gap)
        self._column = (self._column + size - 1) % self._width + 1
        return gap + word
