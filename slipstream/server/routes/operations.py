"""Routes for those who run the server: `/health`, `/ping`, `/version`, `/load`, `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from slipstream import __version__
from slipstream.server.metrics import CONTENT_TYPE
from slipstream.server.service import Service
from slipstream.server.sse import JsonResponse


def operation_routes(service: Service) -> APIRouter:
    """Health, load and metrics."""
    router = APIRouter()

    @router.get("/health", summary="200 once the model is loaded and warm; 503 before, and after a failure")
    async def health() -> Response:
        _ = service.llm
        return JsonResponse({"status": "ok"})

    @router.get("/ping", summary="The same")
    @router.post("/ping", summary="The same")
    async def ping() -> Response:
        return await health()

    @router.get("/version", summary="The version of slipstream")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @router.get("/load", summary="How many requests run or wait")
    async def load() -> Response:
        return JsonResponse({"server_load": service.llm.under_way})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        llm = service.loaded
        status = await llm.status() if llm is not None and llm.alive else None
        return Response(service.metrics.render(status, service.active), media_type=CONTENT_TYPE)

    return router
