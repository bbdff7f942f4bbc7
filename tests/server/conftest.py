"""One server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Served, served


@pytest.fixture(scope="session")
def server(tiny: str) -> Iterator[Served]:
    with served(tiny, drafters=["suffix", "ngram"], max_num_seqs=16, max_queue=64) as running:
        yield running
