"""The command line in a real terminal: Ctrl-C, colours and trees."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.invoking import ROOT, save_model

ENDLESS = ["--ignore-eos", "--max-tokens", "20000"]


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The program behind a pseudo-terminal of its own, so that Ctrl-C arrives as it does for a person."""
    ours, theirs = pty.openpty()
    # The leader of a new session gets the first terminal that it opens as its own; an ignored SIGINT is inherited.
    opened = 'exec "$@" <"$0" >"$0" 2>"$0"'
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from slipstream.cli import main; main()"
    )
    process = subprocess.Popen(
        ["sh", "-c", opened, os.ttyname(theirs), sys.executable, "-c", program, *arguments],
        cwd=ROOT, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _expect(descriptor: int, pattern: str, seconds: float = 60) -> str:
    """Read until the pattern was seen."""
    seen, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, seen):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{pattern!r} did not come; there was {seen[-500:]!r}"
        try:
            seen += os.read(descriptor, 65536).decode("utf-8", "replace")
        except OSError:  # the other side is closed
            assert re.search(pattern, seen), seen[-500:]
    return seen


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("chat", "-m", patient, "--speculate", "none", *ENDLESS) as (screen, process):
        _expect(screen, ">>> ")
        os.write(screen, b"Hello\n")
        _expect(screen, "Hello\r\n(.|\n)+")
        time.sleep(0.5)
        os.write(screen, b"\x03")
        _expect(screen, r"\(stopped\)(.|\n)*>>> ")
        time.sleep(0.5)  # between showing its prompt and waiting for keys readline is deaf
        os.write(screen, b"\x03")
        _expect(screen, r"/exit leaves(.|\n)*>>> ")
        os.write(screen, b"/save /dev/null\n")
        _expect(screen, r"saved 2 messages(.|\n)*>>> ")
        os.write(screen, b"\x04")
        assert process.wait(30) == 0


def test_ctrl_c_ends_run_quietly(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("run", "-m", patient, "--speculate", "none", "Hi", *ENDLESS) as (screen, process):
        _expect(screen, r"\x1b\[K(?!loading)[^\x1b]{20}")
        os.write(screen, b"\x03")
        assert process.wait(30) == 130
        with contextlib.suppress(OSError):
            assert "Traceback" not in os.read(screen, 1 << 20).decode("utf-8", "replace")


def test_colours_and_trees_in_a_terminal(tiny: str) -> None:
    prompt = "fox fox fox fox fox fox fox"
    options = ["-m", tiny, "--max-tokens", "40", "--ignore-eos", prompt]
    with terminal("run", "--show", "origin", *options) as (screen, process):
        assert "\x1b[32m" in _expect(screen, "tok/s")
        assert process.wait(30) == 0
    with terminal("run", "--show", "tree", *options) as (screen, process):
        assert "✓" in _expect(screen, "tok/s")
    with terminal("drafters") as (screen, process):
        assert "suffix" in _expect(screen, "Options are given")
