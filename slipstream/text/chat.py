"""Chat templates: the Jinja dialect of Hugging Face, in a sandbox, because a template is untrusted code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from slipstream.errors import CorruptFile, OptionError

_MARK = "CONTINUE-FROM-HERE "  # its space shows whether a template strips message contents


class ChatTemplate:
    """One template and the special tokens that it may use. Compiled on first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._compiled: Any = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages. Bad messages, or a template that refuses them, are an OptionError.

        `continue_final_message`: the prompt ends with the last message's text, which the model continues.
        `kwargs`: variables of the template; unknown ones are refused.
        """
        if add_generation_prompt and continue_final_message:
            raise OptionError("continue_final_message needs add_generation_prompt=False")
        for name in kwargs:
            if name not in self.source:
                raise OptionError(f"the model's chat template has no place for {name!r}", hint="leave it out")
        checked = check_messages(messages)
        if continue_final_message:
            checked[-1]["content"] = (checked[-1]["content"] or "") + _MARK
        if self._compiled is None:
            self._compiled = _compile(self.source)
        variables: dict[str, Any] = {"tools": None, "documents": None} | self.special_tokens | kwargs
        variables.update(messages=checked, add_generation_prompt=add_generation_prompt)
        try:
            rendered = str(self._compiled.render(**variables))
        except Exception as error:  # a template can raise anything
            raise OptionError(f"the chat template refuses these messages: {one_line(error)}") from error
        return _up_to_mark(rendered) if continue_final_message else rendered


def _up_to_mark(rendered: str) -> str:
    """A rendered chat up to the last message's text, stripped at its end if the template strips it."""
    place = rendered.rfind(_MARK.strip())
    if place < 0:
        raise OptionError("continue_final_message: the chat template does not show the last message")
    return rendered[:place] if rendered.startswith(_MARK, place) else rendered[:place].rstrip()


def check_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as plain dicts with text contents; anything else is an OptionError naming the message.

    A content given as text parts (the wire format of chat APIs) is joined: most templates support strings only.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise OptionError(
            f"{name} must be a list, not {type(messages).__name__}", hint='as in [{"role": "user", "content": "Hi"}]'
        )
    if not messages:
        raise OptionError(f"{name} is empty", hint='as in [{"role": "user", "content": "Hi"}]')
    return [_check_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise OptionError(f"{name} must be a mapping, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise OptionError(f"{name} has no role", hint="such as system, user or assistant")
    if content is None and not message.get("tool_calls"):
        raise OptionError(f"{name} has no content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(_text_part(name, part) for part in content)
    if not isinstance(content, str | None):
        raise OptionError(f"{name} has a content that is not text but {type(content).__name__}")
    return {**message, "content": content}


def _text_part(name: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise OptionError(f"{name} has a part that is not text", hint="only text is understood")
    return text


def _compile(source: str) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CorruptFile(f"the model's chat template cannot be parsed: {one_line(error)}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without HTML escapes, unlike Jinja's own filter: no model was trained on them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def one_line(error: Exception) -> str:
    """An exception's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
