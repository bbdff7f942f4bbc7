"""Replicas on Ray Serve: `serve run slipstream.server.ray:app model=... speculate=auto`.

A front takes requests over HTTP and sends each to one of the replicas; a replica is an engine with the same
application that `slipstream serve` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """A front and its replicas. `args`: the fields of `Arguments`; errors name them, before anything is loaded."""
    from slipstream.server.ray.application import build  # not above: a front needs none of it, nor PyTorch

    return build(args)
