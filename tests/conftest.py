"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    """Two threads everywhere, so that a result does not depend on the machine that runs the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from slipstream.models.builtin import DEFAULT_MODEL, fetch

    return fetch(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules of very small passes, which only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
