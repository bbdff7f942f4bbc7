"""From a prompt of the bench to the token ids that a model gets."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.bench.prompts import BenchPrompt, Body, workload
from slipstream.drafters.retrieval.corpus import fingerprint
from slipstream.errors import OptionError, PromptError
from slipstream.text import Tokenizer

_BACKGROUND = "Some notes, in case they are of use:\n\n{notes}\n\n---\n\n"
_FILLERS = ("summary", "qa")  # categories whose texts fill a context
_SLACK = 24  # tokens by which a filled context may miss its length: text is cut between tokens, then encoded again


class Encoder:
    """Encodes prompts for one model, by its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._filler: list[int] = []
        self.tools_as_text = False  # whether a template without a place for tools was met

    def encode(self, prompt: BenchPrompt, answers: Sequence[str] = (), context: int | None = None) -> list[int]:
        """The ids of a prompt after so many answers to its turns; `context`: filled up to so many tokens."""
        if prompt.ids:
            return self._given(prompt, context)
        if not prompt.messages:
            ids = self._tokenizer.encode(prompt.text)
            if context is None or len(ids) >= context:
                return ids
            return self._tokenizer.encode(self._notes(context - len(ids)) + prompt.text)
        messages = [dict(message) for message in prompt.messages]
        for answer, turn in zip(answers, prompt.turns, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        ids = self._chat(messages, prompt)
        if context is None or len(ids) + _SLACK >= context:
            return ids
        first = next(message for message in messages if message["role"] == "user")
        first["content"] = self._notes(context - len(ids)) + str(first["content"])
        return self._chat(messages, prompt)

    def _given(self, prompt: BenchPrompt, context: int | None) -> list[int]:
        """Token ids as they are."""
        if prompt.tokenizer and prompt.tokenizer != fingerprint(self._tokenizer, len(self._tokenizer)):
            raise PromptError(f"{prompt.name} was captured from a model with another tokenizer")
        if (highest := max(prompt.ids)) >= len(self._tokenizer):
            raise PromptError(f"{prompt.name}: token {highest} is not one of the model's {len(self._tokenizer)}")
        if context is not None and len(prompt.ids) < context:
            raise PromptError(f"{prompt.name}: token ids cannot be filled up", hint="leave out --context")
        return list(prompt.ids)

    def _chat(self, messages: list[Body], prompt: BenchPrompt) -> list[int]:
        tokenizer, tools, variables = self._tokenizer, prompt.tools, prompt.variables
        try:
            if not tokenizer.has_chat_template and not variables:
                said = _plain(messages, tools)
                return tokenizer.encode("\n\n".join(f"{m['role']}: {m['content'] or ''}" for m in said))
            if tools:
                try:
                    return tokenizer.encode_chat(messages, tools=list(tools), **variables)
                except OptionError:  # no place for tools: a system message describes them, as clients do then
                    self.tools_as_text = True
            return tokenizer.encode_chat(_plain(messages, tools) if tools else messages, **variables)
        except OptionError as error:
            raise PromptError(f"{prompt.name}: {error.message}", hint=error.hint) from None

    def _notes(self, tokens: int) -> str:
        """Text of about so many tokens, from the shipped workload."""
        while len(self._filler) < tokens:
            texts = [str(p.messages[0]["content"]) for p in workload() if p.category in _FILLERS]
            self._filler += self._tokenizer.encode("\n\n".join(texts), add_special=False)
        frame = len(self._tokenizer.encode(_BACKGROUND.format(notes=""), add_special=False))
        return _BACKGROUND.format(notes=self._tokenizer.decode(self._filler[: max(0, tokens - frame)]))


def _plain(messages: list[Body], tools: Sequence[Body]) -> list[Body]:
    """The conversation with tools, calls and results written out as text."""
    said = [
        {"role": m["role"], "content": "\n".join(filter(None, [m["content"], *map(_call, m.get("tool_calls", ()))]))}
        for m in messages
    ]
    if not tools:
        return said
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    told = f'You can call these functions by answering with {{"name": ..., "arguments": ...}}:\n{listed}'
    if said[0]["role"] == "system":
        return [{"role": "system", "content": f"{said[0]['content']}\n\n{told}"}, *said[1:]]
    return [{"role": "system", "content": told}, *said]


def _call(call: Body) -> str:
    function = call.get("function", {})
    return f'{{"name": "{function.get("name")}", "arguments": {function.get("arguments", "{}")}}}'
