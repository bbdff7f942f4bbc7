"""ASGI middleware before all routes: access log, keys, size and type of bodies. Plain ASGI: streams are not buffered.

The log has no body, no query and no header: prompts do not get into it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.failures import ApiError
from slipstream.server.service import Service
from slipstream.server.sse import JsonResponse

access = logging.getLogger("slipstream.access")

_PROTECTED = ("/v1/", "/tokenize", "/detokenize")


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [_digest(key) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 499, time.perf_counter()  # 499: the client left before there was an answer

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._service.answering():
            try:
                await self._guarded(scope, receive, noted)
            finally:
                self._log(scope, status, 1000 * (time.perf_counter() - began))

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_key(scope, headers)
            limited = self._limited(scope, headers, receive)
        except ApiError as error:
            await JsonResponse(error.wire, error.status_code, error.headers)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or not scope["path"].startswith(_PROTECTED) or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared as hashes, all of them: the time tells nothing about the keys.
        given = _digest(key.strip())
        if scheme.lower() != "bearer" or not sum(hmac.compare_digest(given, known) for known in self._keys):
            raise ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """`receive` that refuses a body over the limit, whether it declares its length or not."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        most, seen = self._service.config.max_body_bytes, 0
        too_large = ApiError(413, f"the request's body is larger than {most:,} bytes", code="body_too_large")
        declared = headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > most:
            raise too_large
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and scope["path"] != "/ping":
            raise ApiError(415, "the request's body must be application/json")

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise too_large
            return message

        return limited

    def _log(self, scope: Scope, status: int, ms: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self._service.metrics.responded(route, status)
        if self._service.config.access_log:
            client = scope.get("client") or ("-",)
            access.info("%s %s %s %d %.0f ms", client[0], scope["method"], scope["path"], status, ms)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
