"""The turns of a chat, and what of them still fits into the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.errors import PromptError

if TYPE_CHECKING:
    from slipstream.text import Tokenizer


class Conversation:
    """Turns of user and assistant after an optional system message.

    `room` is the context in tokens. An answer is granted its `longest` tokens of it, but never more than half: with a
    small context, remembering something is worth more than a long answer.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, longest: int | None, system: str | None) -> None:
        self.system = system
        self._tokenizer = tokenizer
        self._room = room
        self._answer_room = min(longest or room, room // 2)
        self._turns: list[tuple[str, str | None]] = []  # (user, assistant); the last one may wait for its answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template wants it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self._turns:
            messages.append({"role": "user", "content": asked})
            if answered is not None:
                messages.append({"role": "assistant", "content": answered})
        return messages

    def ask(self, text: str) -> tuple[list[int], int]:
        """Add a question; the prompt, and how many of the oldest turns had to go to make room for it.

        A question that does not fit by itself is refused and leaves the conversation as it was.
        """
        before = list(self._turns)
        self._turns.append((text, None))
        try:
            while True:
                prompt = self._tokenizer.encode_chat(self.messages)
                alone = len(self._turns) == 1
                if len(prompt) + self._answer_room <= self._room or (alone and len(prompt) < self._room):
                    return prompt, len(before) + 1 - len(self._turns)
                if alone:
                    raise PromptError(
                        f"that is {len(prompt)} tokens and the context holds {self._room}, answer included",
                        hint="say less",
                    )
                del self._turns[0]
        except Exception:
            self._turns = before
            raise

    def answered(self, text: str) -> None:
        """Keep the answer; a question that got none is forgotten."""
        asked, _ = self._turns.pop()
        if text:
            self._turns.append((asked, text))

    def forget(self) -> None:
        """Start anew under the same system message."""
        self._turns.clear()
