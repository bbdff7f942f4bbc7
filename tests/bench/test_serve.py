"""Measuring a server: what is sent, what is counted, and what the client costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.serve.client import Address, Client, Response
from slipstream.bench.serve.events import read_answer
from slipstream.bench.serve.load import Load, Offered, Wire, offer
from slipstream.bench.serve.metrics import point, service_levels
from slipstream.errors import OptionError
from tests.bench.sse_server import SseServer, serving
from tests.invoking import invoke
from tests.serving import served


def prompts(count: int, **more: Any) -> list[BenchPrompt]:
    said = ({"role": "user", "content": "Count."},)
    return [BenchPrompt(f"p{number}", "count", said, **more) for number in range(count)]


def offered(server: SseServer, load: Load, asked: list[BenchPrompt], seconds: float = 60.0) -> Offered:
    async def run() -> Offered:
        client = Client(Address.parse(server.url), {})
        found = await offer(Wire(client, "words", 32), asked, load, seconds, lambda n: None)
        await client.close()
        return found

    return asyncio.run(run())


def test_times_of_an_answer_are_those_of_its_chunks() -> None:
    with serving(tokens=5, first=0.1, gap=0.03) as server:
        (answer,) = offered(server, Load(concurrency=1), prompts(1)).answers
    assert answer.success and answer.text == "one two three four five "
    assert (answer.prompt_len, answer.output_len, len(answer.itl)) == (7, 5, 4)
    assert 0.1 <= answer.ttft < 0.2
    assert all(0.025 < gap < 0.1 for gap in answer.itl)
    assert answer.latency == pytest.approx(answer.ttft + sum(answer.itl))


def test_the_first_token_is_text_and_not_a_role() -> None:
    """A server may send the role at once; that is not the first token."""
    with serving(tokens=2, first=0.2) as server:
        (answer,) = offered(server, Load(concurrency=1), prompts(1)).answers
    assert answer.ttft >= 0.2


def test_a_closed_loop_keeps_so_many_requests_under_way() -> None:
    with serving(tokens=3, gap=0.01) as server:
        found = offered(server, Load(concurrency=4), prompts(20))
    assert server.most_under_way == 4
    assert [answer.success for answer in found.answers] == [True] * 20


def test_a_kept_connection_that_the_server_has_closed_is_replaced() -> None:
    with serving(each=2) as server:
        found = offered(server, Load(concurrency=2), prompts(9))
    assert [answer.error for answer in found.answers if not answer.success] == []
    assert len(found.answers) == len(server.asked) == 9


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with serving(tokens=2, first=0.5) as server:
        found = offered(server, Load(rate=50.0), prompts(10))
    assert server.most_under_way > 4
    assert len(found.answers) == 10 and found.duration < 2.0


def test_no_request_is_sent_after_the_time() -> None:
    with serving(tokens=2, first=0.05) as server:
        found = offered(server, Load(concurrency=1), prompts(100), seconds=0.3)
    assert 2 <= len(found.answers) < 10


def test_later_turns_carry_the_answers_before() -> None:
    with serving(tokens=2) as server:
        found = offered(server, Load(concurrency=1), prompts(1, turns=("And on?", "And?")))
    assert len(found.answers) == 3
    said = [message["content"] for message in server.asked[2]["messages"]]
    assert said == ["Count.", "one two ", "And on?", "one two ", "And?"]


def test_the_body_is_that_of_the_line() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    with serving() as server:
        offered(server, Load(concurrency=1), prompts(1, tools=tools, sampling={"temperature": 0.5, "stop": ["x"]}))
        offered(server, Load(concurrency=1), [BenchPrompt("p", "plain", text="Once")])
    chat, plain = server.asked
    assert chat["path"] == "/v1/chat/completions" and chat["tools"] == list(tools)
    assert (chat["temperature"], chat["stop"], chat["max_tokens"], chat["stream"]) == (0.5, ["x"], 32, True)
    assert plain["path"] == "/v1/completions" and plain["prompt"] == "Once"


def test_an_error_of_the_server_is_reported() -> None:
    with serving(status=503) as server:
        (answer,) = offered(server, Load(concurrency=1), prompts(1)).answers
    assert not answer.success and answer.error == "HTTP 503: out of words"


def test_a_connection_that_breaks_is_a_failed_request() -> None:
    response = Response()
    response.sent, response.error = 0.0, "the connection was closed"
    response.pieces = [(0.1, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:")]
    assert not read_answer(response).success


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
def test_events_are_read_wherever_packets_end(width: int) -> None:
    events = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in ("Grü", "ße ", "\n\n0\r\n\r\n")]
    body = b"".join(
        f"{len(data):x}\r\n".encode() + data + b"\r\n" for data in (f"data: {event}\n\n".encode() for event in events)
    )
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
    response = Response()
    response.pieces = [(1.0 + i, raw[i : i + width]) for i in range(0, len(raw), width)]
    answer = read_answer(response)
    assert answer.success and answer.text == "Grüße \n\n0\r\n\r\n" and len(answer.itl) == 2


def test_metrics_have_the_names_and_definitions_of_vllm() -> None:
    with serving(tokens=5, first=0.05, gap=0.02) as server:
        found = point(offered(server, Load(concurrency=2), prompts(6)), "words", service_levels(["ttft:1000 tpot:100"]))
        strict = point(offered(server, Load(concurrency=2), prompts(6)), "words", service_levels(["ttft:1"]))
    assert {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"} <= found.keys()
    assert {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"} <= found.keys()
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p95", "p99")} <= found.keys()
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 30)
    assert found["request_goodput"] == found["request_throughput"] == 6 / found["duration"]
    assert strict["request_goodput"] == 0.0
    assert found["mean_tpot_ms"] == pytest.approx(1000 * sum((sum(gaps)) / 4 for gaps in found["itls"]) / 6)
    assert found["median_e2el_ms"] >= found["median_ttft_ms"] + 4 * 20
    assert found["max_concurrent_requests"] == 2
    assert len(found["start_times"]) == len(found["latencies"]) == 6 and found["endpoint_type"] == found["backend"]
    assert json.dumps(found)


def test_the_client_is_cheap() -> None:
    """16 streams of 25 tokens a second: well below what would disturb a server on the same machine."""
    with serving(tokens=50, gap=0.04) as server:
        found = offered(server, Load(concurrency=16), prompts(16))
    assert len(found.answers) == 16
    assert found.cpu / found.duration < 0.10  # of a core; 2% on an idle one


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:5", "tpot:-1"])
def test_a_wrong_service_level_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a service level"):
        service_levels([text])


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="is not an address"):
        Address.parse(url)


def test_an_address_may_have_a_path() -> None:
    assert Address.parse("https://host/llm/v1/") == ("host", 443, "/llm", True)


def test_the_verb_measures_every_load(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    with serving(tokens=3) as server:
        done = invoke("bench", "--url", server.url, "--prompts", str(file), "--concurrency", "1,2", "--requests", "6",
                      "--goodput", "ttft:500,tpot:50", "--price", "1/h", "-o", str(tmp_path / "out"))  # fmt: skip
    assert done.exit_code == 0, done.output
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [found["label"] for found in saved["points"]] == ["concurrency 1", "concurrency 2"]
    assert [found["completed"] for found in saved["points"]] == [6, 6]
    assert saved["model"]["name"] == "words" and saved["points"][0]["cost_per_million_tokens"] > 0
    for number, load in enumerate(("concurrency-1", "concurrency-2")):
        alone = json.loads((tmp_path / "out" / f"serve-{load}.json").read_text())
        assert alone == saved["points"][number]
    assert "the client took" in done.output


def test_our_own_server_is_measured(tiny: str, tmp_path: Path) -> None:
    """Tokens and times of a real server; a tool, a format and a plain completion are understood."""
    lines: list[dict[str, Any]] = [{"prompt": f"The quick {n}", "category": "c"} for n in range(4)]
    lines += [{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}]
    lines += [{"model": "m", "prompt": "Once upon"}]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    with served(tiny, speculate="suffix") as server:
        done = invoke("bench", "--url", server.url, "--prompts", str(file), "--tokens", "12", "--concurrency", "3",
                      "--requests", "12", "-o", str(tmp_path / "out"))  # fmt: skip
    assert done.exit_code == 0, done.output
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())["points"]
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, [""] * 12)
    assert all(1 <= length <= 12 for length in found["output_lens"]) and all(found["input_lens"])
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = invoke("bench", "--url", "http://127.0.0.1:1", "-o", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: no connection to 127.0.0.1:1: ")
