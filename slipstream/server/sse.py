"""Responses in one piece or as server-sent events. If the client disconnects, its request is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.server.failures import ApiError, as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must pass events on at once


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once: half the time of `json.dumps`


def dumps(value: Any) -> str:
    """JSON in ASCII: safe for any string, and for lines of events."""
    return _encoder.encode(value)


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {dumps(value)}\n\n".encode()


class JsonResponse(Response):
    """A JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return dumps(content).encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first. The request's body must have been read."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error becomes an `error` event, and the stream still ends with `end`."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        failed: Callable[[ApiError], bytes] = lambda error: event(error.wire, "error"),
        end: bytes = DONE,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._failed = failed
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            body = self._failed(as_api_error(error))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self._end, "more_body": False})
