"""Replicas on the real Ray: the same answers, clients that leave, replicas that die, come, go and change."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from slipstream import LLM, SamplingParams

pytest.importorskip("ray")
from slipstream.server.ray.calls import Call
from slipstream.server.ray.prefixes import prefixes_of
from tests.server.ray.cluster import CHAT, NAME, until

pytestmark = [pytest.mark.replicas, pytest.mark.filterwarnings("ignore")]  # Ray has some warnings

if TYPE_CHECKING:
    from tests.server.ray.cluster import Cluster

RUNNING, SAID = "slipstream:num_requests_running", "slipstream:generation_tokens_total"
READ = "slipstream:prompt_tokens_total"


def chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "seed": 1, **more}


def running(cluster: Cluster, replicas: int = 3) -> int:
    return int(sum(cluster.metric(RUNNING, replicas).values()))


def test_a_replica_answers_as_the_engine_does_and_refuses_as_the_server_does(three: Cluster, patient: str) -> None:
    body = chat("Hello", 100, temperature=0.8)
    wanted = LLM(patient, speculate="none").chat(
        body["messages"], SamplingParams(temperature=0.8, seed=1, max_tokens=100)
    )
    assert three.post(body).json()["choices"][0]["message"]["content"] == wanted[0].text
    events = list(three.stream(body))
    assert "".join(data["choices"][0]["delta"].get("content", "") for _, data in events[:-1]) == wanted[0].text
    assert events[-1] == (None, "[DONE]")
    assert three.post({**body, "tokens": 3}).json()["error"]["param"] == "tokens"
    assert three.http.get("/nothing").json()["error"]["type"] == "not_found_error"
    json_type = {"content-type": "application/json"}
    assert three.http.post(CHAT, content=b" " * (17 << 20), headers=json_type).status_code == 413
    assert three.http.get("/health").status_code == 200 and "<html" in three.http.get("/").text
    assert len(three.metric(RUNNING, replicas=3)) == 3


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine(three: Cluster, streams: bool) -> None:
    def said() -> float:
        return sum(three.metric(SAID, replicas=3).values())

    before = said()
    body = chat("Hi", 4000, ignore_eos=True)
    if streams:
        events = three.stream(body)
        for _ in range(5):
            next(events)
        assert running(three) == 1, "it comes while it is made, not in one piece"
        events.close()
    else:
        with three.left(body):
            until(lambda: said() > before)
            assert running(three) == 1
    until(lambda: running(three) == 0)
    until(lambda: three.http.get("/load").json()["server_load"] == 0)
    assert before < said() < before + 4000, "it did not run to its end"


def test_a_conversation_goes_on_where_it_began_and_others_go_where_there_is_least_to_do(three: Cluster) -> None:
    texts = [f"{n}. " + f"conversation number {n} " * 30 for n in range(6)]
    before = three.metric(READ, replicas=3)
    with ThreadPoolExecutor(6) as pool:  # answers long enough that all six run at once
        first = list(pool.map(lambda text: three.post(chat(text, 600, ignore_eos=True)).json(), texts))
    read = three.metric(READ, replicas=3)
    assert all(read[replica] > before[replica] + 600 for replica in before), "each replica has some of them"
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in first] == [0] * 6
    for text, answer in zip(texts, first, strict=True):
        more = chat(text, 5)
        more["messages"] += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And then?"},
        ]
        usage = three.post(more).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > len(text) - 32, "but for its last page"


def test_a_router_that_has_seen_nothing_knows_what_replicas_publish(three: Cluster) -> None:
    from ray import serve

    other = serve.get_deployment_handle("Replica", NAME).options(stream=True, method_name="answer")
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "http_version": "1.1"}
    scope["headers"] = [(b"content-type", b"application/json")]

    def cached(text: str) -> int:
        body = json.dumps(chat(text, 3)).encode()
        answer = other.remote(Call.of(scope, body, prefixes_of(body)))
        said = b"".join(message.get("body", b"") for batch in answer for message in batch)
        return int(json.loads(said)["usage"]["prompt_tokens_details"]["cached_tokens"])

    found = []
    for seconds in (2.5, 5, 10, 30):  # replicas publish every second, if the machine lets them
        texts = [f"{n} tells after {seconds} " + "something else " * 40 for n in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda text: three.post(chat(text, 100, ignore_eos=True)), texts))
        time.sleep(seconds)
        found = [cached(text) for text in texts]
        if min(found) > 500:
            return
    pytest.fail(f"cached tokens: {found}")


def test_the_requests_of_a_replica_that_is_killed_fail_once_and_no_others(three: Cluster) -> None:
    def ask(number: int) -> tuple[str, Any]:
        body = chat(f"{number} asks", 1500, ignore_eos=True, temperature=1.0)
        if number % 3 == 0:
            response = three.post(body)
            return str(response.status_code), response
        if number % 3 == 1:
            *events, last = three.stream(body)
            assert last == (None, "[DONE]")
        else:
            other = {"input": body["messages"], "max_output_tokens": 1500, "ignore_eos": True}
            events = list(three.stream(other, "/v1/responses"))
            assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        return ("error", events[-1]) if events[-1][0] == "error" else ("200", events)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(12)]
        until(lambda: running(three) == 12)
        shares = three.metric(RUNNING, replicas=3)
        os.kill(three.replicas()[0], signal.SIGKILL)
        answers = [one.result() for one in asked]
    gone: list[str] = []

    def one_is_gone() -> bool:
        gone[:] = shares.keys() - three.metric(RUNNING).keys()
        return len(gone) == 1

    until(one_is_gone)
    failed = [answer for answer in answers if answer[0] != "200"]
    assert len(failed) == shares[gone[0]] > 0
    for kind, what in failed:
        if kind == "error":
            assert what[1]["error"]["code"] == "replica_lost"
        else:
            assert kind == "503" and what.headers["retry-after"] == "1"
            assert what.json()["error"]["code"] == "replica_lost"
    assert all(ask(number)[0] == "200" for number in range(4)), "once"
    until(lambda: three.count() == 3)


def test_an_update_replaces_all_replicas_without_a_failed_request(three: Cluster, patient: str) -> None:
    before, stop = set(three.replicas()), threading.Event()

    def client(number: int) -> list[int]:
        found = []
        while not stop.is_set():
            found.append(three.post(chat(f"client {number}", 40, ignore_eos=True)).status_code)
        return found

    with ThreadPoolExecutor(10) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        long = [pool.submit(list, three.stream(chat(f"long {number}", 1500, ignore_eos=True))) for number in range(6)]
        until(lambda: running(three) > 6)
        try:
            three.run(model=patient, replicas=3, speculate="ngram")
            until(lambda: not before & set(three.replicas()))
        finally:
            stop.set()
        statuses = [status for one in clients for status in one.result()]
    assert set(statuses) == {200} and len(statuses) > 20
    for one in long:
        assert one.result()[-2][1]["choices"][0]["finish_reason"] == "length", "a replica ends after its streams"
    assert three.http.get("/v1/models").json()["data"][0]["drafters"] == ["ngram", "none"]


def test_replicas_come_and_go_with_the_load(ray_cluster: Cluster, patient: str) -> None:
    pace = {"upscale_delay_s": 0.5, "downscale_delay_s": 0.5, "metrics_interval_s": 0.2, "look_back_period_s": 1.0}
    how = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2, **pace}
    ray_cluster.run(model=patient, autoscaling=how)
    until(lambda: ray_cluster.count() == 1)
    enough, stop = threading.Event(), threading.Event()

    def client(number: int) -> list[int]:
        found = []
        while not (stop if number < 2 else enough).is_set():
            found.append(ray_cluster.post(chat(f"client {number}", 100, ignore_eos=True)).status_code)
        return found

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        try:
            until(lambda: ray_cluster.count() == 3)
            enough.set()
            until(lambda: ray_cluster.count() == 1)  # while two clients go on
        finally:
            enough.set()
            stop.set()
        statuses = [one.result() for one in clients]
    assert all(len(each) > 1 and set(each) == {200} for each in statuses)


def test_what_is_too_much_for_a_replica_is_refused(ray_cluster: Cluster, patient: str) -> None:
    ray_cluster.run(model=patient, replicas=1, max_num_seqs=8, max_queue=4)
    until(lambda: len(ray_cluster.metric(RUNNING)) == 1)
    refused, stop = list[httpx.Response](), threading.Event()

    def ask(number: int) -> int:
        body = {**chat(f"{number} of many", 4000, ignore_eos=True), "stream": True}
        with ray_cluster.http.stream("POST", CHAT, json=body) as response:
            if response.status_code == 200:
                next(line for line in response.iter_lines() if stop.is_set() or "[DONE]" in line)
            else:
                response.read()
                refused.append(response)
            return response.status_code

    with ThreadPoolExecutor(96) as pool:  # twelve at the replica, twelve wait for it
        crowd = [pool.submit(ask, number) for number in range(25)]

        def one_more() -> bool:
            """The front hears of its limits some time after the replica is ready, and keeps whom it has let in."""
            crowd.append(pool.submit(ask, len(crowd)))
            time.sleep(1)
            return bool(refused)

        try:
            until(one_more)
        finally:
            stop.set()
        statuses = [one.result() for one in crowd]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 12
    assert all(one.json()["error"]["code"] == "queue_full" and one.headers["retry-after"] for one in refused)
    assert ray_cluster.post(chat("And now?", 3)).status_code == 200
