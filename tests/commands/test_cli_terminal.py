"""The command line in a real terminal: Ctrl-C, colours and trees."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.commands.shared.wrap import cells
from slipstream.text import Tokenizer
from tests.invoking import ROOT, save_model

ENDLESS = ["--ignore-eos", "--max-tokens", "20000"]


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The program in its own pseudo-terminal, so that Ctrl-C arrives as it does for a person."""
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


def _press(descriptor: int, key: bytes, pattern: str) -> str:
    """Press a key until the pattern is seen: between showing its prompt and waiting for keys readline is deaf."""
    for _ in range(20):
        time.sleep(0.5)
        os.write(descriptor, key)
        with contextlib.suppress(AssertionError):
            return _expect(descriptor, pattern, seconds=3)
    raise AssertionError(f"{pattern!r} did not come")


def _resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def _token(model: str, text: str) -> int:
    (token,) = Tokenizer.from_directory(model).encode(text, add_special=False)
    return token


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("chat", "-m", patient, "--speculate", "none", *ENDLESS) as (screen, process):
        _expect(screen, ">>> ")
        os.write(screen, b"Hello\n")
        _expect(screen, "Hello\r\n(.|\n)+")
        time.sleep(0.5)
        os.write(screen, b"\x03")
        _expect(screen, r"\(stopped\)(.|\n)*>>> ")
        _press(screen, b"\x03", r"/exit leaves(.|\n)*>>> ")
        os.write(screen, f"/save {tmp_path / 'talk.json'}\n".encode())
        _expect(screen, r"saved 2 messages(.|\n)*>>> ")
        os.write(screen, b"\x04")
        assert process.wait(60) == 0


def test_ctrl_c_ends_run_quietly(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("run", "-m", patient, "--speculate", "none", "Hi", *ENDLESS) as (screen, process):
        _expect(screen, r"\x1b\[K(?!loading)[^\x1b]{20}")
        os.write(screen, b"\x03")
        assert process.wait(60) == 130
        with contextlib.suppress(OSError):
            assert "Traceback" not in os.read(screen, 1 << 20).decode("utf-8", "replace")


def test_chat_wraps_words_at_the_edge(tiny: str) -> None:
    sampled = ["--ignore-eos", "--max-tokens", "200", "--temperature", "1", "--seed", "1"]
    with terminal("chat", "-m", tiny, *sampled) as (screen, _):
        _resize(screen, columns=30)
        _expect(screen, ">>> ")
        words = ",".join(str(_token(tiny, letter)) for letter in "abcdefg ")  # prose, whatever the model would say
        os.write(screen, f"/set allowed_token_ids=[{words}]\n".encode())
        _expect(screen, r"allowed_token_ids=(.|\n)*>>> ")
        os.write(screen, b'/set logit_bias={"%d": 2}\n' % _token(tiny, " "))
        _expect(screen, r"logit_bias=(.|\n)*>>> ")
        os.write(screen, b"Hello\n")
        shown = _expect(screen, r"tokens, (.|\n)*>>> ")
    answer = shown.partition("Hello\r\n")[2].partition("\x1b")[0]
    lines = [line.rstrip() for line in answer.split("\r\n")]
    assert len(lines) > 5
    prose = [line for line in lines if " " in line and not line.startswith(("    ", "|", "\t"))]
    assert prose and all(cells(line) <= 30 for line in prose)


def test_batch_shows_a_bar_and_stops_at_ctrl_c(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    lines = ['{"prompt": "Hi", "max_tokens": 3}', "nonsense", '{"prompt": "Hi", "max_tokens": 20000}']
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    where = [str(tmp_path / "q.jsonl"), "-o", str(tmp_path / "a.jsonl"), "-m", patient]
    with terminal("batch", *where, "--ignore-eos", "--speculate", "none") as (screen, process):
        assert "line 2: not JSON" in _expect(screen, "2/3.*tok/s")
        os.write(screen, b"\x03")
        assert "Traceback" not in _expect(screen, "stopped: 1 of 3 lines are answered")
        assert process.wait(60) == 130
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1


def test_colours_and_trees_in_a_terminal(tiny: str) -> None:
    prompt = "fox fox fox fox fox fox fox"
    options = ["-m", tiny, "--speculate", "suffix", "--max-tokens", "40", "--ignore-eos", prompt]
    with terminal("run", "--show", "origin", *options) as (screen, process):
        assert "\x1b[32m" in _expect(screen, "tok/s")
        assert process.wait(60) == 0
    with terminal("run", "--show", "tree", *options) as (screen, process):
        assert "✓" in _expect(screen, "tok/s")
    with terminal("drafters") as (screen, process):
        assert "suffix" in _expect(screen, "Options are given")
