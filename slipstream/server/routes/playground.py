"""The playground: a page at `/`, with everything it needs beside it."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from slipstream.server.service import Service

_FILES = Path(__file__).parent.parent / "playground"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the page of another version may come from the same address
}


def playground_routes(service: Service) -> APIRouter:
    """The page and its files, read once; no routes if the server was started without it."""
    router = APIRouter(include_in_schema=False)
    if not service.config.playground:
        return router
    files = {path.name: path.read_bytes() for path in _FILES.iterdir() if path.suffix in _TYPES}

    @router.get("/")
    async def page() -> Response:
        return _response("index.html", files)

    @router.get("/playground/{name}")
    async def part(name: str) -> Response:
        return _response(name, files)

    return router


def _response(name: str, files: dict[str, bytes]) -> Response:
    if name not in files:
        raise HTTPException(404)
    return Response(files[name], media_type=_TYPES[Path(name).suffix], headers=_HEADERS)
