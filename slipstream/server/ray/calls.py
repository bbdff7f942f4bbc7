"""The messages between the front and a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.server.ray.prefixes import Prefix

_HEAD = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
_KEPT = (*_HEAD, "headers", "client", "server")


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    body: bytes
    prefixes: list[Prefix]  # of its conversation

    @classmethod
    def of(cls, scope: Any, body: bytes, prefixes: list[Prefix]) -> Call:
        """The part of an ASGI scope that other processes understand."""
        return cls({name: scope[name] for name in _KEPT if name in scope}, body, prefixes)
