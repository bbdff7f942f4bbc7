"""Ray on this machine, with nothing but what replicas need, and our application on it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.serving import parsed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Ray imports
    import ray
    from ray import serve

    from slipstream.server.ray import app

CHAT = "/v1/chat/completions"
NAME = "slipstream"
CPUS = 0.1  # of a replica: three and more fit on two cores
# On a machine that is busy with other tests. What is proven never depends on how long it takes.
PATIENCE_S, DRAIN_S = 300.0, 250.0


@dataclass(frozen=True)
class Cluster:
    """Serve, running on 127.0.0.1, with one application."""

    port: int
    http: httpx.Client

    def start(self) -> None:
        """Serve, without an application."""
        serve.start(http_options={"host": "127.0.0.1", "port": self.port}, proxy_location="HeadOnly")

    def run(self, **arguments: Any) -> None:
        """Deploy, or update what is deployed; returns when all replicas are ready."""
        serve.run(app({"cpus": CPUS, "speculate": "none", "shutdown_timeout": DRAIN_S, **arguments}), name=NAME)

    def post(self, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        return self.http.post(path, json=body)

    def stream(self, body: dict[str, Any], path: str = CHAT) -> Generator[tuple[str | None, Any]]:
        """(event, data) as they come."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            yield from parsed(response.iter_lines())

    def replicas(self) -> list[int]:
        """The processes of the replicas."""
        return [pid for pid in _below(os.getpid()) if _title(pid).startswith(f"ray::ServeReplica:{NAME}:Replica")]

    @contextmanager
    def left(self, body: dict[str, Any]) -> Iterator[None]:
        """A client that asks, waits for no answer, and leaves at the end."""
        content = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            yield

    def metric(self, name: str, replicas: int = 1) -> dict[str, float]:
        """The samples of a metric by replica, added up. A replica that is too busy to answer is asked again."""
        limit = time.monotonic() + PATIENCE_S
        while len(found := self._samples(name)) < replicas:
            assert time.monotonic() < limit, "a replica does not answer"
        return found

    def _samples(self, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                replica, value = line.split('replica="')[1].split('"')[0], float(line.rsplit(" ", 1)[1])
                found[replica] = found.get(replica, 0.0) + value
        return found

    def count(self) -> int:
        """Replicas that run."""
        states = serve.status().applications[NAME].deployments["Replica"].replica_states
        return states.get("RUNNING", 0)


def _below(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def until(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Ray and Serve, from nothing to nothing."""
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
        configure_logging=False,
    )
    port = free_port()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            running = Cluster(port, http)
            running.start()
            yield running
    finally:
        serve.shutdown()
        ray.shutdown()
