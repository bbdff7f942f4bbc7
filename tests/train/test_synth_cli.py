"""`slipstream synth` as a user calls it: messages, refusals, and continuing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.commands import synth as command
from slipstream.errors import WriterFailed
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.load import load_model
from slipstream.train.data import ChatData
from slipstream.train.data_files import INDEX
from slipstream.train.synth.phrasebook import phrasebook
from slipstream.train.synth.scribe import Written
from slipstream.train.synth.write import Synthesis
from slipstream.train.synth.writers import WriteJob, Writers
from tests.invoking import ROOT, invoke
from tests.tiny import tiny_directory
from tests.train.test_synth import PLAIN, content, model


def synth(folder: Path, *arguments: object, template: str | None = PLAIN) -> Any:
    options = ["-m", model(template), "-o", folder, "--max-tokens", "24", "--at-once", "8", *arguments]
    return invoke("synth", *map(str, options))


def test_it_writes_reports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    first = synth(folder, "-n", 6)
    assert first.exit_code == 0, first.output
    assert "6 conversations: at most about 0.0 MiB and" in first.stderr and "tokens per second" in first.stderr
    data = ChatData(folder)
    assert f"{folder}: {len(data):,} of 6 conversations, " in first.stdout
    target, _ = load_model(model(PLAIN), dtype="auto", device="cpu")
    assert (data.fingerprint, data.vocab_size) == (target.fingerprint, 97)
    assert data.description["tokenizer"].startswith("sha256:")
    given = {"seed": 0, "max_tokens": 24, "dtype": "float32", "prompts": None, "recipe": 4}
    assert data.description["arguments"] == {**given, "phrases": phrasebook().digest}

    def interrupt(meter: object, status: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command._Meter, "__call__", interrupt)
        stopped = synth(folder, "-n", 12)
    assert stopped.exit_code == 130
    assert "6 of 12 conversations: continuing" in stopped.stderr and "stopped: 6 of 12 are kept" in stopped.stderr
    more = synth(folder, "-n", 12)
    assert more.exit_code == 0 and ChatData(folder).description["counts"]["items"] == 12
    again = synth(folder, "-n", 10)
    assert again.exit_code == 0 and "has its 12 conversations already" in again.stderr
    other = synth(folder, "-n", 12, "--seed", 5)
    assert other.exit_code == 2 and "was made with seed=0, but now it is 5" in other.stderr
    monkeypatch.setattr("slipstream.train.synth.conversation.RECIPE", 2)
    monkeypatch.setattr("slipstream.train.synth.conversation.SOURCES", ("free",))
    older = synth(folder, "-n", 6)
    assert older.exit_code == 2 and "was made with recipe=4, but now it is 2" in older.stderr, "not a list of sources"
    monkeypatch.undo()
    stranger = synth(folder, "-n", 12, template=None)
    assert stranger.exit_code == 0, "the weights and the tokens are the same"
    elsewhere = invoke("synth", "-m", str(tiny_directory(1, characters=True)), "-o", str(folder), "--max-tokens", "24")
    assert elsewhere.exit_code == 2 and "was made with fingerprint=" in elsewhere.stderr


def test_several_writers_make_the_data_of_one(tmp_path: Path) -> None:
    """Byte by byte, also where the work was begun by one of them."""
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert synth(folder, "-n", 4).exit_code == 0
    assert synth(tmp_path / "one", "-n", 40).exit_code == 0
    many = synth(tmp_path / "two", "-n", 40, "--writers", 2)
    assert many.exit_code == 0, many.output
    assert "4 of 40 conversations: continuing" in many.stderr and "16 conversations at once" in many.stderr
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert one == two and ChatData(tmp_path / "two").description["counts"]["items"] == 40


def test_a_writer_that_is_gone_or_fails_is_reported_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    written = Writers.write

    def killed(writers: Writers, numbers: range) -> Iterator[Written]:
        for place, made in enumerate(written(writers, numbers)):
            if place == 160:  # a shard has 32, in order, and some conversations are long
                writers._processes[1].kill()
            yield made

    with monkeypatch.context() as patch:
        patch.setattr(Writers, "write", killed)
        patch.setattr("slipstream.train.synth.write.Synthesis", partial(Synthesis, shard_items=32))
        gone = synth(folder, "-n", 4000, "--writers", 2)
    assert gone.exit_code == 2 and "writer 2 ended with exit code -9" in gone.stderr, gone.output
    kept = ChatData(folder).description["counts"]["items"]
    assert kept >= 32 and kept % 32 == 0
    assert synth(folder, "-n", kept + 3).exit_code == 0
    order = WriteJob({"model": str(tmp_path / "none"), "device": "cpu"}, {}, 1, 1)
    with Writers(1, order) as writers, pytest.raises(WriterFailed, match=r"writer 1: .*none"):
        writers.ready()
    assert not writers._processes[0].is_alive()


@pytest.mark.parametrize("after", ["the start", "a shard"])
def test_an_interrupt_ends_all_writers_without_a_word_too_many(tmp_path: Path, after: str) -> None:
    folder = tmp_path / "data"
    program = [sys.executable, "-c", "from slipstream.cli import main; main()"]  # as the console's script does
    options = ["-m", model(PLAIN), "-o", folder, "-n", 9999, "--max-tokens", 24, "--at-once", 8, "--writers", 2]
    command = [*program, "synth", *map(str, options)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        awaited = folder / ("data.json" if after == "the start" else "index-00000.bin")
        while not awaited.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 130 and "Traceback" not in said, said
        assert after == "the start" or "of 9,999 are kept" in said
        with pytest.raises(ProcessLookupError):  # nobody is left, when python's own helper has gone as well
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_prompts_of_a_file_are_answered(tmp_path: Path) -> None:
    prompts = tmp_path / "asked.jsonl"
    lines = [{"prompt": "What is it?"}, {"instruction": "Add", "input": "1 2"}, {"turns": ["Hello", "More"]}]
    prompts.write_text("\n".join(map(json.dumps, [*lines, {"text": "What is it?"}])))
    done = synth(tmp_path / "data", "--prompts", prompts)
    assert done.exit_code == 0, done.output
    description = ChatData(tmp_path / "data").description
    assert description["sources"] == ["asked.jsonl"]
    assert description["arguments"]["prompts"]["file"] == "asked.jsonl"
    counts = description["counts"]
    assert counts["items"] == 4 and counts["dropped"]["near-duplicate"] == 1 and "1 near-duplicate" in done.stdout
    prompts.write_text('{"prompt": "Something else"}')
    changed = synth(tmp_path / "data", "--prompts", prompts)
    assert changed.exit_code == 2 and "was made with prompts=" in changed.stderr


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", 0], "n=0 is out of range"),
        (["-n", -5], "n=-5 is out of range"),
        (["--max-tokens", 0], "max_tokens=0 is out of range"),
        (["--at-once", 0], "at_once=0 is out of range"),
        (["--writers", 0], "writers=0 is out of range"),
        (["--threads", 0], "threads=0 is out of range"),
        (["--seed", -1], "seed=-1 is out of range"),
        (["--prompts", "empty.jsonl"], "'{}/empty.jsonl' has no prompts"),
        (["--prompts", "garbled.jsonl"], "'{}/garbled.jsonl' is not UTF-8"),
        (["--prompts", "none.jsonl"], "'{}/none.jsonl' line 1 has no prompt"),
        (["--prompts", "one.txt", "-n", 2], "'{}/one.txt' has 1 prompts, not 2"),
        (["--prompts", "missing.txt"], "'{}/missing.txt' cannot be read: No such file"),
        (["-o", "one.txt"], "cannot write '{}/one.txt': File exists"),
        (["-o", "one.txt/data"], "cannot write '{}/one.txt/data': Not a directory"),
        (["-o", "."], "'{}' is not a data set and is left alone: it has 'empty.jsonl'"),
        (["-m", "bare"], "has no tokenizer, so it cannot write"),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(tmp_path: Path, arguments: list[object], message: str) -> None:
    write(tmp_path / "empty.jsonl", "\n \n")
    write(tmp_path / "garbled.jsonl", b"\xff\xfe\x00")
    write(tmp_path / "none.jsonl", '{"answer": "x"}')
    write(tmp_path / "one.txt", "one prompt")
    named = [
        tmp_path / str(a) if b in ("--prompts", "-o") else a for a, b in zip(arguments, ["", *arguments], strict=False)
    ]
    named = [tiny_directory() if argument == "bare" else argument for argument in named]
    done = synth(tmp_path / "data", *named)
    assert done.exit_code == 2, done.output
    assert f"error: {message.format(tmp_path)}" in done.stderr or message in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
    assert not (tmp_path / "data" / "data.json").exists()


def test_a_full_disk_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    done = synth(tmp_path / "data", "-n", 5000)
    assert done.exit_code == 2 and "may need" in done.stderr and "1.0 MiB are free" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert synth(tmp_path, "-n", 6).exit_code == 0

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        done = synth(tmp_path, "-n", 9)
    assert done.exit_code == 2 and f"error: cannot write '{tmp_path}': No space left on device" in done.stderr
    assert ChatData(tmp_path).description["counts"]["items"] == 6
    assert synth(tmp_path, "-n", 9).exit_code == 0


@pytest.mark.real_model
def test_the_default_model_writes_conversations(tmp_path: Path, smollm2_path: Path) -> None:
    done = invoke("synth", "-o", str(tmp_path), "-n", "4", "--max-tokens", "16", "--seed", "4")  # no long turn
    assert done.exit_code == 0, done.output
    data = ChatData(tmp_path)
    assert len(data) == 4 and data.vocab_size == 49_152 and data.description["token_bytes"] == 2
    tokenizer = open_checkpoint(smollm2_path).tokenizer()
    assert tokenizer is not None
    for chat in data:  # type: ignore[attr-defined]
        prompt = tokenizer.decode(chat.tokens[: chat.prompt_len].tolist(), skip_special=False)
        assert prompt.startswith("<|im_start|>system\n") and prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    index = np.fromfile(tmp_path / "index-00000.bin", INDEX)
    assert len(set(index["source"].tolist())) >= 2
