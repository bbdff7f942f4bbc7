"""What takes long at a first start says so in one line: on a command line that is piped, and to a Python program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_directory

SAY = "from slipstream.notice import notice; notice(logging.getLogger('slipstream'), 'packing %s', 'it')"
BOTH = ["compiling CPU kernels (once", "to int4 (cached for later starts"]


def stderr_of(*arguments: str, cache: Path | None = None) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if cache is None else {"SLIPSTREAM_CACHE": str(cache)})}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("", ["slipstream: packing it"]),
        ("logging.basicConfig(level='INFO')", ["INFO:slipstream:packing it"]),
        ("logging.basicConfig(level='WARNING')", []),
        ("logging.getLogger('slipstream').addHandler(logging.NullHandler())", []),
        ("import sys; sys.stderr = None", []),
    ],
)
def test_one_line_unless_logging_is_configured(before: str, lines: list[str]) -> None:
    assert stderr_of("-c", f"import logging\n{before}\n{SAY}") == lines


@pytest.mark.parametrize("way", ["command", "python"])
def test_the_first_start_says_what_it_does_and_the_second_is_silent(way: str, tmp_path: Path) -> None:
    model = str(tiny_directory(characters=True))
    script = f"from slipstream import LLM\nLLM({model!r}, speculate=None, quantize='int4').generate('Hi')"
    command = ["-m", "slipstream", "run", "Hi", "-m", model, "--quantize", "int4", "--max-tokens", "2"]
    first, second = (stderr_of(*(command if way == "command" else ["-c", script]), cache=tmp_path) for _ in range(2))
    assert [sum(what in line for line in first) for what in BOTH] == [1, 1], first
    assert not any(what in line for line in second for what in BOTH), second
