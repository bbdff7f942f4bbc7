"""Runs a service on a port: uvicorn, with a drain before it ends."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

import uvicorn

from slipstream.errors import EngineClosed
from slipstream.server.app import make_app
from slipstream.server.service import Service

log = logging.getLogger("slipstream")

_BACKLOG = 2048
_LAST_WORDS_S = 5  # for connections that do not take their last bytes


def serve(service: Service, listening: socket.socket) -> None:
    """Serve until a signal ends it. Raises what loading raised, or EngineClosed if the engine is beyond repair."""
    allow_connections()
    make_server(service).run(sockets=[listening])
    if service.failure is not None:
        raise service.failure


def make_server(service: Service) -> uvicorn.Server:
    """The server, not yet running."""
    logging.getLogger("uvicorn.access").disabled = True  # it logs queries; the guard logs what may be logged
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    return _Server(config, service)


def allow_connections() -> None:
    """Allow as many open files as the system lets this process have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)  # who connects before the server runs waits for it
    except OSError:
        listening.close()
        raise
    return listening


class _Server(uvicorn.Server):
    """Ends when the engine cannot be loaded or is beyond repair, and otherwise drains first."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: whether to end."""
        llm = self._service.loaded
        if llm is not None and not llm.alive:
            self._service.failure = EngineClosed("the engine failed and could not be made anew")
        if self._service.failure is not None:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, let running requests end, then close what is left."""
        for server in self.servers:
            server.close()
        if self._service.active:
            log.info("shutting down: %d requests are still answered", self._service.active)
        draining = asyncio.ensure_future(self._service.drain())
        while not draining.done() and not self.force_exit:
            await asyncio.sleep(0.05)
        draining.cancel()
        await super().shutdown(sockets)
