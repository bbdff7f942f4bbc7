"""What a router knows of its own requests, without Ray: a clock that is set, and replicas that publish nothing."""

from __future__ import annotations

import asyncio
import json
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from slipstream.server.ray.calls import Call
from slipstream.server.ray.prefixes import prefixes_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Ray imports
    from slipstream.server.ray import router as router_module
    from slipstream.server.ray.router import PrefixRouter

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray has some warnings

REPLICAS: Any = [SimpleNamespace(replica_id=name, routing_stats={}) for name in ("a", "b", "c")]


class Alone(PrefixRouter):
    """One that Ray Serve has told nothing."""

    replica_queue_len_cache: Any = SimpleNamespace(get=lambda replica_id: None)

    def __init__(self) -> None:
        self.initialize_state()


def request(number: int) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "A long story. " * 50}]}).encode()
    return SimpleNamespace(
        args=[Call.of({}, body, prefixes_of(body))], metadata=SimpleNamespace(internal_request_id=number)
    )


def test_a_conversation_goes_on_where_it_was_answered_however_long_that_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica publishes what it holds when it begins to answer, and an answer in one piece begins at its end."""
    now = [1000.0]
    monkeypatch.setattr(router_module.time, "monotonic", lambda: now[0])
    router = Alone()
    router.on_request_routed(request(1), "b", None)
    now[0] += 60.0
    router.on_request_completed("b", 1)
    now[0] += 1.0
    for number in range(2, 12):
        ranked = asyncio.run(router.choose_replicas(REPLICAS, request(number)))
        router._chosen.clear()
        assert ranked[0][0].replica_id == "b"
    now[0] += 60.0  # and it was not published since
    first = {asyncio.run(router.choose_replicas(REPLICAS, request(n)))[0][0].replica_id for n in range(20, 60)}
    assert len(first) > 1
