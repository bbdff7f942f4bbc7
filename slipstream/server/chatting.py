"""A conversation on its way to the engine: the prompt, a parser per choice, the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.server.constraints import chat_constraints, sent_form
from slipstream.server.failures import ApiError, naming
from slipstream.server.following import Follower
from slipstream.server.generation import Generation, prepared, sampling_params
from slipstream.server.messages import plain_message
from slipstream.server.parsing.base import OutputParser, Parsed, ParserRequest
from slipstream.server.service import Service
from slipstream.server.wire.chat import ChatBody
from slipstream.types import SamplingParams

_PROMPT_END = 32  # tokens of the prompt that a parser may look at


@dataclass(frozen=True)
class ChatRun:
    """A conversation that the engine answers, and a parser for each choice."""

    follower: Follower
    parsers: list[OutputParser]


async def start_chat(service: Service, body: ChatBody) -> ChatRun:
    """Check everything, and submit the request."""
    with naming(_sent(body)):
        return await _start(service, body)


async def _start(service: Service, body: ChatBody) -> ChatRun:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        said = f"max_completion_tokens={body.max_completion_tokens} is another limit than max_tokens={body.max_tokens}"
        raise ApiError(400, f"{said} (give one of them)", param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    prompt = await service.off_loop(_size(body.messages), _prompt, service, body)
    asked = _asked(service, body, prompt)
    parsers = [service.parsing(asked) for _ in range(max(1, body.n or 1))]
    params = await service.off_loop(_size(asked.tools), _params, service, body, asked, parsers[0])
    request = await service.off_loop(len(str(params.structured_outputs)), prepared, service, body, prompt, params)
    generation = Generation(service, [request], streams=bool(body.stream or body.return_trees))
    return ChatRun(Follower(service, generation), parsers)


def _sent(body: ChatBody) -> dict[str, str]:
    """The names of the fields that parameters came from, where the two differ."""
    names = sent_form(body)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return names


def _prompt(service: Service, body: ChatBody) -> list[int]:
    variables = dict(body.chat_template_kwargs or {})
    given = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    variables |= {name: value for name, value in given.items() if value is not None}
    continues = bool(body.continue_final_message)
    (prompt,) = service.llm.chat_prompts(
        [plain_message(message, place) for place, message in enumerate(body.messages)],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=_tools(body) if body.tools and body.tool_choice != "none" else None,
        chat_template_kwargs=variables,
    )
    return prompt


def _asked(service: Service, body: ChatBody, prompt: list[int]) -> ParserRequest:
    """What parsers may know of this request."""
    choice = body.tool_choice
    return ParserRequest(
        prompt_end=service.tokenizer.decode(prompt[-_PROMPT_END:], skip_special=False),
        tools=_tools(body),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _params(service: Service, body: ChatBody, asked: ParserRequest, parser: OutputParser) -> SamplingParams:
    return sampling_params(
        service,
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        skip_special_tokens=False if parser.needs_special_tokens else body.skip_special_tokens,
        structured_outputs=chat_constraints(body, asked, service.parsing, service.tokenizer),
        prediction=body.prediction.text if body.prediction is not None else None,
    )


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def _size(parts: Sequence[Any]) -> int:
    """Roughly how long a conversation, or the schemas of tools, are."""
    return sum(len(str(part)) for part in parts)


def finish_reason(reason: str | None, parser: OutputParser) -> str | None:
    """Why an answer ended, given why the model did."""
    return "tool_calls" if parser.over or (reason == "stop" and parser.called) else reason


def joined_calls(parts: Iterable[Parsed]) -> list[dict[str, Any]]:
    """Whole tool calls of their pieces."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in (call for part in parts for call in part.tool_calls):
        empty = {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
        known = calls.setdefault(piece.index, empty)
        known["id"] = piece.id or known["id"]
        known["function"]["name"] = piece.name or known["function"]["name"]
        known["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
