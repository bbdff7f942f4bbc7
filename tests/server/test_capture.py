"""`serve --capture`: what is kept, for whom, how much of it, and what it may never do to a request."""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.captured import captured_traces
from slipstream.bench.cost_table import CostTable
from slipstream.errors import OptionError
from slipstream.server.capture import Capture, Hook, load_hook
from slipstream.server.config import ServerConfig
from slipstream.train.captures import Record, read_captures
from slipstream.train.data import ChatData
from tests.invoking import invoke
from tests.server.test_leaving import raw_request, wait_for
from tests.serving import Served, served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, "seed": 1}


@contextmanager
def capturing(model: str, folder: Path, hook: Hook | None = None, most: int = 10**8, **more: Any) -> Iterator[Served]:
    with served(model, ServerConfig(model=model), Capture(folder, most, hook), **more) as server:
        yield server


def records(folder: Path) -> list[Record]:
    return list(read_captures(folder))


def test_answers_are_kept_as_training_data(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with capturing(tiny, folder) as server:
        whole = server.answer(CHAT, {**BODY, "return_token_ids": True})
        server.events(CHAT, {**BODY, "temperature": 0.9})
        server.answer("/v1/completions", {"prompt": ["One", "Two"], "n": 2, "max_tokens": 5, "temperature": 0.5})
        server.answer("/v1/responses", {"input": "Hi", "max_output_tokens": 7})
        fingerprint = server.llm.model.fingerprint
    found, data = records(folder), ChatData(folder)
    assert len(found) == len(data) == 7 and data.fingerprint == fingerprint
    assert [found[0][name] for name in ("prompt_token_ids", "token_ids")] == [
        whole["prompt_token_ids"], whole["choices"][0]["token_ids"],
    ]  # fmt: skip
    assert [record["temperature"] for record in found[:3]] == pytest.approx([0.0, 0.9, 0.5])
    for number, record in enumerate(found):
        assert data[number].tokens.tolist() == record["prompt_token_ids"] + record["token_ids"]
        assert record["acceptance"]["emitted"] == len(record["token_ids"])
        # The policy does not decide the step of a prompt; a second choice of it has no such step.
        count = len(record["token_ids"])
        assert sum(tokens for _, tokens in record["steps"]) in (0, count - 1, count)
    places = [folder, *folder.rglob("*")]
    assert {stat.S_IMODE(place.stat().st_mode) for place in places if place.is_dir()} == {0o700}
    assert {stat.S_IMODE(place.stat().st_mode) for place in places if place.is_file()} == {0o600}


def test_cancelled_and_failed_requests_are_not_kept(tiny: str, tmp_path: Path) -> None:
    with capturing(tiny, tmp_path / "kept") as server:
        server.slow_down(0.01)
        connection = raw_request(server, {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True})
        wait_for(lambda: server.llm.under_way == 1)
        connection.close()
        server.until_idle(5)
        assert server.post(CHAT, {**BODY, "temperature": -1}).status_code == 400
        server.answer(CHAT, BODY)
    assert len(records(tmp_path / "kept")) == 1


def test_a_hook_changes_drops_and_may_fail(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Record] = []

    def hook(record: Record) -> Record | None:
        seen.append(record)
        if "drop" in record["prompt"]:
            return None
        if "fail" in record["prompt"]:
            raise RuntimeError("no")
        if "spoil" in record["prompt"]:
            return {**record, "token_ids": [10**9]}
        return {**record, "prompt": record["prompt"].replace("Bob", "X"), "category": "letters"}

    with caplog.at_level(logging.WARNING), capturing(tiny, tmp_path / "kept", hook) as server:
        for text in ("drop it", "fail", "spoil", "fail again", "Dear Bob"):
            assert server.answer("/v1/completions", {"prompt": text, "max_tokens": 4})["choices"]
        decode = server.llm.get_tokenizer().decode
    (kept,) = records(tmp_path / "kept")
    assert decode(kept["prompt_token_ids"]) == "Dear X" and kept["category"] == "letters"
    assert kept["token_ids"] == seen[-1]["token_ids"] and set(kept).isdisjoint({"prompt", "answer"})
    assert len([r for r in caplog.records if "hook failed" in r.message]) == 1


def test_a_slow_disk_or_hook_blocks_no_request(tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate, kept = threading.Event(), tmp_path / "kept"

    def hook(record: Record) -> Record:
        gate.wait(30)
        return record

    with (
        caplog.at_level(logging.WARNING),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("slipstream.server.capture._WAITING", 2)
        with capturing(tiny, kept, hook) as server:
            for _ in range(6):
                server.answer(CHAT, BODY)
            gate.set()
    assert len(records(kept)) in (2, 3)
    assert len([r for r in caplog.records if "records are dropped" in r.message]) == 1


def test_a_full_disk_is_a_warning_once(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slipstream.train import captures, data

    write, kept = data.write_file, tmp_path / "kept"

    def full(path: Path, *args: Any, **named: Any) -> None:
        if path.name.startswith("index"):
            raise OSError(28, "No space left on device")
        write(path, *args, **named)

    monkeypatch.setattr(captures, "SHARD_CHATS", 1)
    with caplog.at_level(logging.WARNING), capturing(tiny, kept) as server:
        server.answer(CHAT, BODY)
        wait_for(lambda: len(list(kept.glob("*/index-*"))) == 1)
        monkeypatch.setattr(data, "write_file", full)
        for _ in range(3):
            server.answer(CHAT, BODY)
        wait_for(lambda: any("No space left" in r.message for r in caplog.records))
        monkeypatch.setattr(data, "write_file", write)
        server.answer(CHAT, BODY)
    assert 2 <= len(records(kept)) <= 5
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1


def test_one_server_and_one_model_per_folder(tiny: str, tmp_path: Path) -> None:
    first = Capture(tmp_path, 10**6)
    with pytest.raises(OptionError, match="another server captures into"):
        Capture(tmp_path, 10**6)
    first.close()
    Capture(tmp_path, 10**6).close()
    with pytest.raises(OptionError, match="cannot be written"):
        Capture(Path("/proc/nowhere"), 10**6)


def test_a_hook_is_named_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_redaction.py").write_text("def drop(record):\n    return None\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_hook("my_redaction:drop")({}) is None
    for name, message in (("my_redaction:number", "is not a function"), ("my_redaction", "cannot be loaded")):
        with pytest.raises(OptionError, match=message):
            load_hook(name)
    with pytest.raises(OptionError, match="cannot be loaded"):
        load_hook("no_such_module:f")


def test_captures_are_prompts_of_the_bench(tiny: str, tmp_path: Path) -> None:
    from slipstream.bench.encoding import Encoder
    from slipstream.bench.prompts import read_file

    with capturing(tiny, tmp_path / "mine") as server:
        asked = [server.answer(CHAT, {**BODY, "return_token_ids": True}) for _ in range(2)]
        server.answer("/v1/completions", {"prompt": "Once", "max_tokens": 3, "temperature": 0.7, "ignore_eos": True})
        encoder = Encoder(server.llm.get_tokenizer())
    first, second = read_file(tmp_path / "mine")
    assert encoder.encode(first) == asked[0]["prompt_token_ids"] and first.category == "mine"
    assert second.body() == {
        "prompt": list(second.ids), "temperature": pytest.approx(0.7), "max_tokens": 3,
    }  # fmt: skip
    with pytest.raises(OptionError, match="cannot be filled up"):
        encoder.encode(first, context=400)
    with pytest.raises(OptionError, match="another tokenizer"):
        encoder.encode(replace(first, tokenizer="sha256:other"))


@pytest.mark.parametrize("speculate", ["auto", "suffix", "none"])
def test_captures_are_traces_for_simulate(tiny: str, tmp_path: Path, speculate: str) -> None:
    """What a server has answered, on another machine: as many tokens and steps, and a speed-up."""
    folder = tmp_path / "mine"
    with capturing(tiny, folder, speculate=speculate) as server:
        for text in ("One two one two one", "Hi"):
            server.answer(CHAT, {**BODY, "messages": [{"role": "user", "content": text}], "max_tokens": 40})
    kept, found = records(folder), captured_traces(folder)
    assert found.settings == [speculate] or (speculate == "suffix" and set(found.settings) <= {"suffix", "none"})
    for record, answer in zip(kept, found.answers, strict=True):
        assert sum(step.tokens for step in answer.steps) == len(record["token_ids"])
        assert answer.prompt_tokens == len(record["prompt_token_ids"]) == answer.steps[0].context
        assert abs(len(answer.steps) - record["acceptance"]["steps"]) <= 1
        assert set(answer.drafters) <= {"suffix", "ngram"}
    costs = tmp_path / "costs.json"
    table = CostTable([(1, 1, 100, 10.0), (64, 1, 100, 10.0)], {"suffix": [(8, 1, 0.1)]}, [], "flat")
    costs.write_text(json.dumps(table.as_dict()))
    done = invoke("simulate", str(folder), "--costs", str(costs), "--json")
    assert done.exit_code == 0, done.output
    plain, *others = json.loads(done.output)["scenarios"][0]["settings"]
    assert plain["tokens_per_second"] == pytest.approx(100, rel=0.05)
    for each in others:  # rows cost nothing there
        assert each["speedup"] == pytest.approx(each["tokens_per_step"], rel=0.1) and each["nodes"] is None
    missing = invoke("simulate", str(folder))
    assert missing.exit_code == 2 and "has no costs of its own" in missing.stderr


def test_nothing_is_captured_unless_asked(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with served(tiny) as server:
        server.answer(CHAT, BODY)
        assert server.service.capture is None
    assert not list(tmp_path.iterdir())
