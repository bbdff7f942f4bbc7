"""A virtual environment for each peer, made once; and commands run in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers.table import Peer

ROOT = Path(__file__).parents[2]
_CONSTRAINTS = ROOT / "constraints.txt"
# No network access and no telemetry while a peer is measured.
_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


class Skipped(Exception):
    """A peer, or one of its modes, that cannot be measured here: one line says why."""


def environment(name: str, peer: Peer, work: Path, timeout: float) -> str:
    """The Python that runs `peer`; installs its requirements if needed."""
    if not peer.requirements:
        return sys.executable
    place = work / "environments" / name
    python, marker = place / "bin" / "python", place / "installed"
    # Compiled packages (llama.cpp) depend on CMAKE_ARGS.
    wanted = "\n".join([*peer.requirements, *peer.unwanted, _CONSTRAINTS.read_text(), os.environ.get("CMAKE_ARGS", "")])
    if marker.exists() and marker.read_text() == wanted:
        return str(python)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    log = work / "logs" / f"{name}-install.log"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    # No cache: it would keep gigabytes a second time, and packages compiled with other CMAKE_ARGS.
    run([*pip, "install", "-q", "--no-cache-dir", "-c", str(_CONSTRAINTS), *peer.requirements], log, timeout)
    if peer.unwanted:
        run([*pip, "uninstall", "-q", "-y", *peer.unwanted], log, timeout)
    marker.write_text(wanted)
    return str(python)


def run(
    command: list[str],
    log: Path,
    timeout: float,
    given: str = "",
    cores: Sequence[int] | None = None,
    preload: str | None = None,
) -> str:
    """The stdout of `command` with a text on stdin, on some cores only; stderr goes to `log`.

    `preload`: a library, relative to the environment of the Python.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    libraries = {"LD_PRELOAD": str(Path(command[0]).parents[1] / preload)} if preload else {}
    pinned = cores is not None and hasattr(os, "sched_setaffinity")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_QUIET, **libraries},
            preexec_fn=partial(os.sched_setaffinity, 0, cores or ()) if pinned else None,
            start_new_session=True,  # so that its children can be ended with it
        ) as process,
    ):
        try:
            written, _ = process.communicate(given, timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Skipped(f"took longer than {timeout:.0f} s") from None
            raise
    if process.returncode:
        raise Skipped(_reason(process.returncode, log))
    return written


def _reason(code: int, log: Path) -> str:
    """The last meaningful line, or the signal that ended it."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR", "error:"))]
    return (errors or lines or [f"exit status {code}"])[-1][:300]
