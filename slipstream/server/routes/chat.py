"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.server import shapes
from slipstream.server.constraints import chat_constraints
from slipstream.server.failures import ApiError
from slipstream.server.following import Follower, follow
from slipstream.server.generation import Generation, prepared, sampling_params
from slipstream.server.parsing.base import OutputParser, Parsed, ParserRequest
from slipstream.server.service import Service
from slipstream.server.sse import EventStream, JsonResponse, event, unless_gone
from slipstream.server.wire.chat import ChatBody
from slipstream.types import Completion, Delta, Output, SamplingParams

_PROMPT_END = 32  # tokens of the prompt that a parser may look at


def chat_routes(service: Service) -> APIRouter:
    """The chat route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        call = ChatCall(service, body)
        return await unless_gone(request.receive, call.respond())

    return router


class ChatCall:
    """One call: its request to the engine, a parser per choice, and the shape of its answers."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service = service
        self._body = body
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._head |= {"model": service.check_model(body.model)}
        self._top = body.top_logprobs or 0
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")

    async def respond(self) -> Response:
        """The whole answer, or the first event of a stream: what fails before it has an HTTP status."""
        service, body = self._service, self._body
        prompt = await service.off_loop(_size(body.messages), self._prompt)
        parsers = self._parsers(prompt)
        params = self._params(parsers[0])
        request = prepared(service, body, prompt, params)
        generation = Generation(service, [request], streams=bool(body.stream or body.return_trees))
        follower = Follower(service, generation)
        try:
            if body.stream:
                return EventStream(await follow(self._chunks(follower, parsers), generation))
            output = (await follower.outputs())[0]
            return JsonResponse(self._whole(output, parsers, follower))
        except BaseException:
            generation.close()
            raise

    # -- from the body to the engine ----------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        body = self._body
        continues = bool(body.continue_final_message)
        variables = dict(body.chat_template_kwargs or {})
        given = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
        variables |= {name: value for name, value in given.items() if value is not None}
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        (prompt,) = self._service.llm.chat_prompts(
            [plain_message(message, place) for place, message in enumerate(body.messages)],
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            tools=tools if tools and body.tool_choice != "none" else None,
            chat_template_kwargs=variables,
        )
        return prompt

    def _parsers(self, prompt: list[int]) -> list[OutputParser]:
        body = self._body
        choice = body.tool_choice
        asked = ParserRequest(
            prompt_end=self._service.tokenizer.decode(prompt[-_PROMPT_END:], skip_special=False),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        return [self._service.parsers(asked) for _ in range(max(1, body.n or 1))]

    def _params(self, parser: OutputParser) -> SamplingParams:
        body = self._body
        given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return sampling_params(
            self._service,
            body,
            max_tokens=given,
            logprobs=self._top if body.logprobs else None,
            skip_special_tokens=False if parser.needs_special_tokens else body.skip_special_tokens,
            **chat_constraints(body),
        )

    # -- from the engine to the wire ----------------------------------------------------------------------------------

    def _whole(self, output: Output, parsers: list[OutputParser], follower: Follower) -> dict[str, Any]:
        answer: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(one, parsers[one.index], follower) for one in output.outputs],
            **follower.totals(),
        }
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = shapes.prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _choice(self, completion: Completion, parser: OutputParser, follower: Follower) -> dict[str, Any]:
        first, rest = parser.push(completion.text), parser.finish()
        calls = _joined_calls([first, rest])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": first.content + rest.content or ("" if not calls else None),
        }
        if first.reasoning or rest.reasoning:
            message["reasoning_content"] = first.reasoning + rest.reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": completion.index,
            "message": message,
            "finish_reason": _reason(completion.finish_reason, parser),
            "stop_reason": completion.stop_reason,
            "logprobs": None,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = shapes.chat_logprobs(completion.logprobs, self._service.tokenizer, self._top)
        return choice | follower.details(self._body, completion)

    async def _chunks(self, follower: Follower, parsers: list[OutputParser]) -> AsyncGenerator[bytes, None]:
        body, options = self._body, self._body.stream_options
        head = {**self._head, "object": "chat.completion.chunk"}
        counts = options is not None and bool(options.continuous_usage_stats)
        begun: set[int] = set()
        async for _, delta in follower.deltas():
            parsed = parsers[delta.index].push(delta.text)
            parts = [parsed] if delta.finish_reason is None else [parsed, parsers[delta.index].finish()]
            choice = self._chunk(delta, parts, parsers[delta.index], follower, first=delta.index not in begun)
            if choice is None:
                continue
            chunk: dict[str, Any] = {**head, "choices": [choice]}
            if body.return_token_ids and delta.index not in begun:
                chunk["prompt_token_ids"] = follower.prompt_ids(0)
            begun.add(delta.index)
            if follower.over:
                chunk |= follower.counters()
            if options is not None and (options.include_usage or counts):
                chunk["usage"] = follower.usage() if counts else None
            yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**head, "choices": [], **follower.totals()})

    def _chunk(
        self, delta: Delta, parts: list[Parsed], parser: OutputParser, follower: Follower, *, first: bool
    ) -> dict[str, Any] | None:
        """The choice of a chunk, or None if there is nothing to say yet."""
        said: dict[str, Any] = {}
        if content := "".join(part.content for part in parts):
            said["content"] = content
        if reasoning := "".join(part.reasoning for part in parts):
            said["reasoning_content"] = reasoning
        if calls := [_call_delta(call) for part in parts for call in part.tool_calls]:
            said["tool_calls"] = calls
        details = follower.details(self._body, delta)
        if delta.logprobs is not None:
            details["logprobs"] = shapes.chat_logprobs(delta.logprobs, self._service.tokenizer, self._top)
        if not said and not details and delta.finish_reason is None:
            return None
        if first:
            said = {"role": "assistant", "content": "", **said}
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": said,
            "logprobs": None,
            "finish_reason": None,
            **details,
        }
        if delta.finish_reason is not None:
            choice["finish_reason"] = _reason(delta.finish_reason, parser)
            choice["stop_reason"] = delta.completion.stop_reason if delta.completion is not None else None
        return choice


def plain_message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """A message as templates know it: `developer` is `system`, and a call's arguments are an object."""
    found = {name: value for name, value in message.items() if value is not None or name == "content"}
    if found.get("role") == "developer":
        found["role"] = "system"
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_plain_call(call, f"messages[{place}].tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _plain_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{name} is no call of a function", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise ApiError(400, f"{name}: the arguments are not JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _joined_calls(parts: list[Parsed]) -> list[dict[str, Any]]:
    """Whole tool calls of their pieces."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in (call for part in parts for call in part.tool_calls):
        known = calls.setdefault(
            piece.index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
        )
        known["id"] = piece.id or known["id"]
        known["function"]["name"] = piece.name or known["function"]["name"]
        known["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]


def _call_delta(call: Any) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _reason(reason: str | None, parser: OutputParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.called else reason


def _size(messages: list[dict[str, Any]]) -> int:
    """Roughly how long a conversation is."""
    return sum(len(str(message.get("content"))) for message in messages)
