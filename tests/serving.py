"""A real server on a free port of this machine, in a thread, and clients for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from slipstream import AsyncLLM
from slipstream.server.capture import Capture
from slipstream.server.config import ServerConfig
from slipstream.server.run import listen, make_server
from slipstream.server.service import Service


@dataclass(frozen=True)
class Served:
    """A running server."""

    service: Service
    url: str
    http: httpx.Client
    server: uvicorn.Server

    @property
    def llm(self) -> AsyncLLM:
        return self.service.llm

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        return self.http.post(path, content=json.dumps(body), headers=headers, **more)  # ASCII: any string can be sent

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The JSON of a good answer."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events of a stream, the last being "[DONE]"."""
        return [data for _, data in self.named_events(path, body)]

    def named_events(self, path: str, body: dict[str, Any]) -> list[tuple[str | None, Any]]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(parsed(response.iter_lines()))

    def slow_down(self, seconds: float) -> None:
        """Make every step take longer, so that requests are still there when the next ones come."""
        step = self.llm.engine.step

        def slowly() -> Any:
            time.sleep(seconds)
            return step()

        self.llm.engine.step = slowly  # type: ignore[method-assign]

    def until_idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing is under way; then nothing is kept either."""
        until = time.monotonic() + seconds
        while self.llm.under_way:
            assert time.monotonic() < until, "a request runs on"
            time.sleep(0.005)
        status = self.llm._loop.status()
        assert (status.running, status.waiting, status.pages_used) == (0, 0, 0)


def parsed(lines: Iterator[str]) -> Iterator[tuple[str | None, Any]]:
    """(event, data) of a stream of server-sent events."""
    name: str | None = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield name, data if data == "[DONE]" else json.loads(data)
            name = None
        else:
            assert line == "", line


@contextmanager
def served(
    model: str, config: ServerConfig | None = None, capture: Capture | None = None, **options: Any
) -> Iterator[Served]:
    """Serve a model; `options` are the engine's."""
    service = Service(config or ServerConfig(model=model), lambda: AsyncLLM(model, **options), capture)
    listening = listen("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            while service.loaded is None:
                assert service.failure is None, service.failure
                time.sleep(0.02)
            yield Served(service, url, http, server)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
