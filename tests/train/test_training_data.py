"""Training data on disk: round trip, refusal of damaged files, continuing after an interrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import CorruptFile, OptionError
from slipstream.train.data import ChatData, ChatWriter
from slipstream.train.data_files import CUT, FOLLOWED, INDEX, write_file

CHATS = [([5, 6, 7, 8], 2, 0.0), ([1, 96], 1, 0.7), ([0, 0, 3, 4, 5, 96], 5, 1.0), ([9] * 40, 10, 0.0)]


def writer(folder: Path, **changes: Any) -> ChatWriter:
    facts: dict[str, Any] = {"fingerprint": "f00d", "vocab_size": 97, "tokenizer": "t", "arguments": {"seed": 0}}
    return ChatWriter(folder, **{**facts, **changes})


def fill(folder: Path, **changes: Any) -> Path:
    """Two shards of two chats."""
    with writer(folder, **changes) as made:
        for number, (tokens, prompt_len, temperature) in enumerate(CHATS):
            made.append(
                tokens, prompt_len, temperature=temperature, item=number, flags=CUT if number == 3 else FOLLOWED
            )
            if number == 1:
                made.commit(3, {"empty turn": 1})
    return folder


def edit(folder: Path, **changes: Any) -> None:
    header = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**header, **changes}))


@pytest.mark.parametrize(("vocab_size", "width"), [(97, 2), (65_536, 2), (65_537, 4)])
def test_what_was_written_is_read_again(tmp_path: Path, vocab_size: int, width: int) -> None:
    data = ChatData(fill(tmp_path / "new" / "data", vocab_size=vocab_size))
    assert len(data) == 4 and (data.fingerprint, data.vocab_size) == ("f00d", vocab_size)
    for chat, (tokens, prompt_len, temperature) in zip(data, CHATS, strict=True):  # type: ignore[call-overload]
        assert chat.tokens.dtype == np.int64 and chat.tokens.tolist() == tokens
        assert (chat.prompt_len, chat.sampled) == (prompt_len, temperature > 0)
    with pytest.raises(IndexError):
        data[4]
    assert data.description["counts"]["answer_tokens"] == 2 + 1 + 1 + 30
    assert data.description["counts"] == {
        "items": 5, "kept": 4, "dropped": {"empty turn": 1}, "cut": 1, "tokens": 52, "answer_tokens": 34,
    }  # fmt: skip
    assert data.description["slipstream"] and data.description["torch"] and data.description["created"]
    raw = np.fromfile(tmp_path / "new" / "data" / "tokens-00001.bin", f"<u{width}")
    assert raw.tolist() == CHATS[2][0] + CHATS[3][0]


def test_several_data_sets_are_read_as_one(tmp_path: Path) -> None:
    one, other = fill(tmp_path / "one"), fill(tmp_path / "other", arguments={"seed": 1})
    both = ChatData(one, other)
    assert [chat.tokens.tolist() for chat in map(both.__getitem__, range(8))] == 2 * [tokens for tokens, _, _ in CHATS]
    assert both.description["counts"]["answer_tokens"] == 68 and both.description["counts"]["kept"] == 8
    assert both.description["arguments"] == [{"seed": 0}, {"seed": 1}]
    stranger = fill(tmp_path / "stranger", fingerprint="cafe")
    with pytest.raises(OptionError, match=r"stranger.*different models"):
        ChatData(one, stranger)


def test_the_largest_id_fits(tmp_path: Path) -> None:
    with writer(tmp_path, vocab_size=65_536) as made:
        made.append([65_535, 0], 1)
    assert ChatData(tmp_path)[0].tokens.tolist() == [65_535, 0]


@pytest.mark.parametrize(("tokens", "prompt_len"), [([1, 2], 2), ([1, 2], 0), ([], 0), ([1, 97], 1), ([-1, 2], 1)])
def test_a_chat_that_cannot_be_is_not_written(tmp_path: Path, tokens: list[int], prompt_len: int) -> None:
    with writer(tmp_path) as made, pytest.raises(ValueError):
        made.append(tokens, prompt_len)


def test_a_shard_with_nothing_kept_leaves_its_counts(tmp_path: Path) -> None:
    with writer(tmp_path) as made:
        made.commit(8, {"turn too long": 8})
    with pytest.raises(CorruptFile, match="names no chats"):
        ChatData(tmp_path)
    assert writer(tmp_path).counts["dropped"] == {"turn too long": 8} and writer(tmp_path).items == 8


def test_an_error_keeps_what_was_committed_and_the_next_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer(tmp_path) as made:
        made.append([1, 2], 1, signature=[1, 2, 3, 2**64 - 1])
        made.commit(1)
        made.append([3, 4], 1)
        raise KeyboardInterrupt
    assert len(ChatData(tmp_path)) == 1
    created = ChatData(tmp_path).description["created"]
    # What a killed process leaves: a file that is not whole, and a shard that data.json does not name.
    (tmp_path / "tokens-00001.bin.partial").write_bytes(b"x")
    (tmp_path / "tokens-00001.bin").write_bytes(b"xyz")
    with writer(tmp_path) as made:
        assert made.items == 1
        assert [bands.tolist() for bands in made.signatures()] == [[1, 2, 3, 2**64 - 1]]
        made.append([3, 4], 1)
    data = ChatData(tmp_path)
    assert [chat.tokens.tolist() for chat in data] == [[1, 2], [3, 4]]  # type: ignore[attr-defined]
    assert data.description["created"] == created


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": "beef"}, "fingerprint='f00d'"),
        ({"vocab_size": 98}, "vocab_size=97"),
        ({"tokenizer": "u"}, "tokenizer='t'"),
        ({"sources": ["a"]}, "sources="),
        ({"arguments": {"seed": 1}}, "seed=0, but now it is 1"),
        ({"arguments": {"seed": 0, "max_tokens": 5}}, "max_tokens=None"),
    ],
)
def test_a_directory_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    fill(tmp_path)
    with pytest.raises(OptionError, match=named):
        writer(tmp_path, **changes)
    assert len(ChatData(tmp_path)) == 4


def test_what_is_no_data_set_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OptionError, match=r"is left alone: it has 'thesis.tex'"):
        writer(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    for place, why in ((tmp_path, "has no data.json"), (tmp_path / "none", "is no directory")):
        with pytest.raises(OptionError, match=why):
            ChatData(place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "slipstream corpus"}, "does not describe a data set"),
        ({"version": 2}, "version 2 of the format"),
        ({"vocab_size": 0}, "no valid 'vocab_size'"),
        ({"token_bytes": 3}, "no valid 'token_bytes'"),
        ({"token_bytes": 4}, "'.*tokens-00000.bin' has 12 bytes, expected 24"),
        ({"fingerprint": None}, "no valid 'fingerprint'"),
        ({"counts": {"items": 1}}, "no valid 'counts'"),
        ({"shards": [{"chats": "2", "tokens": 6}]}, "no valid 'shards'"),
        ({"shards": [{"chats": 2, "tokens": 6}] * 2}, "tokens-00001.bin' has 92 bytes, expected 12"),
        ({"shards": []}, "names no chats"),
        ({"vocab_size": 50}, "tokens-00000.bin' is corrupt: there is no token 96"),
    ],
)
def test_a_broken_description_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    edit(fill(tmp_path), **changes)
    with pytest.raises(CorruptFile, match=message) as caught:
        _ = ChatData(tmp_path)[1]
    assert "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_garbled_description_is_refused(tmp_path: Path, content: bytes) -> None:
    (fill(tmp_path) / "data.json").write_bytes(content)
    for opening in (ChatData, writer):
        with pytest.raises(CorruptFile, match=r"data\.json"):
            opening(tmp_path)


@pytest.mark.parametrize("field", ["end", "prompt_len"])
@pytest.mark.parametrize("value", [0, 5, 2**32 - 1])
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, field: str, value: int) -> None:
    path = fill(tmp_path) / "index-00000.bin"
    index = np.fromfile(path, INDEX)
    index[field][0] = value
    index.tofile(path)
    with pytest.raises(CorruptFile, match=r"index-00000.bin' is corrupt"):
        ChatData(tmp_path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "x"
    write_file(target, b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(target, b"new")
    assert target.read_bytes() == b"old"
