"""`slipstream serve` as a process: it starts, says what is wrong, and drains on SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.invoking import ROOT, invoke

CHAT = "/v1/chat/completions"
# Steps of 10 ms: a stream lasts for seconds.
SLOW = """
import sys, time
from slipstream.engine.step import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.01), step(self))[1]
from slipstream.cli import main
main()
"""


@contextmanager
def process(model: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-c", SLOW, "serve", "--model", model, "--port", "0", *arguments]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        found = re.search(r"http://\S+", running.stderr.readline())
        assert found is not None
        url = found[0]
        for _ in range(600):
            try:
                if httpx.get(url + "/health", timeout=1).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield running, url
    finally:
        running.kill()
        running.communicate()


def stream(url: str, tokens: int, into: list[Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + CHAT, json=body, timeout=60) as response:
        into.extend(line for line in response.iter_lines() if line)


def test_running_streams_end_properly_and_new_requests_are_refused(tiny: str) -> None:
    with process(tiny, "--speculate", "none") as (running, url):
        said: list[list[str]] = [[] for _ in range(4)]
        threads = [threading.Thread(target=stream, args=(url, 150, into)) for into in said]
        for thread in threads:
            thread.start()
        while httpx.get(url + "/load").json()["server_load"] < 4:
            time.sleep(0.02)
        time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = False
        try:
            refused = httpx.get(url + "/health", timeout=2).status_code == 503
        except httpx.TransportError:
            refused = True
        assert refused
        for thread in threads:
            thread.join(30)
        for into in said:
            assert into[-1] == "data: [DONE]" and '"finish_reason":"length"' in into[-2]
        assert running.wait(20) in (0, -signal.SIGTERM)


def test_what_takes_longer_than_the_drain_ends_with_an_error(tiny: str) -> None:
    with process(tiny, "--speculate", "none", "--shutdown-timeout", "0.5") as (running, url):
        said: list[str] = []
        thread = threading.Thread(target=stream, args=(url, 480, said))
        thread.start()
        while httpx.get(url + "/load").json()["server_load"] < 1:
            time.sleep(0.02)
        time.sleep(0.2)
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        thread.join(30)
        running.wait(20)
        assert time.monotonic() - began < 6
        assert said[-1] == "data: [DONE]" and said[-3] == "event: error"
        assert "closed" in json.loads(said[-2].removeprefix("data: "))["error"]["message"]


def test_what_cannot_be_served_is_one_line(tiny: str, tmp_path: Path) -> None:
    wrong = invoke("serve", "--model", str(tmp_path / "nothing"), "--port", "0")
    assert wrong.exit_code == 2 and "error: " in wrong.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        used = invoke("serve", "--model", tiny, "--port", port)
    assert used.exit_code == 2 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in used.output
    empty = tmp_path / "keys"
    empty.write_text("# none\n\n")
    keyless = invoke("serve", "--model", tiny, "--port", "0", "--api-key-file", str(empty))
    assert keyless.exit_code == 2 and "has no keys" in keyless.output
    unknown = invoke("serve", "--model", tiny, "--port", "0", "--speculate", "nonsense")
    assert unknown.exit_code == 2 and "nonsense" in unknown.output


def test_keys_of_a_file(tiny: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nfirst-key\n\nsecond-key\n")
    with process(tiny, "--api-key-file", str(keys)) as (_, url):
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers={"authorization": "Bearer second-key"}).status_code == 200
