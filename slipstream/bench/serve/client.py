"""A cheap HTTP client for streamed answers: it only stamps what arrives; reading it is left for after the run.

The client shares its machine with the server it measures, so its own CPU time disturbs the measurement. Bytes are kept
as they come, with their times, and the end of a response is found without parsing the events.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from slipstream.errors import OptionError

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)
_STATUS_BYTES = len("HTTP/1.1 200 ")
_LAST_CHUNK = b"\n0\r\n\r\n"


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    path: str  # before /v1
    secure: bool

    @staticmethod
    def parse(url: str) -> Address:
        """From `http://host:port`, with or without `/v1`."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise OptionError(f"--url {url!r} is not an address", hint="as in http://localhost:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Address(parts.hostname, port or (443 if parts.scheme == "https" else 80), path, parts.scheme == "https")


class Response:
    """The raw bytes of a response, with the time at which each piece of them arrived."""

    def __init__(self) -> None:
        self.sent = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.error: str | None = None

    @property
    def status(self) -> int:
        """The HTTP status; 0 if none came."""
        start = b"".join(piece for _, piece in self.pieces[:_STATUS_BYTES])[:_STATUS_BYTES].split(b" ")
        return int(start[1]) if len(start) > 2 and start[1].isdigit() else 0


class _Stream(asyncio.Protocol):
    """One connection, one response at a time."""

    def __init__(self) -> None:
        self.response = Response()
        self.done: asyncio.Future[None] | None = None
        self.open = True  # for another request
        self.closed = False
        self._head = b""
        self._tail = b""
        self._left: int | None = None  # bytes of the body to come; None: chunked, or until the connection closes
        self._chunked = self._in_body = self._last = False

    def start(self, response: Response) -> asyncio.Future[None]:
        """Expect a response."""
        self.response, self.done = response, asyncio.get_running_loop().create_future()
        self._head = self._tail = b""
        self._left, self._chunked, self._in_body = None, False, False
        return self.done

    def data_received(self, data: bytes) -> None:
        self.response.pieces.append((time.perf_counter(), data))
        if not self._in_body:
            data = self._read_head(data)
            if not self._in_body:
                return
        if self._chunked:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            if self._tail.endswith(_LAST_CHUNK) or data.startswith(b"0\r\n\r\n"):
                self._finish()
        elif self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()

    def _read_head(self, data: bytes) -> bytes:
        """The part of the data that belongs to the body; `_in_body` once the head is complete."""
        self._head += data
        head, end, body = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self._in_body = True
        self._chunked = _CHUNKED.search(head) is not None
        self._last = _CLOSE.search(head) is not None
        length = _LENGTH.search(head)
        if length is not None and not self._chunked:
            self._left = int(length[1])
        return body

    def connection_lost(self, error: Exception | None) -> None:
        self.open, self.closed = False, True
        if self.done is not None and not self.done.done():
            if self._chunked or self._left is not None or not self._in_body:
                self.response.error = f"the connection was closed: {error}" if error else "the connection was closed"
            self._finish()

    def _finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)
        self.open = self.open and not self._last


class Client:
    """Connections to one server, kept open and used again."""

    def __init__(self, address: Address, headers: Mapping[str, str], timeout: float = 600.0) -> None:
        self._address = address
        self._headers = {"Host": f"{address.host}:{address.port}", "Accept": "text/event-stream", **headers}
        self._timeout = timeout
        self._idle: list[tuple[asyncio.Transport, _Stream]] = []
        self._tls = ssl.create_default_context() if address.secure else None

    async def post(self, path: str, body: Mapping[str, Any]) -> Response:
        """Send a request body; returns when the whole response has arrived, or failed."""
        payload = json.dumps(body, ensure_ascii=False).encode()
        more = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        return await self._ask("POST", path, more, payload)

    async def get(self, path: str) -> Response:
        """Fetch a resource."""
        return await self._ask("GET", path, {}, b"")

    async def _ask(self, method: str, path: str, more: Mapping[str, str], payload: bytes) -> Response:
        lines = [f"{method} {self._address.path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (self._headers | dict(more)).items()]
        message = "\r\n".join([*lines, "", ""]).encode() + payload
        self._idle = [one for one in self._idle if not one[1].closed]
        response = await self._exchange(message, self._idle.pop() if self._idle else None)
        if response is None:  # the server had closed the kept connection
            response = await self._exchange(message, None)
        assert response is not None
        return response

    async def _exchange(self, message: bytes, kept: tuple[asyncio.Transport, _Stream] | None) -> Response | None:
        """Send a request on a connection; None if that was a kept one, and closed before anything came."""
        response = Response()
        response.sent = time.perf_counter()
        try:
            transport, stream = kept or await self._connect()
        except OSError as error:
            response.error = f"no connection to {self._address.host}:{self._address.port}: {error.strerror or error}"
            return response
        done = stream.start(response)
        transport.write(message)
        try:
            await asyncio.wait_for(done, self._timeout)
        except TimeoutError:
            response.error = f"no answer within {self._timeout:.0f} s"
            stream.open = False
        if stream.open:
            self._idle.append((transport, stream))
        else:
            transport.close()
        return None if kept is not None and stream.closed and not response.pieces else response

    async def _connect(self) -> tuple[asyncio.Transport, _Stream]:
        loop = asyncio.get_running_loop()
        return await loop.create_connection(_Stream, self._address.host, self._address.port, ssl=self._tls)

    async def close(self) -> None:
        """Close all connections."""
        for transport, _ in self._idle:
            transport.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn
