"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from slipstream.commands.conversation import Conversation
from slipstream.commands.lines import END, Interrupts, LineReader
from slipstream.commands.opening import open_llm, stats_line
from slipstream.commands.options import Described, EngineSetup, Sampling
from slipstream.commands.terminal import harmless, note
from slipstream.errors import OptionError, PromptError, unknown_choice
from slipstream.folders import expanded
from slipstream.types import Stats

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.types import SamplingParams

_HELP = '''\
/help          this
/reset         forget the conversation, keep the system message
/system TEXT   set the system message; without TEXT, show it
/stats         counters of the whole conversation
/save FILE     write the conversation as JSON
/exit          leave (so does Ctrl-D)
A line that ends in \\ goes on in the next one; so does everything between two lines of """.
Ctrl-C stops an answer.'''


def chat(
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    system: Annotated[str | None, Described("system message", metavar="TEXT")] = None,
) -> None:
    """Talk with the model."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    sampling.require_single_answer("chat")
    params = sampling.params()
    llm = open_llm(setup)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise OptionError(f"{setup.model} has no chat template, so it cannot chat", hint="use run --raw")
    Chat(llm, params, system).talk()


class Chat:
    """A conversation that is under way."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        assert llm.tokenizer is not None
        self._llm = llm
        self._params = params
        self._conversation = Conversation(llm.tokenizer, llm.max_model_len, params.max_tokens, system)
        self._stats = Stats()
        self._reader = LineReader()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: note(_HELP, "bold"),
            "reset": self._reset,
            "system": self._system,
            "stats": lambda rest: note(stats_line(self._stats) if self._stats.steps else "no answer yet"),
            "save": self._save,
        }

    def talk(self) -> None:
        """Read and answer until the user leaves."""
        if self._reader.interactive:
            drafter = self._llm.engine.drafter.name
            note(f"{self._llm.model.name}, drafter {drafter}. /help for help, Ctrl-D to leave.")
        while True:
            try:
                text, is_command = self._reader.read()
                if text is END or (is_command and text.split() == ["/exit"]):
                    return
                if is_command:
                    self._obey(text)
                elif text.strip():
                    self._answer(text)
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /exit leaves)")
            except OptionError as error:
                note(f"error: {error}", "bad")

    def _obey(self, line: str) -> None:
        name, _, rest = line.removeprefix("/").partition(" ")
        if name not in self._commands:
            raise unknown_choice("command", f"/{name}", [f"/{known}" for known in (*self._commands, "exit")])
        self._commands[name](rest.strip())

    def _answer(self, text: str) -> None:
        conversation = self._conversation
        prompt_ids, dropped = conversation.ask(text)
        if dropped:
            note(f"(the context holds {self._llm.max_model_len} tokens: the oldest {dropped} turns were dropped)")
        said, ending = "", "stopped"
        deltas = self._llm.stream(prompt_ids, self._params)
        try:
            with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt):
                for delta in deltas:
                    said += delta.text
                    print(harmless(delta.text, sys.stdout), end="", flush=True)
                    if delta.completion is not None:
                        self._stats.add(delta.completion.stats)
                        cut = ", cut by --max-tokens or the context" if delta.finish_reason == "length" else ""
                        ending = stats_line(delta.completion.stats) + cut
                    elif interrupts.seen:
                        break
        finally:
            conversation.answered(said)
            del deltas  # an unfinished generator that nobody holds is closed, which cancels the request
        if not said.endswith("\n"):
            print(flush=True)
        note(f"({ending})")

    def _reset(self, rest: str) -> None:
        self._conversation.forget()
        note("(forgotten)")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = rest
        note(f"(system message: {self._conversation.system or 'the chat template decides'})")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PromptError("/save needs a file name", hint="/save talk.json")
        path = expanded(rest)
        saved = json.dumps(self._conversation.messages, ensure_ascii=False, indent=2)
        try:
            path.write_text(saved + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {path}: {error.strerror or error}") from None
        note(f"(saved {len(self._conversation.messages)} messages to {path})")
