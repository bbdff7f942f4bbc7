"""The front: takes requests over HTTP and sends each to a replica.

It runs no model, so a lost replica loses no requests but its own.
"""

# Ray copies this class, as it is when it is decorated, to other processes: all that it uses stands above it, and its
# annotations are types, not strings (no `annotations` from `__future__`).
import asyncio
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from slipstream.server.ray.calls import Call
from slipstream.server.ray.forwarding import Forwarded
from slipstream.server.ray.merging import merged
from slipstream.server.ray.prefixes import prefixes_of
from slipstream.server.sse import JsonResponse

_LARGE = 2**16  # bytes of a body that take long enough to read to keep them off the event loop
_ALL_S = 5.0  # that all replicas have for an answer

api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.ingress(api)
class Front:
    """The HTTP front of all replicas."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._answers = replicas.options(stream=True, method_name="answer")
        self._most = max_body_bytes

    @api.get("/metrics")
    async def metrics(self) -> Response:
        """The metrics of all replicas, each with its label."""
        return Response(merged(await self._all("metrics")), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @api.get("/load")
    async def load(self) -> Response:
        """Requests that run or wait, of all replicas."""
        return JsonResponse({"server_load": sum(await self._all("load"))})

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
    async def forward(self, request: Request) -> Response:
        """Forward any other request to a replica, which also refuses invalid ones."""
        body = await self._body(request)
        found = prefixes_of(body) if len(body) < _LARGE else await asyncio.to_thread(prefixes_of, body)
        return Forwarded(self._answers, Call.of(request.scope, body, found))

    async def _body(self, request: Request) -> bytes:
        """The body; of one that is too large, only enough for the replica to see that it is."""
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._most:
                break
        return b"".join(parts)

    async def _all(self, method: str) -> list[Any]:
        """The answers of all replicas; replicas that just ended are left out."""
        answers = await self._replicas.broadcast(method).results_async(timeout_s=_ALL_S, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]
