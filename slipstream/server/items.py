"""The input of `/v1/responses` as a chat: items become messages, and fields those of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from slipstream.server.failures import ApiError
from slipstream.server.wire.chat import ChatBody
from slipstream.server.wire.responses import ResponsesBody

_SAME = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "structured_outputs", "chat_template_kwargs", "priority",
    "speculate", "parallel_tool_calls", "stream", "top_logprobs", "model", "prediction", "prompt_logprobs",
    "detokenize", "return_token_ids", "return_origins",
}  # fmt: skip
SENT = {  # the names of fields here, by those of a chat
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
    "reasoning_effort": "reasoning",
}  # fmt: skip
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    for part in (body, body.text, body.reasoning):
        if part is not None:
            part.refuse_inert()
    given: dict[str, Any] = body.model_dump(include=_SAME, exclude_none=True, by_alias=True)
    given["messages"] = messages_of(body)
    given["max_completion_tokens"] = body.max_output_tokens
    given["logprobs"] = body.top_logprobs is not None or bool(body.include)
    given["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.tools:
        given["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools]
    choice = body.tool_choice
    given["tool_choice"] = (
        choice if choice is None or isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
    )
    if body.text is not None and body.text.format is not None:
        wanted = body.text.format.model_dump(exclude_none=True, by_alias=True)
        kind = wanted.pop("type")
        given["response_format"] = {"type": kind, **({"json_schema": wanted} if kind == "json_schema" else {})}
    return ChatBody.model_validate(given)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The messages of a conversation; calls of one turn are one message."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise ApiError(400, "input is empty", param="input")
    for place, item in enumerate(body.input):
        _add(messages, item, f"input[{place}]")
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any], name: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), name)})
    elif kind == "reasoning":
        _turn(messages)["reasoning_content"] = _text(item.get("content") or item.get("summary") or "", name)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        calls = _turn(messages).setdefault("tool_calls", [])
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "function_call_output":
        output = _text(item.get("output"), name)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise ApiError(400, f"{name}: items of type {kind!r} are not supported", param="input")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that calls and reasoning belong to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, name: str) -> str:
    """A text, or the texts of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{name} has no text", param="input")
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _PARTS else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{name}: parts of type {kind!r} are not supported", param="input")
    return "\n".join(part["text"] for part in content)
