"""Keys, limits, health, load and metrics."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import AsyncLLM, __version__
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.server.app import make_app
from slipstream.server.config import ServerConfig
from slipstream.server.service import Service
from tests.serving import Served, served

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 480, "ignore_eos": True}


def test_models_version_ping_and_load(server: Served, tiny: str) -> None:
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == model["root"] == tiny and model["max_model_len"] == 512 and model["object"] == "model"
    assert server.http.get(f"/v1/models/{tiny}").json() == model
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/load").json() == {"server_load": 0}
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {CHAT, "/v1/completions", "/v1/responses", "/tokenize"} <= paths.keys()


def test_a_server_is_not_ready_before_it_is_warm(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = threading.Event()
    monkeypatch.setattr(AsyncLLM, "warm_up", lambda self: warm.wait(30))
    service = Service(ServerConfig(model=tiny), lambda: AsyncLLM(tiny))

    async def main() -> None:
        app = make_app(service)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://x") as http,
        ):
            for path in ("/health", "/ping", "/load", "/v1/models"):
                response = await http.get(path)
                assert response.status_code == 503 and response.headers["retry-after"] == "1", path
            response = await http.post(CHAT, json=HI)
            assert response.status_code == 503 and response.json()["error"]["code"] == "loading"
            assert (await http.get("/metrics")).status_code == 200
            warm.set()
            while (await http.get("/health")).status_code != 200:
                await asyncio.sleep(0.02)
            assert (await http.post(CHAT, json=HI)).status_code == 200
            assert gc.get_freeze_count() > 10_000, "no collection of garbage looks at the model and the libraries"
        assert gc.get_freeze_count() == 0

    import asyncio

    asyncio.run(main())


def test_keys_from_the_command_line_and_a_file(tiny: str, tmp_path: Path) -> None:
    config = ServerConfig(model=tiny, served_names=("small", "also"), api_keys=("secret", "other-key"))
    with served(tiny, config) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            for response in (server.post(CHAT, HI, headers=headers), server.http.get("/v1/models", headers=headers)):
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 401
        for key in ("secret", "other-key"):
            assert server.post(CHAT, HI, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert server.http.get(path).status_code == 200
        bearer = {"authorization": "bearer secret"}
        names = [model["id"] for model in server.http.get("/v1/models", headers=bearer).json()["data"]]
        assert names == ["small", "also"]
        for name, status in (("small", 200), ("also", 200), (tiny, 404)):
            assert server.post(CHAT, {**HI, "model": name}, headers=bearer).status_code == status


def test_other_origins_are_allowed_only_if_configured(server: Served, tiny: str) -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.http.options(CHAT, headers=asking).headers
    with served(tiny, ServerConfig(model=tiny, cors_origins=("https://a.example",), api_keys=("k",))) as open_to_a:
        assert (
            open_to_a.http.options(CHAT, headers=asking).headers["access-control-allow-origin"] == "https://a.example"
        )
        other = {**asking, "origin": "https://b.example"}
        assert "access-control-allow-origin" not in open_to_a.http.options(CHAT, headers=other).headers


def test_a_body_over_the_limit_with_or_without_a_length(tiny: str) -> None:
    with served(tiny, ServerConfig(model=tiny, max_body_bytes=2000)) as server:
        large = {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert server.post(CHAT, large).status_code == 413

        def pieces() -> Any:
            yield b'{"messages": "'
            for _ in range(30):
                yield b"x" * 100

        response = server.http.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert server.post(CHAT, HI).status_code == 200


def test_a_full_queue_is_429_with_a_retry_after(tiny: str) -> None:
    with served(tiny, max_num_seqs=1, max_queue=1) as server:
        server.slow_down(0.01)
        waiting = [
            threading.Thread(target=lambda: httpx.post(server.url + CHAT, json={**LONG, "max_tokens": 40}, timeout=60))
            for _ in "ab"
        ]
        for thread in waiting:
            thread.start()
        while server.llm.under_way < 2:
            time.sleep(0.002)
        response = server.post(CHAT, HI)
        for thread in waiting:
            thread.join()
        assert response.status_code == 429, response.text
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["code"] == "queue_full"
        server.until_idle()
        assert server.post(CHAT, HI).status_code == 200


def test_a_request_that_takes_too_long_is_504_or_an_error_in_its_stream(tiny: str) -> None:
    with served(tiny, ServerConfig(model=tiny, request_timeout=0.05)) as server:
        server.slow_down(0.02)
        response = server.post(CHAT, LONG)
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        events = server.named_events(CHAT, LONG)
        assert events[-1] == (None, "[DONE]") and events[-2][0] == "error"
        assert events[-2][1]["error"]["code"] == "deadline_exceeded"
        server.until_idle()


def test_the_access_log_has_no_prompts(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server.post(CHAT + "?password=hidden", {**HI, "messages": [{"role": "user", "content": "a secret thing"}]})
        server.post(CHAT, {**HI, "messages": [{"role": "user", "content": "a secret thing"}], "nonsense": 1})
    lines = [record.getMessage() for record in caplog.records if record.name == "slipstream.access"]
    assert len(lines) == 2 and re.fullmatch(r"127\.0\.0\.1 POST /v1/chat/completions 200 \d+ ms", lines[0])
    ours = " ".join(record.getMessage() for record in caplog.records if not record.name.startswith("http"))
    assert "secret" not in ours and "hidden" not in ours


def values(text: str) -> dict[str, float]:
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def test_metrics_count_what_was_done(server: Served, tiny: str) -> None:
    body = {**HI, "messages": [{"role": "user", "content": "abc abc abc abc"}], "max_tokens": 60, "temperature": 0}
    before = values(server.http.get("/metrics").text)
    answer = server.answer(CHAT, body)
    *chunks, _ = server.events(CHAT, {**body, "return_token_ids": True})
    after = values(server.http.get("/metrics").text)
    label = f'model_name="{tiny}"'

    def grew(name: str, labels: str = label) -> float:
        key = f"{name}{{{labels}}}"
        return after[key] - before.get(key, 0.0)

    told = answer["metrics"]["speculative_decoding"]
    assert grew("slipstream:generation_tokens_total") == 120
    assert grew("slipstream:prompt_tokens_total") == 2 * answer["usage"]["prompt_tokens"]
    for prefix in ("slipstream", "vllm"):
        name = f"{prefix}:spec_decode_num"
        assert grew(f"{name}_drafts_total") == 2 * told["num_spec_steps"]
        assert grew(f"{name}_draft_tokens_total") == 2 * told["num_draft_tokens"]
        assert grew(f"{name}_accepted_tokens_total") == 2 * told["num_accepted_draft_tokens"] > 0
        assert grew(f"{name}_accepted_tokens_per_pos_total", f'{label},position="0"') > 0
    assert grew("slipstream:spec_decode_num_draft_nodes_total") == 2 * told["num_draft_nodes"]
    assert grew("slipstream:draft_nodes_accepted_total", f'depth="1",drafter="suffix",{label}') > 0
    for name in (
        "time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert grew(f"slipstream:{name}_count") == 2, name
    first = len(chunks[0]["choices"][0]["token_ids"])
    assert grew("slipstream:inter_token_latency_seconds_count") == 60 - first, "of the stream: nobody saw the others"
    assert grew("slipstream:inter_chunk_latency_seconds_count") == len(chunks) - 1 > 0
    assert grew("slipstream:requests_total", f'{label},reason="length"') == 2
    assert grew("slipstream:http_responses_total", f'route="{CHAT}",status="200"') == 2
    assert after[f"slipstream:kv_cache_usage_perc{{{label}}}"] == 0
    assert grew("slipstream:batch_size_count") > 0


def test_metrics_of_the_policy_and_of_drafts_that_fail(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such draft")

    monkeypatch.setattr(SuffixDrafter, "propose", broken)
    body = {**HI, "messages": [{"role": "user", "content": "abc abc abc abc"}], "max_tokens": 60, "temperature": 0}
    with served(tiny) as server:  # where the policy decides
        server.answer(CHAT, body)
        server.answer(CHAT, {**body, "speculate": "suffix"})
        told = values(server.http.get("/metrics").text)
    decided = sum(value for name, value in told.items() if name.startswith("slipstream:policy_decisions_total{"))
    assert 0 < decided <= told[f'slipstream:steps_total{{model_name="{tiny}"}}']
    assert told[f'slipstream:draft_faults_total{{drafter="suffix",model_name="{tiny}"}}'] > 0
