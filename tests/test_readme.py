"""The README's commands and snippets run unchanged."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


def test_the_make_targets_exist_and_ci_calls_the_test_command() -> None:
    targets = [line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("make ")]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_every_link_into_the_repository_leads_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} -> {link}"


def test_lines_of_prose_are_short() -> None:
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number}"


@pytest.mark.real_model
def test_the_python_snippets_print_what_the_readme_shows() -> None:
    """The text and its length to the letter. How many steps it takes is up to the policy, which looks at the clock."""
    shown = re.findall(r"```python\n(.*?)```\n+```\n(.*?)```", README, re.DOTALL)
    assert len(shown) == len(blocks("python")) > 0
    for snippet, expected in shown:
        steps = re.compile(r"in (\d+) steps")
        printed = run([sys.executable, "-c", snippet]).stdout
        assert steps.sub("in N steps", printed) == steps.sub("in N steps", expected)
        tokens = int(expected.splitlines()[-1].split()[0])
        assert all(int(count) <= tokens for count in steps.findall(printed))


@pytest.mark.real_model
def test_the_command_lines_run() -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("slipstream ")]
    assert lines
    for line in lines:
        command = shlex.split(line)[1:]
        assert run([sys.executable, "-m", "slipstream", *command, "--max-tokens", "24"]).stdout.strip()


@pytest.mark.real_model
def test_the_demo_says_what_it_promises() -> None:
    """`make demo` ends in this command; every text must be identical, every promised key there, and copying fast."""
    result = run([sys.executable, "-m", "slipstream", "demo", "--json", "--max-tokens", "12"])
    report = json.loads(result.stdout)
    assert len(report["prompts"]) == 6
    for entry in report["prompts"]:
        assert set(entry) >= {"kind", "plain_tok_s", "speculative_tok_s", "speedup", "tokens_per_step", "identical"}
        assert entry["identical"] is True
    assert {entry["kind"]: entry["tokens_per_step"] for entry in report["prompts"]}["rewriting"] > 1.5
