"""`slipstream demo`: six prompts, plain and speculative, and whether they are identical."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.commands.demo import Comparison, executable
from slipstream.types import Completion, Stats
from tests.invoking import invoke, save_model


def test_demo_json_keeps_its_promises(tmp_path_factory: pytest.TempPathFactory) -> None:
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--json", "--max-tokens", "12")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    kinds = [entry["kind"] for entry in report["prompts"]]
    assert kinds == ["code", "json", "rewriting", "chat", "story", "arithmetic"]
    for entry in report["prompts"]:
        assert {"plain_tok_s", "speculative_tok_s", "speedup", "tokens_per_step", "identical"} <= set(entry)
        assert entry["identical"]
    assert {"model", "speculate", "exact", "speedup", "torch_threads"} <= set(report)


def test_demo_for_people(tmp_path_factory: pytest.TempPathFactory) -> None:
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--max-tokens", "8", "--temperature", "1")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("(identical to plain decoding") == 6
    assert re.search(r"^all +[\d.]+ +[\d.]+ +[\d.]+x", done.stdout, re.MULTILINE)
    assert f" run -m {roomy} --show tree" in done.stdout


def test_answers_of_one_step_have_a_speed(tmp_path_factory: pytest.TempPathFactory) -> None:
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    report = json.loads(invoke("demo", "-m", roomy, "--json", "--max-tokens", "1").stdout)
    for entry in [*report["prompts"], report]:
        assert min(entry["plain_tok_s"], entry["speculative_tok_s"], entry["speedup"]) > 0


def test_a_speed_up_compares_like_with_like() -> None:
    """Where one step gave all of the speculative answer there is no decoding to compare: the whole time counts."""
    plain = Stats(steps=10, emitted=10, decoded=9, prefill_ms=100.0, decode_ms=900.0)
    at_once = Stats(steps=1, emitted=10, decoded=0, prefill_ms=125.0)
    plainly, speculatively = (Completion(0, "", [1] * 10, "length", None, None, stats, 0) for stats in (plain, at_once))
    assert Comparison("code", plainly, speculatively, [], True).speedup == pytest.approx(1000 / 125)


def test_demo_notices_a_difference(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.verify.match import Match

    honest = Match.__call__

    def meddle(self: Match, tree: Any, distributions: Any) -> Any:
        verdict = honest(self, tree, distributions)
        return replace(verdict, tokens=[*verdict.tokens[:-1], 70]) if tree.drafted else verdict

    monkeypatch.setattr(Match, "__call__", meddle)
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--speculate", "suffix", "--max-tokens", "24")
    assert done.exit_code == 1
    assert "NOT identical" in done.stdout


def test_next_command_is_how_we_were_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "venv" / "bin" / "slipstream"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert executable() == "venv/bin/slipstream"
    monkeypatch.setenv("PATH", str(program.parent))
    assert executable() == "slipstream"
    monkeypatch.setattr(sys, "argv", ["/somewhere/slipstream/__main__.py"])
    assert executable().endswith(" -m slipstream")
