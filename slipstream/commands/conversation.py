"""The turns of a chat, and those that still fit into the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import PromptError

if TYPE_CHECKING:
    from slipstream.text import Tokenizer


Turn = tuple[str, str | None]  # user, assistant; the last one may not have its answer yet


class Conversation:
    """Turns of user and assistant after an optional system message; all are kept, the prompt has the latest.

    `room` is the context in tokens. `longest` tokens of it are reserved for an answer, but at most half: with a small
    context, more history is worth more than a long answer.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, longest: int | None, system: str | None) -> None:
        self.system = system
        self.longest = longest
        self._tokenizer = tokenizer
        self._room = room
        self._turns: list[Turn] = []
        self._dropped = 0  # oldest turns that the prompt no longer has

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages."""
        return self._messages(0)

    @property
    def turns(self) -> int:
        """Number of turns."""
        return len(self._turns)

    @property
    def context(self) -> int:
        """Tokens of the turns in the prompt."""
        return len(self._tokenizer.encode_chat(self._messages(self._dropped))) if self._turns else 0

    def _messages(self, first: int) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answered in self._turns[first:]:
            messages.append({"role": "user", "content": question})
            if answered is not None:
                messages.append({"role": "assistant", "content": answered})
        return messages

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add a question; returns the prompt, and how many of the oldest turns were dropped from it.

        A question that does not fit by itself is refused and leaves the conversation unchanged.
        """
        self._turns.append((text, None))
        answer_room = min(self.longest or self._room, self._room // 2)
        try:
            for first in range(self._dropped, len(self._turns)):
                prompt = self._tokenizer.encode_chat(self._messages(first))
                alone = first == len(self._turns) - 1
                if len(prompt) + answer_room <= self._room or (alone and len(prompt) < self._room):
                    newly, self._dropped = first - self._dropped, first
                    return prompt, newly
            raise PromptError(
                f"{len(prompt)} prompt tokens, but the context holds {self._room}, answer included", hint="shorten it"
            )
        except Exception:
            self._turns.pop()
            raise

    def answered(self, text: str) -> None:
        """Keep the answer; without one the question is dropped."""
        question, _ = self._turns.pop()
        if text:
            self._turns.append((question, text))

    def take_back(self) -> Turn | None:
        """Remove the last turn, if there is one."""
        if not self._turns:
            return None
        self._dropped = min(self._dropped, len(self._turns) - 1)
        return self._turns.pop()

    def put_back(self, turn: Turn) -> None:
        """Undo `take_back`."""
        self._turns.append(turn)

    def forget(self) -> None:
        """Start again with the same system message."""
        self._turns.clear()
        self._dropped = 0
