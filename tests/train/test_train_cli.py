"""`slipstream train`: data given, prompts given or nothing given; what it says, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.drafters.heads import head_checkpoint
from tests.chats import target, tiny_llm, written
from tests.invoking import ROOT, invoke
from tests.tiny import tiny_directory

SHORT = ["--steps=4", "--evaluate=2", "--save=2", "--tokens=512", "--examined=2", "--answer=6", "--set=vocabulary=80"]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def call(*arguments: object, method: str = "eagle3") -> Any:
    return invoke("train", method, "-m", str(target()), *SHORT, *map(str, arguments))


def test_a_drafter_is_trained_and_found_by_run(tmp_path: Path) -> None:
    result = call("--data", written())
    assert result.exit_code == 0, result.output
    place = head_checkpoint.directory("eagle3", tiny_llm().model.fingerprint)
    assert f"saved: {place}" in result.stdout and "a tree of 16 nodes" in result.stdout
    assert "step 4" in result.stderr and "tokens per step" in result.stderr
    assert "--speculate eagle3 " in result.stdout
    used = invoke("run", "-m", str(target()), "--speculate", "eagle3", "--max-tokens", "8", "hello")
    assert used.exit_code == 0, used.output
    again = call("--data", written())
    assert again.exit_code == 0 and "trained already" in again.stderr


def test_figures_as_json_go_to_stdout_alone(tmp_path: Path) -> None:
    result = call("--data", written(), "-o", tmp_path / "drafter", "--json", "--set", "unroll=2")
    figures = json.loads(result.stdout)
    assert figures["place"] == str(tmp_path / "drafter") and figures["tokens_per_step"] >= 1.0
    assert head_checkpoint.load(tmp_path / "drafter").settings["unroll"] == 2


def test_prompts_are_answered_first(tmp_path: Path) -> None:
    prompts = tmp_path / "asked.txt"
    prompts.write_text("".join(f"{chr(33 + number)} tell me about {number * 7919}\n" for number in range(24)))
    result = call("--prompts", prompts, "-o", tmp_path / "drafter", method="medusa")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "drafter-data" / "data.json").exists()
    data = head_checkpoint.load(tmp_path / "drafter").provenance["data"]
    assert data["arguments"]["prompts"]["file"] == "asked.txt" and data["counts"]["items"] == 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method-is", "suffix"], ["suffix cannot be trained", "eagle3"]),
        (["--method-is", "eagel3"], ["unknown drafter 'eagel3'", "did you mean 'eagle3'"]),
        (["--set", "unroll"], ["--set 'unroll' is not NAME=VALUE"]),
        (["--set", "depth=3"], ["unknown option of drafter 'eagle3': 'depth'", "unroll"]),
        (["--set", "unroll=x"], ["unroll='x' is not int"]),
        (["--minutes", "1"], ["steps=4 or minutes=1"]),
        (["--rate", "0"], ["rate=0"]),
        (["--prompts", "p.txt"], ["either --data or --prompts"]),
        (["--threads", "0"], ["threads=0"]),
        (["--init", "nowhere"], ["nowhere holds no trained drafter", "eagle3"]),
    ],
)
def test_what_cannot_be_is_one_line_and_a_hint(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    method = "eagle3"
    if arguments[0] == "--method-is":
        method, arguments = arguments[1], []
    result = call("--data", written(), "-o", tmp_path / "drafter", *arguments, method=method)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ") and len(lines) <= 2
    for word in words:
        assert word in result.stderr


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = call("--data", written(), "-o", tmp_path / "file" / "drafter")
    assert result.exit_code == 2 and "cannot write" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_it_runs_where_neither_typer_nor_rich_is_installed(tmp_path: Path) -> None:
    code = f"""
import runpy, sys
for name in ["typer", "rich", "gguf", "huggingface_hub", "transformers"]:
    sys.modules[name] = None
sys.argv = ["train", "eagle3", "--model", {str(target())!r}, "--data", {str(written())!r},
            "--out", {str(tmp_path / "drafter")!r}, "--steps=2", "--tokens=256", "--prompts=1", "--answer=4",
            "--set=vocabulary=80", "--device=cpu"]
runpy.run_module("slipstream.train", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "tokens_per_step" in result.stdout and (tmp_path / "drafter" / "drafter.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float16"], "on a CPU drafters are trained in float32"),
        (["--init", "nowhere"], "holds no trained drafter"),
        (["--prompts", "nowhere.jsonl"], "cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_is_written(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("train", "eagle3", "-m", str(tiny_directory(characters=True)), "-o", str(tmp_path / "out"), *options)
    assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "out-data").exists()


def test_a_place_with_other_files_is_refused_before_data_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    done = invoke("train", "eagle3", "-m", str(tiny_directory(characters=True)), "-o", str(tmp_path / "out"))
    assert done.exit_code == 2 and "thesis.txt" in done.stderr
    assert not (tmp_path / "out-data").exists()
