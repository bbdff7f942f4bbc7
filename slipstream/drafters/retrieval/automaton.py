"""A suffix automaton that grows token by token and counts occurrences.

It recognises every substring of the text so far. It has at most two states per token, and following it costs one
dictionary look-up per token. `suffix` uses it twice: to find the longest suffix of the text that occurred before, and
to see what followed it, how often.
"""

from __future__ import annotations

_COUNT_HOPS = 64  # suffix links followed to count an occurrence: exact for long contexts, enough for short ones

ROOT = 0


class SuffixAutomaton:
    """Substrings of a growing text."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]  # of the longest string of a state
        self.count: list[int] = [0]  # how often the strings of a state occurred
        self.last = ROOT

    def __len__(self) -> int:
        return len(self.next)

    def _state(self, length: int, link: int, follow: dict[int, int], count: int) -> int:
        self.next.append(follow)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def start(self) -> None:
        """Begin another text, which does not continue the one before."""
        self.last = ROOT

    def extend(self, token: int) -> None:
        """Append one token to the current text."""
        following = self.next[self.last].get(token)
        if following is not None:  # only after start(): the string is known from an earlier text
            if self.length[following] == self.length[self.last] + 1:
                self.last = following
            else:
                self.last = self._clone(self.last, token, following)
            self._count(self.last)
            return
        state, current = self.last, self._state(self.length[self.last] + 1, ROOT, {}, 0)
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = current
            state = self.link[state]
        if state != -1:
            following = self.next[state][token]
            if self.length[following] != self.length[state] + 1:
                following = self._clone(state, token, following)
            self.link[current] = following
        self.last = current
        self._count(current)

    def _clone(self, state: int, token: int, following: int) -> int:
        """Split off the strings of `following` that are one token longer than those of `state`."""
        clone = self._state(
            self.length[state] + 1, self.link[following], dict(self.next[following]), self.count[following]
        )
        self.link[following] = clone
        while state != -1 and self.next[state].get(token) == following:
            self.next[state][token] = clone
            state = self.link[state]
        return clone

    def _count(self, state: int) -> None:
        """One more occurrence of every suffix of the text."""
        for _ in range(_COUNT_HOPS):
            if state <= ROOT:
                break
            self.count[state] += 1
            state = self.link[state]

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow another text through the automaton: the longest suffix of it that occurs here, and its length."""
        while matched <= self.length[self.link[state]] and state != ROOT:
            state = self.link[state]  # the state was split since the last call
        while state != ROOT and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        following = self.next[state].get(token)
        return (ROOT, 0) if following is None else (following, matched + 1)
