"""The application: routes, error handlers, and the engine's life beside the server's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.server.failures import ApiError, as_api_error
from slipstream.server.guard import Guard
from slipstream.server.routes.chat import chat_routes
from slipstream.server.routes.completions import completion_routes
from slipstream.server.routes.models import model_routes
from slipstream.server.routes.operations import operation_routes
from slipstream.server.routes.playground import playground_routes
from slipstream.server.routes.responses import response_routes
from slipstream.server.routes.tokens import token_routes
from slipstream.server.service import Service
from slipstream.server.sse import ClientGone, JsonResponse

_TYPE = re.compile(r"str|bool|(list|dict|literal)\[.*\]|[A-Z]\w*")  # how pydantic calls one of several types
_ROUTES = (
    chat_routes,
    completion_routes,
    response_routes,
    model_routes,
    token_routes,
    operation_routes,
    playground_routes,
)


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service. The engine is loaded when it starts, in the background."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(service.load()) if service.loaded is None else None
        yield
        if loading is not None:
            await loading
        service.close()

    middleware = [Middleware(Guard, service=service)]
    if service.config.cors_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=service.config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    app = FastAPI(
        title="Slipstream",
        version=__version__,
        lifespan=life,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        middleware=middleware,
        default_response_class=JsonResponse,
    )
    for routes in _ROUTES:
        app.include_router(routes(service))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _gone)
    for kind in (ApiError, SlipstreamError, Exception):
        app.add_exception_handler(kind, _failed)
    app.openapi = lambda: _schema(app, service)  # type: ignore[method-assign]
    return app


def _schema(app: FastAPI, service: Service) -> dict[str, Any]:
    """`/openapi.json`, which names the one model that is served."""
    schema = FastAPI.openapi(app)
    for body in schema["components"]["schemas"].values():
        if "model" in body.get("properties", {}):
            body["properties"]["model"] = {"type": "string", "enum": list(service.config.names)}
    return schema


async def _failed(_: Request, error: Exception) -> Response:
    return _response(as_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"there is no {request.url.path}" if error.status_code == 404 else str(error.detail)
    return _response(ApiError(error.status_code, said, headers=error.headers))


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _invalid(_: Request, error: Exception) -> Response:
    """A body that does not fit its schema: 400 for a field that does not exist, 422 for a type that is wrong."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    unknown = [_place(one["loc"], made_up=True) for one in found if one["type"] == "extra_forbidden"]
    if unknown:
        return _response(ApiError(400, f"unknown field: {', '.join(unknown)}", param=unknown[0], code="unknown_field"))
    if found[0]["type"] == "json_invalid":
        return _response(ApiError(422, "the request's body is not JSON"))
    places = dict.fromkeys(_place(one["loc"]) for one in found)
    first = _place(found[0]["loc"])
    others = f" (wrong too: {', '.join(list(places)[1:])})" if len(places) > 1 else ""
    return _response(ApiError(422, f"{first or 'the body'}: {found[0]['msg']}{others}", param=first or None))


def _place(location: tuple[int | str, ...], *, made_up: bool = False) -> str:
    """Where in the body: `stream_options.include_usage`, `messages[2]`; without the types that a field may have.

    `made_up`: the last part is a name of the client's own.
    """
    shown = ""
    for number, part in enumerate(location[1:], 2):
        if isinstance(part, int):
            shown += f"[{part}]"
        elif not _TYPE.fullmatch(part) or (made_up and number == len(location)):
            shown += f".{part}"
    return shown.removeprefix(".")


def _response(error: ApiError) -> Response:
    return JsonResponse(error.wire, error.status_code, error.headers)
