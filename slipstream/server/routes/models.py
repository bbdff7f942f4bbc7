"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from slipstream.server.service import Service
from slipstream.server.sse import JsonResponse


def model_routes(service: Service) -> APIRouter:
    """The routes that say which model is served."""
    router = APIRouter()

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "slipstream",
            "root": service.config.model,
            "parent": None,
            "max_model_len": service.llm.max_model_len,
            "drafters": service.llm.drafters,
        }

    @router.get("/v1/models", summary="The served model, under each of its names")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [described(name) for name in service.config.names]})

    @router.get("/v1/models/{name:path}", summary="The served model")
    async def model(name: str) -> Response:
        return JsonResponse(described(service.check_model(name)))

    return router
