"""What goes wrong on the command line: one line and a hint, the right exit code, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.invoking import ROOT, invoke


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--speculate", "sufix"], "error: unknown drafter 'sufix'\nhint: did you mean 'suffix'?"),
        (["--speculate", "suffix:dept=3"], "error: unknown option of drafter 'suffix': 'dept'\nhint: did you mean"),
        (["--speculative-config", "{"], "error: --speculative-config is not JSON"),
        (["--speculative-config", "[1]"], "error: --speculative-config is not a JSON object"),
        (["--speculative-config", '{"method": "ngram"}', "--speculate", "none"], "error: give either"),
        (["--verifier", "magic"], "error: unknown verifier 'magic'"),
        (["--temperature", "-1"], "error: temperature=-1.0 is out of range\nhint: valid: 0"),
        (["--show", "everything"], "error: unknown --show 'everything'"),
        (["--show", "tree", "--json"], "error: --show and --json exclude each other"),
        (["--logprobs", "2"], "error: --logprobs needs --json"),
        (["--raw", "--system", "x"], "error: --system needs the chat template"),
        (["--logit-bias", "5"], "error: --logit-bias '5' is not ID=VALUE"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "error: --logit-bias names token 5 twice"),
        (["--logit-bias", "5000=1"], "error: logit_bias: "),
        (["--stop-token-id", "5000"], "error: stop_token_ids: "),
        (["--threads", "0"], "error: threads=0 is out of range"),
        (["--device", "tpu"], "error: unknown device 'tpu'"),
        (["--max-model-len", "9999"], "error: max_model_len=9999 is out of range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_a_hint(tiny: str, options: list[str], complaint: str) -> None:
    done = invoke("run", "-m", tiny, "Hi", *options)
    assert done.exit_code == 2
    assert done.stderr.startswith(complaint)
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_bad_model_path(tmp_path: Path) -> None:
    done = invoke("run", "-m", str(tmp_path / "nowhere"), "Hi")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no such model") and "\nhint: " in done.stderr


def test_debug_shows_where(tmp_path: Path) -> None:
    done = invoke("run", "-m", str(tmp_path / "nowhere"), "Hi", "--debug")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and "error: no such model" in done.stderr


def test_no_length_is_named_where_none_would_fit(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.memory.available_bytes", lambda device: 1000)
    done = invoke("run", "-m", tiny, "Hi")
    assert done.exit_code == 2 and done.stderr.endswith("\nhint: the weights leave no room for any\n")


@pytest.mark.parametrize("given", [b"", b"\n", b"  \n", b"\xff\xfe"])
def test_useless_standard_input(tiny: str, given: bytes) -> None:
    done = invoke("run", "-m", tiny, "-", input=given)
    assert done.exit_code == 2
    complaint = "standard input is not UTF-8" if given[:1] == b"\xff" else "the prompt is empty"
    assert done.stderr.startswith(f"error: {complaint}")


@pytest.mark.parametrize(
    ("line", "complaint", "cure"),
    [
        ("run", "Missing argument 'PROMPT'", "run --help"),
        ("run Hi --temprature 1", "No such option: --temprature (Possible options: --temperature)", "run --help"),
        ("run Hi --seed x", "Invalid value for '--seed': ", "run --help"),
        ("run Hi there", "Got unexpected extra argument", "run --help"),
        ("run Hi --stop", "Option '--stop' requires an argument", " --help"),
        ("chta", "No such command 'chta'", "--help"),
        ("corpus biuld", "No such command 'biuld'", "corpus --help"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(line: str, complaint: str, cure: str) -> None:
    done = invoke(*line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {complaint}") and hint.startswith("hint: ") and hint.endswith(cure)


@pytest.mark.parametrize("line", ["", "corpus"])
def test_nothing_asked_is_answered_with_help(line: str) -> None:
    done = invoke(*line.split())
    assert done.exit_code == 2 and "Usage: " in done.output and "error: " not in done.output


def test_an_empty_prompt_is_reported_before_a_model_is_opened(tmp_path: Path) -> None:
    done = invoke("run", "-m", str(tmp_path / "nowhere"), "  ")
    assert (done.exit_code, done.stderr) == (2, "error: the prompt is empty\nhint: give some text\n")


def test_no_cure_that_cannot_be_had(tiny: str) -> None:
    whole = invoke("run", "-m", tiny, "x" * 3000)
    assert whole.exit_code == 2 and whole.stderr.endswith("\nhint: shorten the prompt\n")
    part = invoke("run", "-m", tiny, "x" * 3000, "--max-model-len", "100")
    assert part.exit_code == 2 and part.stderr.endswith("\nhint: shorten the prompt or raise max_model_len\n")


def test_broken_pipe_is_quiet(tiny: str) -> None:
    command = f"{sys.executable} -m slipstream run -m {tiny} --ignore-eos --max-tokens 400 Hi | head -c 1 >/dev/null"
    shell = ["bash", "-c", f"set -o pipefail; {command}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_warnings_of_the_engine_go_to_stderr(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.drafters.suffix import SuffixDrafter

    def fail(*args: object) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(SuffixDrafter, "propose", fail)
    done = invoke("run", "-m", tiny, "--speculate", "suffix", "--max-tokens", "3", "--ignore-eos", "Hi")
    assert done.exit_code == 0
    assert re.search(r"^warning: .*out of ideas", done.stderr, re.MULTILINE)
    assert "draft faults: 1" in done.stderr
