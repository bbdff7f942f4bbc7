"""A sweep over tree sizes: every setting has a size, and no tree is larger than that."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.bench.schedule import Condition
from slipstream.bench.traces import load
from slipstream.bench.tree_sizes import sized
from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError
from tests.invoking import invoke

TEXT = "The quick brown fox. The quick brown dog. The quick brown fox. The quick"


@pytest.mark.parametrize(
    ("setting", "capped"),
    [
        ("suffix", "suffix:nodes=8"),
        ("suffix:nodes=24", "suffix:nodes=8"),
        ("ngram:max_n=5,nodes=24", "ngram:nodes=8,max_n=5"),
        ("suffix+ngram", "merge:nodes=8,drafters=suffix+ngram"),
        ("suffix+ngram:nodes=4", "merge:nodes=8,drafters=suffix+ngram:nodes=4"),
        ("auto", "auto:max_nodes=8"),
        ("auto:max_nodes=32,drafters=suffix+ngram", "auto:max_nodes=8,drafters=suffix+ngram"),
        ("cascade:suffix+draft_model:model=x,depth=4", "cascade:suffix+draft_model:model=x,depth=8"),
    ],
)
def test_a_size_is_of_the_whole_tree_and_replaces_a_given_one(setting: str, capped: str) -> None:
    assert sized(setting, 8) == str(parse_speculate(capped)) == capped
    assert parse_speculate(capped).checked().plan.nodes == 8


def test_parts_with_several_options_keep_them() -> None:
    spec = parse_speculate(sized("suffix:depth=9,nodes=6+ngram:max_n=5,depth=7", 12))
    assert parse_speculate(str(spec)) == spec
    assert spec.checked().plan.nodes == 12
    assert [str(part) for part in spec.parts()][1:] == ["suffix:depth=9,nodes=6", "ngram:max_n=5,depth=7"]


@pytest.mark.parametrize("nodes", [3, 8])
@pytest.mark.parametrize(
    "setting",
    ["suffix+ngram", "suffix:nodes=24", "suffix:depth=16,nodes=16+ngram:nodes=16,depth=16", "auto", "ngram"],
)
def test_no_traced_tree_is_larger(tiny: str, setting: str, nodes: int) -> None:
    capped = Condition(nodes=nodes).setting(setting)
    with LLM(tiny, speculate=None, drafters=[capped, setting]) as llm:
        how = {"temperature": 0.0, "max_tokens": 120}
        largest = {
            name: max(
                tree.drafted
                for delta in llm.stream(TEXT, SamplingParams(**how, speculate=name), trace=True)
                for tree in delta.trees
            )
            for name in (capped, setting)
        }
    assert 0 < largest[capped] <= nodes
    if nodes == 3 and not setting.startswith("auto"):  # `auto` decides how large its trees are
        assert largest[setting] > nodes, "without the cap some tree is larger, or the test shows nothing"


def test_the_verb_keeps_to_the_size(tiny: str, tmp_path: Path) -> None:
    file, traces = tmp_path / "mine.txt", tmp_path / "trace.jsonl"
    file.write_text(f"{TEXT}\nOne fish, two fish, red fish, blue fish. One fish, two\n")
    done = invoke("bench", "-m", tiny, "--prompts", str(file), "--tokens", "60", "--minutes", "0.2", "--nodes", "5",
                  "--speculate", "suffix:nodes=24", "--speculate", "suffix+ngram", "--trace", str(traces),
                  "-o", str(tmp_path / "out"))  # fmt: skip
    assert done.exit_code == 0, done.output
    answers = load(traces).answers
    assert {answer.setting for answer in answers} == {"none", "suffix:nodes=24", "suffix+ngram"}
    assert max(len(step.parents) for answer in answers for step in answer.steps) <= 5


def test_settings_that_become_the_same_are_refused(tiny: str, tmp_path: object) -> None:
    done = invoke("bench", "-m", tiny, "--speculate", "suffix:nodes=24", "--speculate", "suffix", "--nodes", "8,16",
                  "-o", str(tmp_path))  # fmt: skip
    assert done.exit_code == 2 and "with 8 nodes, two settings are the same" in done.stderr
    with pytest.raises(OptionError, match="nodes=2 is out of range"):
        parse_speculate(sized("lookahead", 2))
