"""`POST /v1/responses`: OpenAI's newer API. Stateless: nothing is stored, and nothing is found again."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.server import shapes
from slipstream.server.chatting import ChatRun, start_chat
from slipstream.server.failures import ApiError
from slipstream.server.following import Follower
from slipstream.server.items import as_chat
from slipstream.server.output_items import OutputItems
from slipstream.server.service import Service
from slipstream.server.sse import EventStream, JsonResponse, event, unless_gone
from slipstream.server.wire.responses import ResponsesBody
from slipstream.types import Logprobs

# What a response tells of its request, with what stands for a field that was not given.
_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "top_logprobs": 0, "top_p": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "user": None, "safety_identifier": None, "prompt_cache_key": None, "reasoning": None,
}  # fmt: skip


def response_routes(service: Service) -> APIRouter:
    """The responses route."""
    router = APIRouter()

    @router.post("/v1/responses", summary="Answer a conversation; stateless")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        call = ResponseCall(service, body)
        return await unless_gone(request.receive, call.respond())

    return router


class ResponseCall:
    """One call: a chat whose answer is reported as items and events."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._service = service
        self._body = body
        self._number = 0  # of the next event
        self._head = {"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._head |= {"model": service.check_model(body.model)}

    async def respond(self) -> Response:
        """The whole answer, or the first event of a stream: what fails before it has an HTTP status."""
        run = await start_chat(self._service, as_chat(self._body))
        with run.follower.ending():
            if self._body.stream:
                events = await run.follower.streamed(self._events(run))
                return EventStream(events, failed=self._failed, end=b"")
            (output,) = await run.follower.outputs()
            items = OutputItems()
            completion = output.outputs[0]
            items.push(run.parsers[0].push(completion.text), self._spelled(completion.logprobs))
            items.push(run.parsers[0].finish(), [])
            items.close()
            return JsonResponse(self._response(items, completion.finish_reason, run.follower))

    async def _events(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        items, parser = OutputItems(), run.parsers[0]
        deltas = run.follower.deltas()
        reason: str | None = None
        first = await anext(deltas, None)  # an error before it has an HTTP status
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response(items, None, None)})
        while first is not None:
            _, delta = first
            events = items.push(parser.push(delta.text), self._spelled(delta.logprobs))
            if delta.finish_reason is not None:
                events += items.push(parser.finish(), []) + items.close()
                reason = delta.finish_reason
            for one in events:
                yield self._event(one)
            first = await anext(deltas, None)
        response = self._response(items, reason, run.follower)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, said: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({**said, "sequence_number": number}, said["type"])

    def _failed(self, error: ApiError) -> bytes:
        said = {"type": "error", "code": error.code, "message": error.detail, "param": error.param}
        return self._event(said | error.wire)

    def _spelled(self, entries: list[Logprobs] | None) -> list[dict[str, Any]]:
        if entries is None:
            return []
        found: list[dict[str, Any]] = shapes.chat_logprobs(
            entries, self._service.tokenizer, self._body.top_logprobs or 0
        )["content"]
        return found

    def _response(self, items: OutputItems, reason: str | None, follower: Follower | None) -> dict[str, Any]:
        """The response object; without a follower, of an answer that has just begun."""
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        given = self._body.model_dump(exclude_none=True, by_alias=True)
        fields: dict[str, Any] = {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items.items,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
            "max_tool_calls": None,
            **{name: given.get(name, default) for name, default in _ECHOED.items()},
            "tools": [tool.model_dump() for tool in self._body.tools or ()],
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "completed_at": int(time.time()) if status == "completed" else None,
            "usage": None,
        }
        if follower is not None:
            fields |= follower.counters()
            usage = follower.usage()
            fields["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(items)},
                "total_tokens": usage["total_tokens"],
            }
        return fields

    def _reasoning_tokens(self, items: OutputItems) -> int:
        """Tokens of the reasoning part, encoded again: the parser splits text, not tokens."""
        text = items.reasoning
        return len(self._service.tokenizer.encode(text, add_special=False)) if text else 0
