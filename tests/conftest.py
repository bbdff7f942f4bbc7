"""Fixtures that many tests share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.text import Tokenizer, tokenizer_from_gguf
from tests import interpreted

interpreted.choose_interpreter()


def pytest_configure(config: pytest.Config) -> None:
    """The same surroundings in every shell, for what tests start as well: children inherit an ignored SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run: tests of a GPU, and tests of kernels without Triton."""
    for item in items:
        if item.get_closest_marker("gpu") and interpreted.DEVICE == "cpu" and not os.environ.get("SLIPSTREAM_EMULATE"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("kernels"):
            if not interpreted.INSTALLED:
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))
            elif interpreted.DEVICE == "cpu":  # NumPy warns of NaN, which the kernels are tested with
                item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and interpreted.INSTALLED:
        interpreted.mend_interpreter()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """One thread, whatever the machine has: most passes are so small that a second one would only be waited for."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_saved_policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Policies start from nothing, and what they learn in one test is not kept for the next."""
    nowhere = tmp_path_factory.mktemp("policies") / "nowhere"
    nowhere.write_text("a file, so that nothing can be written below it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.policy.saved.directory", lambda: nowhere)
        yield


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Tensors that nobody has written to hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained drafters offer the trees that suit cheap rows, whatever processor this is, so marks are the same."""
    monkeypatch.setattr("slipstream.models.decoder.short_vectors", lambda: False)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from slipstream.models.formats.builtin import DEFAULT_MODEL, fetch

    return fetch(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def two_threads(one_thread: None) -> None:
    """For modules in which threads must share the work; the next module has one again."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama, as transformers saved it; not to be written to."""
    from tests.checkpoints import make_model

    path = tmp_path_factory.mktemp("llama")
    make_model("Llama").save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in a GGUF file, with a few tokens; not to be written to."""
    from tests.gguf_files import Q, write_dense

    keys: dict[str, Any] = {"tokenizer.ggml.tokens": ["a", "é", ""], "tokenizer.ggml.scores": [0.5, 1.0, 2.0]}
    return write_dense(tmp_path_factory.mktemp("gguf") / "small.gguf", kind=Q.Q4_0, **keys).close()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A toy tokenizer of bytes and their merges."""
    from tests.vocabularies import gguf_of_byte_level, train_byte_level

    return tokenizer_from_gguf(gguf_of_byte_level(train_byte_level(), "gpt-2"))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    """A toy tokenizer in the style of SentencePiece."""
    from tests.vocabularies import gguf_of_spm

    return tokenizer_from_gguf(gguf_of_spm())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model that chats, for the command line."""
    from tests.invoking import save_model

    return str(save_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same shape, another token map, no chat template."""
    from tests.invoking import save_model

    return str(save_model(tmp_path_factory.mktemp("other"), extra="<|extra|>", template=None))
