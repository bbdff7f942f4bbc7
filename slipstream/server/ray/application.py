"""The application of `serve run` and of Serve configurations."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from slipstream.server.ray.arguments import Arguments
from slipstream.server.ray.front import Front
from slipstream.server.ray.replica import Replica
from slipstream.server.ray.router import PrefixRouter

_HEALTH_S = 2.0  # between two checks: how long a replica that is lost goes unnoticed while nobody asks it
_HEALTH_TIMEOUT_S = 30.0
_STATS_S = 1.0
_FRONT_CPUS = 0.1  # a front only forwards bytes
_FRONT_REQUESTS = 10_000
_LAST_WORDS_S = 10.0  # after a replica was cut off: time for the front to send its clients an error


def build(args: dict[str, Any]) -> Application:
    """A front and its replicas, not yet running."""
    given = Arguments.read(args)
    how_many: dict[str, Any] = {"num_replicas": given.replicas}
    if given.autoscaling is not None:
        target = {"target_ongoing_requests": max(1, given.max_num_seqs // 2)}
        how_many = {"autoscaling_config": {**target, **given.autoscaling}}
    room = given.max_num_seqs + given.max_queue
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": given.cpus, "num_gpus": given.gpus},
        max_ongoing_requests=room,
        max_queued_requests=room,  # at a front; those on their way to a replica count as well
        graceful_shutdown_timeout_s=given.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_STATS_S
        ),
        **how_many,
    )
    front = serve.deployment(
        Front,
        name="Front",
        num_replicas=given.fronts,
        ray_actor_options={"num_cpus": _FRONT_CPUS},
        max_ongoing_requests=_FRONT_REQUESTS,
        graceful_shutdown_timeout_s=given.shutdown_timeout + _LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(replicas.bind(given), given.max_body_bytes)
