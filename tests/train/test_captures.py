"""The folder of a server's captures: crashes, torn records, rotation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import OptionError
from slipstream.train import captures
from slipstream.train.captures import CaptureStore, Record, read_captures
from slipstream.train.data import ChatData
from slipstream.train.data_files import data_sets

MODEL: dict[str, Any] = {"model": "m", "fingerprint": "f00d", "vocab_size": 97, "tokenizer": "t"}


def store(folder: Path, most: int = 10**7, **more: Any) -> CaptureStore:
    return CaptureStore(folder, most, **{**MODEL, **more})


def record(number: int, length: int = 4) -> Record:
    return {"prompt_token_ids": [number % 97] * length, "token_ids": [1, 2], "temperature": 0.5, "number": number}


def killed(kept: CaptureStore) -> str:
    """What a killed server leaves in its log."""
    assert kept._log is not None
    kept._log.close()
    return kept._log_file.read_text()


def numbers(folder: Path) -> list[int]:
    return [each["number"] for each in read_captures(folder)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "SHARD_CHATS", 4)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(10):
        kept.add(record(number))
    kept.close()
    assert list(read_captures(tmp_path)) == [record(number) for number in range(10)]
    assert [chat.prompt_len for chat in map(ChatData(tmp_path).__getitem__, range(10))] == [4] * 10
    again = store(tmp_path)
    again.add(record(10))
    again.close()
    assert numbers(tmp_path) == list(range(11)) and data_sets(tmp_path) == [tmp_path / "00000"]


def test_a_kill_loses_nothing_but_a_torn_record(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(7):
        kept.add(record(number))
    text = killed(kept)
    log = kept._log_file
    assert numbers(tmp_path) == [0, 1, 2, 3] and len(text.split()) > 3
    for cut in (1, 10, len(json.dumps(record(6))) - 1):
        log.write_text(text[:-cut])
        store(tmp_path).close()
        assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5] and not list(tmp_path.glob("*/open-*.jsonl"))
        for path in (tmp_path / "00000").glob("*-00001.*"):
            path.unlink()
        header = json.loads((tmp_path / "00000" / "data.json").read_text())
        (tmp_path / "00000" / "data.json").write_text(json.dumps({**header, "shards": header["shards"][:1]}))


def test_a_torn_record_in_the_middle_spoils_no_other(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.add(record(0))
    assert kept._log is not None
    kept._log.write('\n{"prompt_tok')
    kept.add(record(1))
    killed(kept)
    store(tmp_path).close()
    assert numbers(tmp_path) == [0, 1]


def test_a_log_whose_shard_was_written_is_not_read_twice(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.add(record(0))
    log, text = kept._log_file, kept._log_file.read_text()
    kept.close()
    log.write_text(text)  # killed before it was deleted
    store(tmp_path).close()
    assert numbers(tmp_path) == [0]


def test_the_oldest_are_deleted_and_the_size_has_a_bound(tmp_path: Path) -> None:
    most = 200_000
    kept = store(tmp_path, most)
    largest = 0
    for number in range(600):
        kept.add(record(number, 400))
        largest = max(largest, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
    kept.close()
    assert most // 2 < largest <= most
    left = numbers(tmp_path)
    assert left == list(range(left[0], 600)) and left[0] > 0
    assert len(ChatData(tmp_path)) == len(left)


def test_a_small_shard_is_written_in_the_end(tmp_path: Path) -> None:
    now = 0.0
    kept = CaptureStore(tmp_path, 10**7, clock=lambda: now, **MODEL)
    kept.add(record(0))
    assert not kept.due
    now = 601.0
    assert kept.due
    kept.close()
    assert numbers(tmp_path) == [0] and not kept.due


def test_another_model_is_refused(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.add(record(0))
    kept.close()
    with pytest.raises(OptionError, match="was made with fingerprint='f00d', but now it is 'cafe'"):
        store(tmp_path, fingerprint="cafe")
