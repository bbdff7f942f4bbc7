"""Clients that go away, clients that do not read, engines that fail under them."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from slipstream.models.decoder import Decoder
from tests.serving import Served, parsed, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 450,
    "ignore_eos": True,
    "seed": 1,
}


def raw_request(server: Served, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
def test_a_client_that_goes_away_ends_its_request(tiny: str, streams: bool, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: LONG,
        COMPLETIONS: {"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 450, "ignore_eos": True},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 450, "ignore_eos": True},
    }
    with served(tiny) as server:
        server.slow_down(0.01)
        before = server.llm._loop.status().stats.emitted
        connection = raw_request(server, {**bodies[path], "stream": streams}, path)
        wait_for(lambda: server.llm._loop.status().stats.emitted > before + 4)
        assert server.llm.under_way == (2 if path == COMPLETIONS else 1)
        connection.close()
        server.until_idle(3)
        assert server.llm._loop.status().stats.emitted < before + 450, "it did not run to its end"
        wait_for(lambda: server.service.active == 0)
        assert re.search(
            r'^slipstream:requests_total\{.*reason="cancelled"\} 1', server.http.get("/metrics").text, re.M
        )


def test_a_client_that_does_not_read_blocks_no_other_and_misses_nothing(server: Served) -> None:
    body = {**LONG, "stream": True, "return_token_ids": True, "logprobs": True, "top_logprobs": 20}
    wanted = server.answer(CHAT, {**LONG, "return_token_ids": True})["choices"][0]["token_ids"]
    slow = [raw_request(server, body) for _ in range(8)]
    began = time.monotonic()
    assert server.answer(CHAT, {**LONG, "max_tokens": 20})["choices"], "another one is answered meanwhile"
    assert time.monotonic() - began < 20
    wait_for(lambda: server.llm.under_way == 0, 60)
    for connection in slow:
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(65536)
        connection.close()
        text = data.split(b"\r\n\r\n", 1)[1].decode()
        lines = [line for line in text.replace("\r", "").split("\n") if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == wanted
    server.until_idle()


def test_an_engine_that_fails_ends_its_streams_with_an_error_and_goes_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tiny) as server:
        wanted = server.answer(CHAT, LONG)["choices"]
        server.slow_down(0.005)
        forward, calls = Decoder.forward, 0

        def broken(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise RuntimeError("no such kernel")
            return forward(*args, **named)

        monkeypatch.setattr(Decoder, "forward", broken)
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(server.named_events, CHAT, LONG)
            whole = pool.submit(httpx.post, server.url + CHAT, json=LONG, timeout=60)
            events, response = streamed.result(), whole.result()
        assert events[-1] == (None, "[DONE]") and events[-2][0] == "error" and len(events) > 4
        assert "no such kernel" in events[-2][1]["error"]["message"]
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"
        assert response.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
        assert server.answer(CHAT, LONG)["choices"] == wanted
        assert 'slipstream:engine_restarts_total{model_name="' in server.http.get("/metrics").text
        assert server.llm._loop.status().restarts == 1
        server.until_idle()


def test_a_hundred_clients_of_which_some_leave(server: Served) -> None:
    bodies = [{**LONG, "max_tokens": 5 + 7 * n % 60, "seed": n, "temperature": 0.9} for n in range(12)]
    wanted = [server.answer(CHAT, body)["choices"][0]["message"]["content"] for body in bodies]

    def client(number: int) -> None:
        which, text = number % len(bodies), ""
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            http.stream("POST", CHAT, json={**bodies[which], "stream": True}) as response,
        ):
            assert response.status_code == 200, "the queue has room for all"
            for _, data in parsed(response.iter_lines()):
                if data == "[DONE]":
                    assert text == wanted[which]
                    return
                text += data["choices"][0]["delta"].get("content", "")
                if number % 3 == 0 and len(text) > number % 30:
                    return
        raise AssertionError("a stream ended without [DONE]")

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(client, range(100)))
    server.until_idle()


def test_requests_of_many_threads_at_once_count_once(server: Served) -> None:
    gate = threading.Barrier(8)

    def client(number: int) -> int:
        gate.wait()
        return len(server.answer(CHAT, {**LONG, "max_tokens": 10, "n": 2})["choices"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(client, range(8))) == [2] * 8
    wait_for(lambda: server.service.active == 0)
