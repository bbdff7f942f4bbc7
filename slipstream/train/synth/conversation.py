"""From a number to a conversation: a user's turns, and the target's answers.

With a chat template most first turns are whole requests (`requests.py`). For the others the target gets the start of a
chat, up to the user's words, and the first few of them (`openings.py`); it continues until it ends the user's turn. The
turn is then asked as usual. A model without a template continues an opening as plain text: some of its tokens are the
prompt.

Some answers become texts that another question is about, so there are long prompts too.

Everything is drawn from (seed, number of the conversation), so each can be reproduced, alone or in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from slipstream.bench.tune.prompts import Conversation, Dialogue, encode, question
from slipstream.errors import OptionError, PromptError
from slipstream.noise import key
from slipstream.text import Tokenizer
from slipstream.train.data_files import ABOUT, CUT, FOLLOWED
from slipstream.train.synth import openings
from slipstream.train.synth.loops import Signature, loop_start, signature
from slipstream.train.synth.requests import KINDS, Requests, own_words
from slipstream.types import Output, SamplingParams

LONGEST_TURN = 256  # tokens that the target writes as a user
LONGEST_PROMPT = 2048  # tokens reserved for a prompt from a file
LEAST_ANSWER = 16  # tokens; conversations with less room, or fewer before a loop, are dropped
PLAIN_TURN = (8, 64)  # tokens of a plain text that serve as its prompt
TURN_TEMPERATURE = 0.7  # of user turns: at 1 a small model writes what no user would
TEMPERATURES = (0.0, 0.0, 0.7)  # of answers, equally likely: most of them are greedy
WHOLE_REQUESTS = 5 / 6  # share of first turns that are whole requests; the target writes the others
SECOND_TURNS = 1 / 5  # share of conversations with a second turn, if the first answer is complete
ABOUT_TEXTS = 1 / 10  # share of conversations about an answer, which is kept only as part of the prompt
LEAST_TEXT = 64  # tokens of an answer that another question is about
RECIPE = 4  # another recipe makes other conversations from the same seed

# Sources of a first turn: an opening, or a whole request.
SOURCES = (*openings.NAMES, *(f"whole request: {kind}" for kind in KINDS))

_MARKER = "qvxhzwkj"  # placeholder for the user's words in a rendered chat

Ask = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class Made:
    """A conversation: the arguments of `ChatWriter.append`."""

    tokens: list[int]
    prompt_len: int
    temperature: float
    source: int
    flags: int
    signature: Signature


@dataclass(frozen=True)
class Dropped:
    """A conversation that could not be used."""

    reason: str


Task = Generator[Ask, Output, Made | Dropped]  # requests texts until the conversation is complete


class _Unusable(Exception):
    """Why the target's text cannot be used."""


@dataclass(frozen=True)
class _Answered:
    """A conversation with its last answer: the prompt, the answer, and whether it was cut or ended by itself."""

    conversation: Conversation
    prompt: list[int]
    answer: list[int]
    cut: bool
    ended: bool


class Author:
    """Writes conversations for one target, or answers those of a file (`dialogues`).

    `end_ids` end a turn or an answer; `context` is the longest sequence of the target.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        *,
        seed: int,
        max_tokens: int,
        context: int,
        dialogues: Sequence[Dialogue] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._seed = seed
        self._max_tokens = max_tokens
        self._dialogues = dialogues
        self._turn_end: dict[str, Any] = {}  # sampling parameters that end a user's turn
        self._second_turns = tokenizer.has_chat_template
        self._writes_turns = tokenizer.has_chat_template and dialogues is None
        self._requests = Requests(own_words(tokenizer) if self._writes_turns else ())
        if tokenizer.has_chat_template:
            try:
                self._turn_end = self._ending()
            except OptionError:
                if dialogues is None:
                    raise
                self._second_turns = False  # conversations of a file have none
        self.longest = min(context, self._longest())  # token limit of a conversation

    def _ending(self) -> dict[str, Any]:
        """How the end of a user's turn is detected, if it is not a token that ends an answer too."""
        answered = [*question("x"), {"role": "assistant", "content": "y"}]
        (_, after), _ = self._around([]), self._around(answered)  # a template that cannot be cut is refused now
        after = after.strip()
        first = self._tokenizer.encode(after, add_special=False)[:1]
        if not first or first[0] in self._end_ids:
            return {}
        if first[0] in self._tokenizer.special_ids:
            return {"stop_token_ids": first}
        return {"stop": after.splitlines()[0]}

    def _around(self, before: Conversation) -> tuple[str, str]:
        """What the chat template writes before and after the words of the user's next turn."""
        rendered = self._tokenizer.render_chat([*before, *question(_MARKER)])
        head, found, tail = rendered.partition(_MARKER)
        if not found or _MARKER in tail:
            times = "more than once" if found else "not at all"
            raise OptionError(
                f"the chat template shows a user's words {times}, so the model cannot be made to write them",
                hint="give prompts: --prompts FILE",
            )
        return head, tail

    def _longest(self) -> int:
        chats = self._tokenizer.has_chat_template
        frame = len(encode(self._tokenizer, question("x")))
        if self._dialogues is None:
            first, turns = frame + LONGEST_TURN, 2 if chats else 1
        else:
            if not chats and any(dialogue.later for dialogue in self._dialogues):
                raise PromptError("the model has no chat template and a prompt has several turns")
            first = max(len(encode(self._tokenizer, dialogue.asked)) for dialogue in self._dialogues)
            turns = max(2 if chats else 1, *(1 + len(dialogue.later) for dialogue in self._dialogues))
        return min(first, LONGEST_PROMPT) + turns * self._max_tokens + (turns - 1) * (frame + LONGEST_TURN)

    @property
    def most_written(self) -> int:
        """Tokens that the target writes for a conversation if all limits are reached, averaged over second turns."""
        answers, turns = 1 + SECOND_TURNS, SECOND_TURNS + (1 - WHOLE_REQUESTS if self._writes_turns else 1)
        if self._dialogues is not None:
            answers += sum(len(dialogue.later) for dialogue in self._dialogues) / len(self._dialogues)
            turns = SECOND_TURNS
        return round(self._max_tokens * answers + LONGEST_TURN * turns)

    def write(self, number: int) -> Task:
        """Write conversation `number`."""
        draw = random.Random(key(self._seed, number))
        seeds = (key(self._seed, number, stage) for stage in count(1))
        temperature, fate = draw.choice(TEMPERATURES), draw.random()
        goes_on, asks_about = fate < SECOND_TURNS, 0 <= fate - SECOND_TURNS < ABOUT_TEXTS
        try:
            source, (asked, later) = yield from self._begin(number, draw, seeds)
            said = yield from self._answer(asked, temperature, seeds)
        except _Unusable as why:
            return Dropped(str(why))
        words = "\n".join(message["content"] for message in asked if message["role"] == "user")
        flags = CUT if said.cut else 0
        goes_on = goes_on and not later and said.ended and self._second_turns
        while later or goes_on:
            before = [*said.conversation, {"role": "assistant", "content": self._text(said.answer)}]
            try:
                if later:
                    turn, later = later[0], later[1:]
                else:
                    turn, goes_on = (yield from self._turn(before, openings.follow_up(draw), seeds)), False
                said = yield from self._answer([*before, *question(turn)], temperature, seeds)
            except _Unusable:  # the conversation before this turn is still complete
                break
            flags = FOLLOWED | (CUT if said.cut else 0)
        if asks_about and self._writes_turns and len(said.answer) >= LEAST_TEXT:
            asked = question(openings.request(draw, self._text(said.answer).strip()))
            try:
                said = yield from self._answer(asked, temperature, seeds)
                flags = ABOUT | (CUT if said.cut else 0)
            except _Unusable:
                pass
        marks = signature(self._tokenizer.encode(words, add_special=False))
        return Made([*said.prompt, *said.answer], len(said.prompt), temperature, source, flags, marks)

    def _begin(
        self, number: int, draw: random.Random, seeds: Iterator[int]
    ) -> Generator[Ask, Output, tuple[int, Dialogue]]:
        """The source of the first prompt, and the prompt."""
        if self._dialogues is not None:
            return 0, self._dialogues[number]
        if self._tokenizer.has_chat_template and draw.random() < WHOLE_REQUESTS:
            kind, words = self._requests.make(draw)
            return len(openings.NAMES) + kind, Dialogue(question(words))
        head = self._around([])[0] if self._tokenizer.has_chat_template else ""
        kind, words = openings.opening(draw)
        while not (words or self._tokenizer.encode(head)):  # a model that cannot start from an empty prompt
            kind, words = openings.opening(draw)
        if self._tokenizer.has_chat_template:
            turn = yield from self._turn([], words, seeds)
        else:
            turn = yield from self._plain_turn(words, draw.randint(*PLAIN_TURN), seeds)
        return kind, Dialogue(question(turn))

    def _turn(self, before: Conversation, words: str, seeds: Iterator[int]) -> Generator[Ask, Output, str]:
        """The user's next turn, starting with these words."""
        prompt = self._tokenizer.encode(self._around(before)[0] + words, add_special=False)
        if len(prompt) + LONGEST_TURN > self.longest:
            raise _Unusable("prompt too long")
        how: dict[str, Any] = {"temperature": TURN_TEMPERATURE, "max_tokens": LONGEST_TURN, **self._turn_end}
        params = SamplingParams(seed=next(seeds), **how)
        output = yield prompt, params
        if output.finish_reason == "length":
            raise _Unusable("turn too long")
        return self._usable(words, output.text if params.stop_strings else self._text(output.token_ids, prompt), output)

    def _plain_turn(self, words: str, length: int, seeds: Iterator[int]) -> Generator[Ask, Output, str]:
        prompt = self._tokenizer.encode(words)
        output = yield prompt, SamplingParams(temperature=TURN_TEMPERATURE, seed=next(seeds), max_tokens=length)
        return self._usable(words, self._text(output.token_ids, prompt), output)

    def _usable(self, words: str, written: str, output: Output) -> str:
        if not written.strip():
            raise _Unusable("empty turn")
        if loop_start(output.token_ids) is not None:
            raise _Unusable("turn loops")
        return (words + written).strip()

    def _answer(
        self, conversation: Conversation, temperature: float, seeds: Iterator[int]
    ) -> Generator[Ask, Output, _Answered]:
        prompt = encode(self._tokenizer, conversation)
        room = min(self._max_tokens, self.longest - len(prompt))
        if room < min(self._max_tokens, LEAST_ANSWER):
            raise _Unusable("prompt too long")
        output = yield prompt, SamplingParams(temperature=temperature, seed=next(seeds), max_tokens=room)
        answer = output.token_ids
        if not self._text(answer).strip():
            raise _Unusable("empty answer")
        said = _Answered(conversation, prompt, answer, cut=False, ended=output.finish_reason == "stop")
        loop = None if said.ended else loop_start(answer)  # an answer that ended by itself is no loop
        if loop is None:
            return said
        if loop < LEAST_ANSWER:
            raise _Unusable("answer loops")
        return replace(said, answer=answer[:loop], cut=True)

    def _text(self, tokens: list[int], after: Sequence[int] = ()) -> str:
        """The text of tokens that follow others (some tokenizers drop the space before the first token of a text)."""
        ended = tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens
        return self._tokenizer.decode([*after, *ended]).removeprefix(self._tokenizer.decode(after))
