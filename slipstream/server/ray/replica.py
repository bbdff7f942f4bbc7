"""A replica: one engine with the application that `slipstream serve` runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from starlette.types import Message

from slipstream.async_llm import AsyncLLM
from slipstream.cache import PAGE_SIZE
from slipstream.errors import EngineClosed
from slipstream.server.app import make_app
from slipstream.server.ray.arguments import Arguments
from slipstream.server.ray.calls import Call
from slipstream.server.ray.prefixes import PrefixTable
from slipstream.server.service import Service

_CHARACTERS = 4  # characters per token, roughly: says how much text a cache holds
_PUBLISHED = 2048  # keys


class Replica:
    """Answers calls. Ray Serve asks for its health, and for what its cache holds."""

    def __init__(self, arguments: Arguments) -> None:
        self._service = Service(arguments.server, lambda: AsyncLLM(arguments.model, **arguments.engine))
        self._app = make_app(self._service)
        self._service.open()  # it is not ready before it is warm
        self._held = PrefixTable(_CHARACTERS * PAGE_SIZE * self._service.llm.cache.capacity)
        self._restarts = 0  # of the engine

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """The application's answer as ASGI messages, those that came together in one list."""
        ready: asyncio.Queue[Message | None] = asyncio.Queue()
        bodies = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if not bodies:
                await asyncio.Event().wait()  # a client that leaves cancels all of this
            return bodies.pop()

        async def respond() -> None:
            try:
                await self._app(dict(call.scope), receive, ready.put)
            finally:
                ready.put_nowait(None)

        task = asyncio.ensure_future(respond())
        try:
            async for messages in _together(ready):
                if messages[0].get("status") == 200:
                    self._held.add(call.prefixes)
                yield messages
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- what Ray Serve asks for --------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises if the engine is dead; does not return if the engine hangs: Ray Serve waits 30 seconds."""
        llm = self._service.loaded
        if llm is None or not llm.alive:
            raise EngineClosed("the engine failed and could not be made anew")
        await llm.status()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Keys of the beginnings in this replica's cache, for routers; none after the engine was made anew."""
        status = await self._service.llm.status()
        if status.restarts != self._restarts:
            self._restarts = status.restarts
            self._held.clear()
        return {"prefixes": self._held.packed(_PUBLISHED)}

    def __del__(self) -> None:
        """Close the service after the drain."""
        self._service.close()

    # -- what the front asks of all replicas --------------------------------------------------------------------------

    async def metrics(self) -> tuple[str, bytes]:
        """The replica's id, and the text of its `/metrics`."""
        page = self._service.metrics.render(await self._service.llm.status(), self._service.active)
        return serve.get_replica_context().replica_id.unique_id, page

    async def load(self) -> int:
        """Requests that run or wait."""
        return self._service.llm.under_way


async def _together(ready: asyncio.Queue[Message | None]) -> AsyncGenerator[list[Message], None]:
    """All messages that are ready, as soon as there is one; None is the end."""
    over = False
    while not over:
        found = [await ready.get()]
        while not ready.empty():
            found.append(ready.get_nowait())
        over = found[-1] is None
        if messages := [message for message in found if message is not None]:
            yield messages
