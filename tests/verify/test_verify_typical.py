"""`typical`: which paths it keeps, that it is lossy, and that it says so everywhere."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from slipstream import SamplingParams
from slipstream.cli import app
from slipstream.tree import TokenTree
from slipstream.verify import Match, Typical, make_verifier
from slipstream.verify.typical import DELTA, EPSILON, threshold
from tests.tiny import tiny_directory, tiny_llm
from tests.verify.outcomes import Numbered, distribution
from tests.verify.tables import (
    Prefix,
    Randomness,
    TableDrafter,
    Tables,
    TableTarget,
    decode,
    draft_tables,
    exact_joint,
    p_value,
    target_tables,
)

# -- what is typical --------------------------------------------------------------------------------------------------


def test_thresholds() -> None:
    assert (EPSILON, DELTA) == (0.09, 0.3)  # Medusa's
    assert threshold(distribution(1, 0, 0)) == EPSILON
    assert threshold(torch.full((5,), 0.2, dtype=torch.float64)) == pytest.approx(0.3 / 5)
    assert threshold(distribution(1, 1, 0, 0)) == pytest.approx(EPSILON)  # 0.3 / 2 is more
    assert 0.0 < threshold(torch.full((200_000,), 5e-6, dtype=torch.float64)) < 5e-6


def kept_paths(tree: TokenTree, tables: Tables) -> list[list[int]]:
    """Every path of nodes of which each is typical, by the definition of the paper."""
    paths = []
    for node in range(len(tree)):
        path = tree.path(node)
        if all(is_typical(tables[tuple(tree.path_tokens(tree.parents[n]))], tree.tokens[n]) for n in path):
            paths.append(path)
    return paths


def is_typical(p: torch.Tensor, token: int) -> bool:
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    return float(p[token]) > min(0.09, 0.3 * math.exp(-entropy))


def test_the_longest_typical_path_is_kept_and_of_those_the_likeliest() -> None:
    target = target_tables(3100, zeros=0.3)
    generator = np.random.default_rng(3101)
    lengths = Counter[int]()
    for sample in range(800):
        tree = TokenTree(0)
        for _ in range(10):
            parent = int(generator.integers(len(tree)))
            if tree.depths[parent] < 4:
                tree.add(parent, int(generator.integers(5)))
        verdict = Typical()(tree, TableTarget(target, tree, (), Randomness(sample, 1), 0))
        kept = kept_paths(tree, target)
        longest = [path for path in kept if len(path) == max(map(len, kept))]
        likelihoods = [joint(tuple(tree.tokens[n] for n in path), target) for path in longest]
        assert verdict.nodes == longest[int(np.argmax(likelihoods))]
        assert verdict.tokens[:-1] == [tree.tokens[n] for n in verdict.nodes]
        assert float(target[tuple(verdict.tokens[:-1])][verdict.tokens[-1]]) > 0
        lengths[len(verdict.nodes)] += 1
    assert len(lengths) >= 4, "short and long paths must be in what is tested"


def joint(path: Prefix, target: Tables) -> float:
    return float(np.prod([float(target[path[:i]][token]) for i, token in enumerate(path)]))


def test_a_scout_is_never_accepted_and_nothing_is_requested_needlessly() -> None:
    target = {(): distribution(50, 49, 1), (0,): distribution(1, 1, 1), (1,): distribution(1, 1, 1)}
    tree = TokenTree(0)
    tree.add(tree.add(0, 2), 0)  # too unlikely, with a child
    tree.add(0, 0, scout=True)
    stands = tree.add(0, 1)
    tree.add(stands, 0, scout=True)
    asked = Numbered(target, tree)
    verdict = Typical()(tree, asked)
    assert verdict.nodes == [stands] and asked.nodes == [0, stands]


@pytest.mark.parametrize("branch", [1, 3])
def test_greedy_is_match(branch: int) -> None:
    sampled = target_tables(3200)
    greedy = {path: torch.nn.functional.one_hot(p.argmax(), len(p)).double() for path, p in sampled.items()}
    drafter = TableDrafter(sampled, depth=3, branch=branch)
    ours, theirs = (decode(verifier, greedy, drafter, 95_000_000, 300) for verifier in (Typical(), Match()))
    assert ours == theirs


# -- lossy, and its own token is not ----------------------------------------------------------------------------------


def test_the_label_is_deserved() -> None:
    """With a draft that differs from the target, the answers follow neither."""
    target = target_tables(3300)
    drafter = TableDrafter(draft_tables(target, "bad", 3301), depth=2)
    assert p_value(decode(Typical(), target, drafter, 96_000_000, 3_000), exact_joint(target)) < 1e-6


def test_what_it_adds_itself_is_drawn_from_the_target() -> None:
    """Also after rejected drafts. One test of fit at fixed seeds (p > 1e-4)."""
    p = distribution(6, 3, 0, 0.5, 0.5)
    tree = TokenTree(0)
    tree.add(0, 3)
    random = Randomness(97_000_000, 4_000)
    counts = Counter(Typical()(tree, TableTarget({(): p}, tree, (), random, s)).tokens[0] for s in range(4_000))
    assert counts[2] == 0
    seen = [counts[token] for token in (0, 1, 3, 4)]
    assert stats.chisquare(seen, [4_000 * float(p[token]) for token in (0, 1, 3, 4)]).pvalue > 1e-4


# -- and it says so ---------------------------------------------------------------------------------------------------


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[list[str]]:
    handler = Messages()
    logging.getLogger("slipstream").addHandler(handler)
    yield handler.lines
    logging.getLogger("slipstream").removeHandler(handler)


def test_only_typical_is_lossy() -> None:
    names = ("match", "rejection", "block", "traversal", "typical")
    assert [make_verifier(name).name for name in names] == list(names)
    assert [name for name in names if make_verifier(name).lossy] == ["typical"]


def test_an_llm_warns_once_and_its_answers_carry_the_label(messages: list[str]) -> None:
    llm = tiny_llm(speculate="suffix", verifier="typical")
    for _ in range(2):
        output = llm.generate([[1, 2, 3, 1, 2]], SamplingParams(max_tokens=12, seed=1))[0]
        assert output.stats.lossy
    llm.use("ngram")
    assert messages == ["verifier 'typical' is lossy: outputs may differ from the model's own distribution"]


@pytest.mark.parametrize("verifier", ["match", "rejection", "block", "traversal"])
def test_the_others_carry_no_label(verifier: str, messages: list[str]) -> None:
    output = tiny_llm(speculate="suffix", verifier=verifier).generate([[1, 2, 1, 2]], SamplingParams(max_tokens=4))[0]
    assert not output.stats.lossy and messages == []


def test_run_says_so() -> None:
    model = str(tiny_directory(characters=True))
    arguments = ["run", "-m", model, "--raw", "--max-tokens", "6", "abcabc", "--verifier"]
    done = CliRunner().invoke(app, [*arguments, "typical"])
    assert done.exit_code == 0, done.output
    warning, line = done.stderr.splitlines()
    assert warning.startswith("warning: verifier 'typical' is lossy") and ", lossy" in line
    report = json.loads(CliRunner().invoke(app, [*arguments, "typical", "--json"]).stdout)
    assert report["verifier"] == "typical" and report["stats"]["lossy"] is True
    other = CliRunner().invoke(app, [*arguments, "traversal"])
    assert other.exit_code == 0 and "lossy" not in other.stderr
