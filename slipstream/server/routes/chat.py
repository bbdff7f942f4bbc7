"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.server import shapes
from slipstream.server.chatting import finish_reason, joined_calls, start_chat
from slipstream.server.following import Follower
from slipstream.server.parsing.base import OutputParser, Parsed, ToolCallDelta
from slipstream.server.service import Service
from slipstream.server.sse import EventStream, JsonResponse, event, unless_gone
from slipstream.server.wire.chat import ChatBody
from slipstream.types import Completion, Delta, Output


def chat_routes(service: Service) -> APIRouter:
    """The chat route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        call = ChatCall(service, body)
        return await unless_gone(request.receive, call.respond())

    return router


class ChatCall:
    """One call, and the shape of its answers."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service = service
        self._body = body
        self._top = body.top_logprobs or 0
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time())}
        self._head |= {"model": service.check_model(body.model)}

    async def respond(self) -> Response:
        """The whole answer, or the first event of a stream: what fails before it has an HTTP status."""
        run = await start_chat(self._service, self._body)
        with run.follower.ending():
            if self._body.stream:
                return EventStream(await run.follower.streamed(self._chunks(run.follower, run.parsers)))
            (output,) = await run.follower.outputs()
            return JsonResponse(self._whole(output, run.parsers, run.follower))

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
        calls = joined_calls([first, rest])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": first.content + rest.content or ("" if not calls else None),
            "refusal": None,
            "annotations": [],
        }
        if first.reasoning or rest.reasoning:
            message["reasoning_content"] = first.reasoning + rest.reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": completion.index,
            "message": message,
            "finish_reason": finish_reason(completion.finish_reason, parser),
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
            choice["finish_reason"] = finish_reason(delta.finish_reason, parser)
            choice["stop_reason"] = delta.completion.stop_reason if delta.completion is not None else None
        return choice


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
