"""`slipstream batch`: a file of prompts answered in one batch, continued until all are answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.commands.batch.lines import LineDefaults, read_lines
from slipstream.llm import LLM
from slipstream.types import SamplingParams
from tests.invoking import ROOT, invoke, save_model

QUESTIONS = ["Why is the sky blue?", "fox fox fox fox fox fox", "Grüße, 東京!", "def add(a, b):", "Hi"]
SHORT = ["--max-tokens", "12", "--ignore-eos"]


def batch(model: str, prompts: Path, answers: Path, *options: str) -> Any:
    return invoke("batch", str(prompts), "-o", str(answers), "-m", model, *SHORT, *options)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("options", [[], ["--raw"], ["--system", "Be brief."], ["--temperature", "1", "--seed", "3"]])
def test_answers_are_those_of_run(tiny: str, questions: Path, tmp_path: Path, options: list[str]) -> None:
    done = batch(tiny, questions, tmp_path / "a.jsonl", *options)
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    records = lines_of(tmp_path / "a.jsonl")
    assert [record["index"] for record in records] == [0, 1, 2, 3, 4], "in the order of the prompts"
    for question, record in zip(QUESTIONS, records, strict=True):
        alone = json.loads(invoke("run", "-m", tiny, "--json", *SHORT, *options, question).stdout)
        assert (record["text"], record["finish_reason"]) == (alone["text"], alone["finish_reason"])
        assert record["usage"]["prompt_tokens"] == alone["prompt_tokens"]
        assert record["usage"]["completion_tokens"] == record["stats"]["emitted"] == 12
        assert record["usage"]["total_tokens"] == alone["prompt_tokens"] + 12
    assert done.stderr.startswith("5 answered in ")


def test_every_way_to_write_a_line(tiny: str, tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hi"}
    lines: list[dict[str, Any]] = [
        {"prompt": "Hi"},
        {"custom_id": "b", "messages": [user], "max_tokens": 3},
        {"id": 7, "messages": [{"role": "system", "content": "Be brief."}, user], "stop": ["e"], "seed": 1},
        {"custom_id": "d", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "gpt-x", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_completion_tokens": 4, "temperature": None, "logprobs": True, "top_logprobs": 2, "stream": False}},
        {"custom_id": "\ud800", "url": "/v1/completions", "body": {"model": "gpt-x", "prompt": "Hi", "n": 2}},
    ]  # fmt: skip
    path = tmp_path / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    done = batch(tiny, path, tmp_path / "a.jsonl")
    assert done.exit_code == 0, done.output
    assert f"lines are for gpt-x: {tiny} answers them" in done.stderr
    first, second, third, fourth, fifth = lines_of(tmp_path / "a.jsonl")
    assert [record["index"] for record in (first, second, third, fourth, fifth)] == [0, 2, 4, 6, 8]
    assert "custom_id" not in first and [r["custom_id"] for r in (second, third, fourth, fifth)] == [
        "b",
        7,
        "d",
        "\ud800",
    ]
    assert second["usage"]["completion_tokens"] == 3 and first["text"].startswith(second["text"])
    assert fourth["text"].startswith(second["text"]) and fourth["usage"]["completion_tokens"] == 4
    assert len(fourth["logprobs"]) == 4 and len(fourth["logprobs"][0]["top"]) == 2
    assert third["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] > fifth["usage"]["prompt_tokens"]
    assert len(fifth["choices"]) == 2 and fifth["usage"]["completion_tokens"] == 24
    assert all(0 <= record["seed"] < 2**53 for record in (first, second, fourth, fifth)) and third["seed"] == 1


BAD = {
    '{"prompt": "Hi"': "not JSON",
    "[1]": "not a JSON object",
    '{"text": "Hi"}': "either prompt or messages is needed",
    '{"prompt": "Hi", "messages": []}': "either prompt or messages is needed",
    '{"prompt": "  "}': "the prompt is empty",
    '{"prompt": 5}': "the prompt is not a string",
    '{"prompt": "Hi", "temprature": 1}': "unknown sampling parameter 'temprature' (did you mean 'temperature'?",
    '{"prompt": "Hi", "temperature": -1}': "temperature=-1 is out of range",
    '{"prompt": "Hi", "stop": 5}': "stop=5 ",
    '{"prompt": "Hi", "id": NaN}': "custom_id=nan is not an id",
    '{"messages": []}': "messages is empty",
    '{"messages": [{"content": "Hi"}]}': "messages[0] has no role",
    '{"messages": [{"role": "user", "content": {"a": 1}}]}': "messages[0] has a content that is not text",
    '{"body": {"prompt": "Hi", "tools": []}}': "unknown sampling parameter 'tools'",
    '{"body": {"prompt": "Hi", "stream": true}}': "stream: ",
    '{"body": [], "custom_id": "x"}': "body is not a JSON object",
    '{"body": {"prompt": "Hi"}, "url": "/v1/embeddings"}': "url '/v1/embeddings'",
    '{"body": {"prompt": "Hi"}, "n": 2}': "unknown field 'n' beside body",
    '{"prompt": "' + "x" * 3000 + '"}': "prompt tokens, but the context holds 512",
    '{"prompt": "Hi", "stop_token_ids": [5000]}': "stop_token_ids: there is no token 5000",
    '{"prompt": "\\ud800"}': "half a surrogate pair",
}


def test_bad_lines_are_reported_by_number_and_end_nothing(tiny: str, tmp_path: Path) -> None:
    path, good = tmp_path / "lines.jsonl", '{"prompt": "Hi"}'
    path.write_text("\n".join([good, *BAD, good]))
    done = batch(tiny, path, tmp_path / "a.jsonl")
    assert done.exit_code == 1 and "Traceback" not in done.stderr
    told = {int(line.split(":")[0][5:]): line.partition(": ")[2] for line in done.stderr.splitlines()[:-1]}
    assert told.keys() == set(range(2, len(BAD) + 2))
    for number, complaint in enumerate(BAD.values(), 2):
        assert complaint in told[number]
    assert [record["index"] for record in lines_of(tmp_path / "a.jsonl")] == [0, len(BAD) + 1]
    assert done.stderr.splitlines()[-1].startswith("2 answered in ") and f"{len(BAD)} could not" in done.stderr


def test_the_same_command_resumes(tiny: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = tmp_path / "a.jsonl"
    assert batch(tiny, questions, answers).exit_code == 0
    whole = answers.read_text()
    first, second, *_ = whole.splitlines(keepends=True)
    answers.write_text(second + first[:-20], encoding="utf-8")  # killed in the middle of a line
    done = batch(tiny, questions, answers)
    assert done.exit_code == 0 and "4 answered" in done.stderr and "1 were there already" in done.stderr
    mended = lines_of(answers)
    assert [(r["index"], r["text"]) for r in mended] == [
        (r["index"], r["text"]) for r in map(json.loads, whole.split("\n")[:-1])
    ]
    answers.write_bytes(answers.read_bytes().removesuffix(b"\n"))  # an editor may do that
    monkeypatch.setattr(LLM, "__init__", lambda *given, **more: pytest.fail("there is nothing to load a model for"))
    again = batch(tiny, questions, answers)
    assert again.exit_code == 0 and again.stderr == "0 answered, 5 were there already\n"
    assert lines_of(answers) == mended


@pytest.mark.parametrize(
    "there", ["precious", "precious\n", '{"index": 5, "x": 1}', '{"index": 0}\n', '{"index": 0, "request": "other"}\n']
)
def test_a_file_of_something_else_is_left_alone(tiny: str, questions: Path, tmp_path: Path, there: str) -> None:
    (tmp_path / "a.jsonl").write_text(there)
    done = batch(tiny, questions, tmp_path / "a.jsonl")
    assert done.exit_code == 2 and " exists: " in done.stderr and "\nhint: " in done.stderr
    assert (tmp_path / "a.jsonl").read_text() == there


def test_answers_of_other_settings_are_not_mixed(tiny: str, questions: Path, tmp_path: Path) -> None:
    assert batch(tiny, questions, tmp_path / "a.jsonl").exit_code == 0
    done = batch(tiny, questions, tmp_path / "a.jsonl", "--temperature", "0.5")
    assert done.exit_code == 2 and "with other settings" in done.stderr


@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        ("nowhere.txt", [], "cannot be read"),
        ("q.csv", [], "is not a file of prompts"),
        ("empty.txt", [], "has no prompts"),
        ("latin.txt", [], "is not UTF-8"),
        ("q.txt", ["--at-once", "0"], "at_once=0 is out of range"),
        ("q.txt", ["--raw", "--system", "x"], "--system needs the chat template"),
        ("q.txt", ["-o", "nowhere/a.jsonl"], "cannot be written"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: str, options: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"q.txt": b"Hi", "q.csv": b"Hi", "empty.txt": b"\n \n", "latin.txt": b"\xff\xfe"}.items():
        Path(name).write_bytes(content)
    done = invoke("batch", prompts, "-o", "a.jsonl", "-m", "nowhere", *options)
    assert done.exit_code == 2 and complaint in done.stderr.splitlines()[0] and not Path("a.jsonl").exists()


def test_answers_may_go_into_a_pipe(tiny: str, questions: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "batch", str(questions), "-m", tiny, "-o", "/dev/stdout", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=_environment(), timeout=120)
    assert done.returncode == 0 and {json.loads(line)["index"] for line in done.stdout.splitlines()} == {0, 1, 2, 3, 4}


def test_ctrl_c_keeps_what_is_there(tmp_path: Path) -> None:
    patient, answers = str(save_model(tmp_path / "patient", context=30_000)), tmp_path / "a.jsonl"
    lines = [{"prompt": "Hi", "max_tokens": 5}, {"prompt": "Hi", "max_tokens": 20_000}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from slipstream.cli import main; main()"
    )
    arguments = ["batch", str(tmp_path / "q.jsonl"), "-m", patient, "-o", str(answers), "--ignore-eos"]
    command = [sys.executable, "-c", program, *arguments, "--speculate", "none"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=_environment())
    try:
        deadline = time.monotonic() + 60
        while not (answers.exists() and answers.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in told
    assert "stopped: 1 of 2 lines are answered" in told and "the same command continues" in told
    assert [record["index"] for record in lines_of(answers)] == [0]


def test_line_numbers_are_kept(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_bytes("\ufeffone\r\n\n  two \u2028 three\r\n".encode())
    asked, wrong = read_lines(tmp_path / "q.txt", LineDefaults(SamplingParams()))
    assert not wrong and [line.index for line in asked] == [0, 2]
    assert [line.messages for line in asked] == [
        [{"role": "user", "content": text}] for text in ("one", "  two \u2028 three")
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
