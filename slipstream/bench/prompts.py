"""Prompts to measure with: the shipped workload, and files of users in several formats.

A line of a `.jsonl` file is a text, or an object that is recognised by its keys:

    messages ...                     a conversation, or a whole request body of a chat API (tools and sampling included)
    input ...                        a request body of `/v1/responses`: the same question to a chat
    prompt ...  with model           a request body of a completion API: plain text, without a chat template
    prompt ...  as token ids         the same; a list of texts or of ids is as many prompts
    body                             any of these, as in a line of an OpenAI batch
    turns                            Spec-Bench and MT-bench: asked one after the other, each after the previous answer
    prompt                           vLLM's `custom` format (with `output_tokens`), HumanEval (with `task_id`)
    question, instruction, text      a text

`category` may stand beside any of them. Other keys of a request body are honoured or refused; those of the other
formats are remarks and are ignored. A `.txt` file has one prompt per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from slipstream.bench.response_bodies import as_chat
from slipstream.bench.tune.prompts import Dialogue, file_lines, read_entry
from slipstream.errors import CorruptFile, OptionError, PromptError, SlipstreamError
from slipstream.text.chat import check_messages
from slipstream.types import SamplingParams

Body = dict[str, Any]

_REMARKS = {"category", "id", "custom_id", "method", "url", "body"}
_IDLE = {"model", "stream", "stream_options", "user", "metadata", "store", "service_tier"}  # change no answer
_TEMPLATE = {"reasoning_effort", "chat_template_kwargs"}  # variables of a chat template
# Servers spell these in their own way.
_WIRE = {"response_format", "prediction", "tool_choice", "parallel_tool_calls", *_TEMPLATE}
_SAMPLING = {field.name for field in fields(SamplingParams)} - {
    "n",
    "logprobs",
    "prompt_logprobs",
    "speculate",
    "prediction",
}
_NOT_SAID = -1  # vLLM's `output_tokens` of a line that leaves its length to the command
_NAMES = ("custom_id", "id", "task_id", "question_id")


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: a conversation, or a plain text."""

    name: str
    category: str
    messages: tuple[Body, ...] = ()  # empty: `text` is the prompt, without a chat template
    text: str = ""
    turns: tuple[str, ...] = ()  # what the user says after each answer
    tools: tuple[Body, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `SamplingParams` that the line sets
    wire: Mapping[str, Any] = field(default_factory=dict)  # fields that the engine has by other names, or not at all
    ids: tuple[int, ...] = ()  # a prompt that has neither messages nor text
    tokenizer: str = ""  # the hash of the tokenizer of `ids`, if it is known

    @property
    def variables(self) -> Body:
        """Variables of the chat template."""
        effort = self.wire.get("reasoning_effort")
        return {**self.wire.get("chat_template_kwargs", {}), **({"reasoning_effort": effort} if effort else {})}

    def body(self) -> Body:
        """The request body that asks for the first answer."""
        asked: Body = {"prompt": list(self.ids) or self.text}
        if self.messages:
            asked = {"messages": list(self.messages)}
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {**asked, **tools, **self.sampling, **self.wire}

    def engine_sampling(self) -> Body:
        """Fields of `SamplingParams` for a model of this process; what it cannot honour is refused."""
        found = dict(self.sampling)
        wanted, guess = self.wire.get("response_format"), self.wire.get("prediction")
        if isinstance(wanted, Mapping) and wanted.get("type") == "json_object":
            found["structured_outputs"] = {"json_object": True}
        elif isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
            found["structured_outputs"] = {"json": wanted.get("json_schema", {}).get("schema", {})}
        elif wanted is not None and wanted != {"type": "text"}:
            raise PromptError(f"{self.name}: response_format={wanted!r} is not known")
        if guess is not None:
            found["prediction"] = guess["content"] if isinstance(guess, Mapping) and "content" in guess else guess
        for name in ("tool_choice", "parallel_tool_calls"):
            if self.wire.get(name) not in (None, "auto", True):
                raise PromptError(f"{self.name}: {name} needs a server", hint="measure one with --url")
        try:
            SamplingParams(**found)
        except OptionError as error:
            raise PromptError(f"{self.name}: {error.message}", hint=error.hint) from None
        return found


def categories(prompts: list[BenchPrompt]) -> list[str]:
    """The categories in the order of their first prompts."""
    return list(dict.fromkeys(prompt.category for prompt in prompts))


def workload() -> list[BenchPrompt]:
    """The shipped prompts: 16 or more of each of eleven categories, written for this package."""
    folder = files("slipstream.bench") / "workload"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".jsonl"))
    return [
        prompt
        for name in names
        for number, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines(), 1)
        for prompt in _prompts(name, number, line, "")
    ]


def read_file(path: Path) -> list[BenchPrompt]:
    """The prompts of a user's file (a bad line is named by its number), or those that `serve --capture` wrote."""
    if path.is_dir():
        from slipstream.bench.captured import captured_prompts

        return captured_prompts(path)
    lines = file_lines(path)
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"{str(path)!r} has no prompts")
    if path.suffix == ".txt":
        numbered = [(number, json.dumps(line)) for number, line in numbered]
    return [prompt for number, line in numbered for prompt in _prompts(str(path), number, line, path.stem)]


def _prompts(file: str, number: int, line: str, category: str) -> list[BenchPrompt]:
    """The prompts of a line, mostly one; `category`: if the line names none."""
    place = f"{file!r} line {number}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise CorruptFile(f"{place} is not JSON: {what}") from None
    try:
        return _recognised(entry, f"{Path(file).stem}/{number}", category)
    except SlipstreamError as error:
        raise PromptError(f"{place}: {error.message}", hint=error.hint) from None


def _recognised(entry: Any, name: str, category: str) -> list[BenchPrompt]:
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, Mapping):
        raise PromptError("neither a text nor an object", hint='as in {"prompt": "Why is the sky blue?"}')
    given = entry.get("category", "code" if "task_id" in entry else category)
    if not isinstance(given, str) or not given.strip():
        raise PromptError(f"category={given!r} is not a name")
    name = next((str(entry[key]) for key in _NAMES if key in entry), name)
    body = entry.get("body", entry)
    if not isinstance(body, Mapping):
        raise PromptError("body is not an object")
    if _is_response_body(body):
        body = as_chat(body)
    asked = body.get("prompt")
    if isinstance(asked, list):
        several = asked if asked and not isinstance(asked[0], int) else [asked]
        names = [name] if len(several) == 1 else [f"{name}/{place}" for place in range(len(several))]
        return [_request({**body, "prompt": one}, n, given) for n, one in zip(names, several, strict=True)]
    if "messages" in body or (isinstance(asked, str) and (body is not entry or "model" in body)):
        return [_request(body, name, given)]
    dialogue, limit = read_entry(entry), entry.get("output_tokens")
    sampling = {} if limit in (None, _NOT_SAID) else _sampling({"max_tokens": limit})
    return [_asked(dialogue, name, given, sampling)]


def _is_response_body(body: Mapping[str, Any]) -> bool:
    """Whether it is one of `/v1/responses`: other formats may have an `input` among their remarks."""
    others = any(body.get(key) is not None for key in ("messages", "prompt", "turns", "question", "instruction"))
    return body.get("input") is not None and not others and not isinstance(body.get("text"), str)


def _asked(dialogue: Dialogue, name: str, category: str, sampling: Body) -> BenchPrompt:
    return BenchPrompt(name, category, tuple(dialogue.asked), turns=dialogue.later, sampling=sampling)


def _request(body: Mapping[str, Any], name: str, category: str) -> BenchPrompt:
    """A request body; nothing of it is dropped silently."""
    rest = {key: value for key, value in body.items() if key not in _REMARKS | _IDLE and value is not None}
    messages, asked = rest.pop("messages", None), rest.pop("prompt", "")
    text, ids = (asked, ()) if isinstance(asked, str) else ("", _ids(asked))
    tools = rest.pop("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptError("tools is not a list of objects")
    if rest.pop("n", 1) != 1:
        raise PromptError("n: one answer is measured at a time", hint="leave it out")
    if rest.pop("logprobs", False) or rest.pop("top_logprobs", 0):
        raise PromptError("logprobs are not measured", hint="leave them out")
    if "max_completion_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    wire = {key: rest.pop(key) for key in sorted(_WIRE & rest.keys())}
    conversation = () if messages is None else tuple(check_messages(messages))
    if conversation and conversation[-1]["role"] == "assistant":
        raise PromptError("the last message is the assistant's, so there is nothing to answer")
    if not conversation and not text and not ids:
        raise PromptError("the prompt is empty")
    if not conversation and _TEMPLATE & wire.keys():
        raise PromptError(f"{', '.join(sorted(_TEMPLATE & wire.keys()))}: a plain prompt has no chat template")
    if not isinstance(wire.get("chat_template_kwargs", {}), Mapping):
        raise PromptError("chat_template_kwargs is not an object")
    sampling = _sampling(rest)
    return BenchPrompt(name, category, conversation, text, (), tuple(tools), sampling, wire, ids)


def _ids(asked: Any) -> tuple[int, ...]:
    """Token ids; whether the model has them is known when it is loaded."""
    whole = isinstance(asked, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in asked)
    if not whole or min(asked, default=0) < 0:
        raise PromptError("prompt is neither text nor token ids", hint='as in {"prompt": [1, 2, 3]}')
    return tuple(asked)


def _sampling(given: Body) -> Body:
    """Sampling parameters that the engine knows, with values that it accepts."""
    for key in given:
        if key not in _SAMPLING:
            raise PromptError(f"unknown field {key!r}", hint=f"valid: {', '.join(sorted(_SAMPLING | _WIRE))}")
    try:
        SamplingParams(**given)
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        raise PromptError(f"a sampling parameter has a wrong type: {error}") from None
    return given
