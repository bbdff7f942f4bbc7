"""Start-up: what is imported when, and what works without typer and rich."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from tests.invoking import ROOT, invoke


def call(*arguments: str, input: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own. One thread: two would fight over busy cores for nothing."""
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *arguments],
        input=input, capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("line", ["--help", "--version", "run --help", "run", "nonsense"])
def test_help_and_usage_errors_do_not_wait_for_torch(line: str) -> None:
    loaded = _modules_after(line.split())
    assert not loaded & {"torch", "transformers", "numpy", "tokenizers"}


@pytest.mark.parametrize("verb", [["run", "Hi", "--max-tokens", "4"], ["check"]], ids=lambda verb: verb[0])
def test_no_verb_imports_transformers(tiny: str, verb: list[str]) -> None:
    loaded = _modules_after([*verb, "-m", tiny])
    assert "torch" in loaded
    assert "transformers" not in loaded


def _modules_after(arguments: list[str]) -> set[str]:
    script = (
        "import sys\nfrom slipstream.cli import main\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\nMODULES', *sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES ")[2].split())


def test_version_and_module() -> None:
    done = call("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"slipstream {slipstream.__version__}")


def test_help_names_the_default_drafter() -> None:
    from slipstream.drafters.registry import DEFAULT

    assert f"{DEFAULT} (the default)" in " ".join(invoke("run", "--help").output.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["", "run", "check", "corpus"])
def test_a_switch_takes_no_value_in_help(verb: str) -> None:
    shown = invoke(*verb.split(), "--help").output
    assert "--help" in shown and "bool" not in shown


def test_verbs_work_without_typer_and_rich(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Hi")
    script = (
        "import sys\nsys.modules['typer'] = sys.modules['rich'] = None\n"
        "from slipstream.commands.run import run\nfrom slipstream.commands.check.verb import check\n"
        "from slipstream.commands.drafters import drafters\nfrom slipstream.commands.batch.verb import batch\n"
        "from slipstream.commands.shared.options import EngineSetup, Sampling\n"
        f"setup = EngineSetup(model={tiny!r})\n"
        "run('Hi', setup, Sampling(max_tokens=4))\ncheck(setup)\ndrafters()\n"
        f"batch({str(tmp_path / 'q.txt')!r}, {str(tmp_path / 'a.jsonl')!r}, setup, Sampling(max_tokens=4))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout and (tmp_path / "a.jsonl").exists()
