"""The benchmark against other engines: its figures, and a row with the reason for a peer that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import usable_cores
from benchmarks.peers.bench import Bench
from benchmarks.peers.environments import Skipped, run
from benchmarks.peers.figures import row, show
from benchmarks.peers.protocol import Paths, Report, Run, Task
from benchmarks.peers.table import PEERS, Peer
from tests.gguf_files import write_dense

ALONE = Report("1.0", startup_s=3.0, peak_mib=500.0, runs=[])


def answered(mode: str, kind: str, first_s: float, decode_s: float, tokens: list[int], first_tokens: int = 1) -> Run:
    return Run(mode, kind, first_s, first_tokens, decode_s, tokens)


RUNS = [
    answered("plain", "code", 0.3, 2.0, [1, 2, 3, 4, 5]),
    answered("plain", "code", 0.2, 1.0, [1, 2, 3, 4, 5]),
    answered("plain", "story", 0.4, 1.0, [7, 8, 9]),
    answered("fast", "code", 0.4, 0.5, [1, 2, 3, 4, 5], first_tokens=3),
    answered("fast", "code", 0.5, 0.25, [1, 2, 3, 4, 5], first_tokens=3),
    answered("fast", "story", 0.6, 2.0, [7, 8, 9]),
]


def test_the_best_round_counts_and_what_came_with_the_first_token_does_not() -> None:
    plain, fast = row("peer", "plain", ALONE, RUNS, None), row("peer", "fast", ALONE, RUNS, "plain")
    assert (plain.tok_s, plain.ttft_ms) == (6 / 2.0, pytest.approx(300))
    assert (plain.slowest, plain.slowest_tok_s) == ("story", 2.0)
    assert (plain.speedup, plain.identical, plain.worst) == (None, None, None)
    assert (plain.version, plain.startup_s, plain.peak_mib) == ("1.0", 3.0, 500.0)
    assert fast.tok_s == 4 / 2.25  # two tokens in a quarter of a second, two in two
    assert [(answer.kind, answer.tok_s) for answer in fast.answers] == [("code", 8.0), ("story", 1.0)]
    assert fast.speedup == (4 / 2.25) / 3.0
    assert (fast.worst, fast.worst_speedup) == ("story", 0.5)
    assert fast.identical


@pytest.mark.parametrize("place", range(len(RUNS)))
def test_one_other_token_in_any_round_is_reported(place: int) -> None:
    changed = [*RUNS]
    changed[place] = Run(**{**vars(RUNS[place]), "tokens": [*RUNS[place].tokens[:-1], 0]})
    assert row("peer", "fast", ALONE, changed, "plain").identical is False


@pytest.mark.parametrize("mode", ["plain", "fast"])
def test_an_answer_that_came_all_at_once_has_no_speed_and_no_speedup(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_once(run: Run) -> Run:
        return answered(run.mode, run.kind, run.first_s, 1e-6, run.tokens, first_tokens=len(run.tokens))

    stories = [at_once(run) if (run.mode, run.kind) == (mode, "story") else run for run in RUNS]
    found = row("peer", "fast", ALONE, stories, "plain")
    assert (found.worst, found.worst_speedup) == ("code", 8.0 / 4.0)
    everything = [at_once(run) if run.mode == mode else run for run in RUNS]
    found = row("peer", "fast", ALONE, everything, "plain")
    assert (found.speedup, found.worst, found.worst_speedup, found.identical) == (None, None, None, True)
    assert row("peer", mode, ALONE, everything, None).tok_s == 0
    show([found])
    assert capsys.readouterr().out.splitlines()[2].endswith("|  |  | identical |")


def test_every_plain_mode_that_is_compared_with_is_a_mode() -> None:
    for peer in PEERS.values():
        assert peer.requirements
        for baseline in peer.modes.values():
            assert baseline is None or peer.modes[baseline] is None


def test_a_command_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    def python(code: str, timeout: float = 60) -> str:
        return run([sys.executable, "-c", code], tmp_path / "log", timeout, "given")

    assert python("import sys; print(sys.stdin.read() + '!')") == "given!\n"
    with pytest.raises(Skipped, match=r"^ValueError: no such mode$"):
        python("raise ValueError('no such mode')")
    with pytest.raises(Skipped, match=r"^ended by SIGABRT$"):
        python("import os; os.abort()")
    with pytest.raises(Skipped, match=r"^took longer than 1 s$"):
        python("import time; time.sleep(60)", timeout=1)
    with pytest.raises(Skipped, match=r"^ERROR: no matching distribution$"):
        python("import sys; print('ERROR: no matching distribution\\nhint', file=sys.stderr); sys.exit(1)")


def test_a_mode_that_breaks_is_a_row_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    """With processes as they are: ours, on a tiny model."""
    gguf = str(write_dense(tmp_path / "tiny.gguf").close())
    task = Task(
        modes=[],
        prompts={"short": [1, 2, 3], "long": [4, 5, 6, 4, 5, 6, 4, 5]},
        stop_ids=[],
        max_tokens=48,
        context=64,
        rounds=2,
        cores=usable_cores()[:1],
        paths=Paths(gguf=gguf, directory="", draft="", scratch=str(tmp_path)),
    )
    modes = {"float32": None, "float32 suffix": "float32", "float32 nonsense": "float32"}
    rows = Bench(tmp_path, task, timeout=300).measure("ours", Peer("benchmarks.peers.ours", modes))
    broken, plain, fast = rows
    assert (broken.mode, broken.as_dict().keys()) == ("float32 nonsense", {"peer", "mode", "skipped"})
    assert broken.skipped is not None and "unknown drafter 'nonsense'" in broken.skipped
    assert plain.startup_s > 0 and plain.peak_mib > 50
    assert fast.identical
    if all(answer.tok_s for answer in [*plain.answers, *fast.answers]):  # a busy machine may hand out all at once
        assert fast.speedup is not None and fast.worst in task.prompts
    assert json.loads(json.dumps(fast.as_dict()))["answers"][1]["kind"] == "long"
