"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.commands.conversation import Conversation
from slipstream.commands.shared.explain import explained
from slipstream.commands.shared.lines import END, Interrupts, LineReader
from slipstream.commands.shared.opening import fetch_models, open_llm, stats_line
from slipstream.commands.shared.options import Described, EngineSetup, Sampling, adjusted, require_single_answer
from slipstream.commands.shared.terminal import harmless, note, temporary_line
from slipstream.commands.shared.wrap import WordWrap
from slipstream.errors import OptionError, PromptError, SlipstreamError, unknown_choice
from slipstream.folders import expanded
from slipstream.types import SamplingParams, Stats

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec
    from slipstream.llm import LLM

_HELP = '''\
/help             this help
/retry            answer the last question again
/undo             take the last question and its answer back
/reset            clear the conversation, keep the system message
/system TEXT      set the system message; without TEXT, show it
/set NAME=VALUE   change a sampling parameter, as in /set temperature=0.7; alone, show them
/drafter NAME     change the drafter, as in /drafter ngram:max_n=5; alone, show it
/stats            counters of the conversation
/save FILE        write the whole conversation as JSON to a new file
/exit             leave (so does Ctrl-D)
A line that ends in \\ continues on the next one; so does everything between two lines of """.
Ctrl-C stops an answer.'''


def chat(
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    system: Annotated[str | None, Described("system message", metavar="TEXT")] = None,
    explain: Annotated[bool, Described("say after each answer what was drafted in each step, and why")] = False,
) -> None:
    """Chat with the model."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    require_single_answer(sampling, "chat")
    params = sampling.params()
    llm = open_llm(setup)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise OptionError(f"{setup.model} has no chat template, so it cannot chat", hint="use run --raw")
    Chat(llm, setup.drafter(), params, system, explain=explain).talk()


class Chat:
    """A running conversation."""

    def __init__(
        self, llm: LLM, drafter: DrafterSpec, params: SamplingParams, system: str | None, *, explain: bool = False
    ) -> None:
        assert llm.tokenizer is not None
        self._llm = llm
        self._explain = explain
        self._drafter = drafter
        self._params = params
        self._conversation = Conversation(llm.tokenizer, llm.max_model_len, params.max_tokens, system)
        self._stats, self._answers = Stats(), 0
        self._reader = LineReader()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: note(_HELP, "bold"),
            "retry": self._retry,
            "undo": self._undo,
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "drafter": self._use,
            "stats": self._tell_stats,
            "save": self._save,
        }

    def talk(self) -> None:
        """Read and answer until the user leaves."""
        if self._reader.interactive:
            note(f"{self._llm.model.name}, drafter {self._drafter}. /help for help, Ctrl-D to leave.")
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
            except SlipstreamError as error:
                note(f"error: {error}", "bad")

    def _obey(self, line: str) -> None:
        name, _, rest = line.removeprefix("/").partition(" ")
        if name not in self._commands:
            raise unknown_choice("command", f"/{name}", [f"/{known}" for known in (*self._commands, "exit")])
        self._commands[name](rest.strip())

    def _answer(self, text: str) -> bool:
        """Ask, and show the answer; returns whether there was any text."""
        prompt_ids, dropped = self._conversation.ask(text)
        if dropped:
            note(f"(the context holds {self._llm.max_model_len} tokens: the oldest {dropped} turns were dropped)")
        said, ending, why = "", "stopped", []
        screen = _Screen()
        try:
            deltas = self._llm.stream(prompt_ids, self._params)
            with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt):
                for delta in deltas:
                    said += delta.text
                    screen.show(delta.text)
                    if delta.completion is not None:
                        self._stats.add(delta.completion.stats)
                        self._answers += 1
                        cut = ", cut by max_tokens or the context" if delta.finish_reason == "length" else ""
                        ending = stats_line(delta.completion.stats) + cut
                        why = explained(delta.completion.stats) if self._explain else []
                    elif interrupts.seen:
                        break
            del deltas  # dropping an unfinished generator closes it, which cancels the request
        finally:
            self._conversation.answered(said)
        screen.close()
        note("\n".join([f"({ending})", *why]))
        return bool(said)

    def _retry(self, rest: str) -> None:
        turn = self._conversation.take_back()
        if turn is None:
            raise PromptError("there is no question to repeat")
        if self._params.greedy or self._params.seed is not None:
            note("(the same answer will come: /set temperature=0.7, or seed=none, for another one)")
        kept = False
        try:
            kept = self._answer(turn[0])
        finally:
            if not kept:
                self._conversation.put_back(turn)

    def _undo(self, rest: str) -> None:
        turn = self._conversation.take_back()
        if turn is None:
            raise PromptError("there is no turn to undo")
        first, *more = turn[0].splitlines()
        note(f"(undone: {harmless(first, sys.stderr)}{' ...' if more else ''})")

    def _reset(self, rest: str) -> None:
        turns = self._conversation.turns
        self._conversation.forget()
        self._stats, self._answers = Stats(), 0
        note(f"({turns} turn{'s' if turns > 1 else ''} cleared)" if turns else "(nothing to clear)")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = rest
        note(f"(system message: {self._conversation.system or 'the chat template decides'})")

    def _set(self, rest: str) -> None:
        if not rest:
            note(f"({_changed(self._params)})")
            return
        name, equals, value = (part.strip() for part in rest.partition("="))
        if not equals:
            raise OptionError("/set needs NAME=VALUE", hint="/set temperature=0.7")
        params = adjusted(self._params, {name: _value(value)})
        require_single_answer(params, "chat")
        self._params, self._conversation.longest = params, params.max_tokens
        note(f"({name}={getattr(params, name)!r})")

    def _use(self, rest: str) -> None:
        if rest:
            from slipstream.drafters import parse_speculate

            spec = parse_speculate(rest)
            fetch_models(self._llm.model.name, spec)
            with temporary_line(f"loading {spec} ..."):
                try:
                    self._llm.use(spec)
                except BaseException:
                    self._llm.use(self._drafter)
                    raise
            self._drafter = spec
        note(f"(drafter: {self._drafter})")

    def _tell_stats(self, rest: str) -> None:
        context = f"{self._conversation.context} of {self._llm.max_model_len} tokens of context"
        if not self._answers:
            note(f"(no answer yet, {context})")
            return
        count = f"{self._answers} answer{'s' if self._answers > 1 else ''}"
        note(f"({count}: {stats_line(self._stats, self._answers)}, {context})")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PromptError("/save needs a file name", hint="/save talk.json")
        path, messages = expanded(rest), self._conversation.messages
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(messages, ensure_ascii=False, indent=2) + "\n")
        except FileExistsError:
            raise OptionError(f"{path} exists", hint="nothing is overwritten: give another name") from None
        except OSError as error:
            raise OptionError(f"cannot write {path}: {error.strerror or error}") from None
        note(f"(saved {len(messages)} messages to {path})")


class _Screen:
    """Shows an answer: words are kept whole in a terminal; a file or a pipe gets the text unchanged."""

    def __init__(self) -> None:
        self._wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        self._at_start = True

    def show(self, text: str) -> None:
        text = harmless(text, sys.stdout)
        self._print(self._wrap.push(text) if self._wrap is not None else text)

    def close(self) -> None:
        """Show the rest, and end the line."""
        self._print(self._wrap.flush() if self._wrap is not None else "")
        if not self._at_start:
            print(flush=True)

    def _print(self, text: str) -> None:
        if text:
            self._at_start = text.endswith("\n")
            print(text, end="", flush=True)


def _value(text: str) -> Any:
    """JSON, or the text itself."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _changed(params: SamplingParams) -> str:
    """The temperature, and the parameters that differ from the defaults of `SamplingParams`."""
    plain = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    shown = {name for name, value in values.items() if value != getattr(plain, name)} | {"temperature"}
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if name in shown)
