"""One Ray for all these tests: it takes longer to start than they take to run."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.ray.cluster import Cluster


@pytest.fixture(scope="package")
def patient() -> str:
    """A random model whose answers take seconds: 64 layers, a token a character, contexts of 4096."""
    from tests.tiny import tiny_directory

    return str(tiny_directory(layers=64, context=4096, characters=True))


@pytest.fixture(scope="package")
def ray_cluster(patient: str) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    from tests.server.ray.cluster import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray keeps one in the user's home
        patch.setenv("RAY_worker_niceness", "0")  # otherwise whatever else runs here comes first
        patch.setenv("OMP_NUM_THREADS", "1")
        with cluster() as running:
            yield running


@pytest.fixture(scope="package")
def three(ray_cluster: Cluster, patient: str) -> Cluster:
    """Three replicas. A test may replace them by three others."""
    ray_cluster.run(model=patient, replicas=3)
    return ray_cluster
