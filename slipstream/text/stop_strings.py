"""Stop strings: found in a text that arrives in parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from slipstream.errors import OptionError


class StopStrings:
    """Finds the first stop string in a text that arrives in parts, and holds back what may become one.

    The match that is complete first wins; of several complete at the same character, the longest. So the result does
    not depend on how the text was split, and the `push` that completes a match returns it. `shown`: whether the match
    itself is part of the text.
    """

    def __init__(self, stops: Iterable[str], *, shown: bool = False) -> None:
        self._shown = shown
        self._stops = tuple(dict.fromkeys(stops))
        if not all(isinstance(stop, str) and stop for stop in self._stops):
            raise OptionError("a stop string is empty or not a string", hint="give strings of one character or more")
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that is now complete or None).

        A match is final: what follows is never shown, and further pushes return the match again.
        """
        if self._found is not None or not self._stops:
            return ("", self._found) if self._found is not None else (text, None)
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [stop for index, stop in enumerate(self._stops) if self._advance(index, character)]
            if complete:
                self._found, self._held = max(complete, key=len), ""
                return seen[: end if self._shown else end - len(self._found)], self._found
        cut = len(seen) - max(self._matched)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text that was held back, at the end; the search starts anew."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def copy(self) -> StopStrings:
        """A copy that continues from the same place."""
        other = copy.copy(self)
        other._matched = list(self._matched)
        return other

    def _advance(self, index: int, character: str) -> bool:
        """One Knuth-Morris-Pratt step: whether this character completes the stop string."""
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        self._matched[index] = matched
        return matched == len(stop)


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length - 1]
        borders.append(length + (pattern[length] == character))
    return borders
