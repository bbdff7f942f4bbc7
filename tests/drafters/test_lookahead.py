"""Lookahead decoding: the shape of the window, how it moves, what it finds, and that nothing can break it.

Where a target is needed whose every word is known beforehand, a function from the text to the next token takes its
place; trees, verifier and drafter are the real ones.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream import LLM, SamplingParams, noise
from slipstream.drafters import DraftRequest, Outcome
from slipstream.drafters.lookahead import LookaheadDrafter, LookaheadOptions, NgramPool
from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError
from slipstream.sequence import Request, Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan
from slipstream.verify import Match
from tests.engine.test_engine_statistics import p_value
from tests.tiny import tiny_directory, tiny_llm

VOCABULARY = 10_000
Says = Callable[[list[int]], int]
Keep = Callable[[TokenTree], TokenTree]


@functools.cache
def plain() -> LLM:
    return tiny_llm(speculate=None)


def make(**options: Any) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadOptions(**options), plain().target)


def text_of(tokens: list[int]) -> Sequence:
    return Sequence(Request("request", None, tokens, SamplingParams(temperature=0.0), 0), 0, frozenset(), VOCABULARY)


def offered(drafter: LookaheadDrafter, sequence: Sequence, plan: Plan | None = None) -> TokenTree:
    (tree,) = drafter.propose([DraftRequest(sequence, plan or drafter.options.plan)])
    tree.check(sequence.tokens[-1], VOCABULARY)
    return tree


class Told:
    """A target that says what a function of the text says."""

    def __init__(self, tokens: list[int], tree: TokenTree, says: Says) -> None:
        self._tokens, self._tree, self._says = list(tokens), tree, says

    def choose(self, node: int) -> int:
        return self._says(self._tokens + self._tree.path_tokens(node))


def step(drafter: LookaheadDrafter, sequence: Sequence, says: Says, keep: Keep = lambda tree: tree) -> list[int]:
    """One step as the engine takes it; `keep` is what the policy leaves of the tree. Returns what was emitted."""
    tree = keep(offered(drafter, sequence))
    target = Told(sequence.tokens, tree, says)
    verdict = Match()(tree, target)  # type: ignore[arg-type]
    scouted = {scout: target.choose(scout) for scout in tree.last_scouts()}
    sequence.tokens.extend(verdict.tokens)
    sequence.output_ids.extend(verdict.tokens)
    drafter.observe([Outcome(sequence, verdict.tokens, {}, tree, scouted)])
    return verdict.tokens


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_every_column_sees_the_first_row_up_to_itself_and_its_own_tokens() -> None:
    drafter, sequence = make(window=3, ngram=4), text_of([1, 2, 3])
    offered(drafter, sequence)
    sequence.drafting["lookahead"].columns = {3: (10, 11, 12), 4: (20, 21, 22), 5: (30, 31, 32)}
    tree = offered(drafter, sequence)
    leaves = tree.last_scouts()
    assert [tree.path_tokens(leaf) for leaf in leaves] == [[10, 11, 12], [10, 20, 21, 22], [10, 20, 30, 31, 32]]
    mask = tree.ancestor_mask()
    seen = [{tree.tokens[i] for i in np.flatnonzero(mask[leaf])} for leaf in leaves]
    assert seen == [{3, 10, 11, 12}, {3, 10, 20, 21, 22}, {3, 10, 20, 30, 31, 32}]
    assert len(tree) == 1 + 3 * 3 and all(tree.scouts[1:]) and tree.drafted == 0


def test_guesses_are_the_newest_n_grams_after_the_root_merged_by_prefix() -> None:
    drafter, sequence = make(window=1, ngram=4, guesses=3), text_of([5])
    offered(drafter, sequence)
    pool = sequence.drafting["lookahead"].pool
    for gram in [(5, 9, 9, 9), (5, 1, 2, 3), (6, 1, 2, 3), (5, 7, 8, 9), (5, 1, 2, 4)]:
        pool.add(gram)
    tree = offered(drafter, sequence)
    guesses = [i for i in range(1, len(tree)) if not tree.scouts[i]]
    assert [tree.path_tokens(i) for i in guesses] == [[1], [1, 2], [1, 2, 4], [7], [7, 8], [7, 8, 9], [1, 2, 3]]
    assert [tree.path_tokens(i) for i in tree.last_scouts()] == [[5, 5, 5]]  # the text has no other token
    assert tree.walk([7, 8, 1]) == [4, 5]
    narrow = offered(drafter, sequence, Plan(4, 12, branch=1))
    assert [narrow.tokens[i] for i in range(1, len(narrow)) if not narrow.scouts[i]] == [1, 2, 4]


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 13, 30])
def test_a_smaller_plan_gets_whole_columns_after_the_guesses(depth: int, nodes: int) -> None:
    drafter, sequence = make(window=5, ngram=4, guesses=2), text_of([5, 6, 7])
    offered(drafter, sequence)
    sequence.drafting["lookahead"].pool.add((7, 1, 2, 3))
    tree = offered(drafter, sequence, Plan(depth, nodes, branch=5))
    assert tree.depth <= depth and len(tree) - 1 <= nodes
    assert tree.drafted == min(3, depth, nodes)
    columns = max(0, min(5, depth - 2, (nodes - tree.drafted) // 3))
    assert sum(tree.scouts) == 3 * columns
    assert [tree.depths[leaf] for leaf in tree.last_scouts()] == [3 + column for column in range(columns)]


def test_what_a_policy_prunes_are_the_last_columns() -> None:
    drafter, sequence = make(window=3, ngram=3), text_of([5, 6, 7])
    offered(drafter, sequence)
    sequence.drafting["lookahead"].pool.add((7, 1, 2))
    tree = offered(drafter, sequence)
    assert [len(tree.pruned(budget)) - 1 for budget in range(9)] == list(range(9))
    assert tree.pruned(2).drafted == 2
    assert [tree.depths[i] for i in tree.pruned(6).last_scouts()] == [2, 3]


# -- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emitted", [1, 2, 3, 4, 5])
def test_the_window_moves_with_the_text(emitted: int) -> None:
    drafter, sequence = make(window=3, ngram=4), text_of([1, 2, 3])
    offered(drafter, sequence)
    ahead = sequence.drafting["lookahead"]
    ahead.columns = {3: (10, 11, 12), 4: (20, 21, 22), 5: (30, 31, 32)}
    tree = offered(drafter, sequence)
    first, _, third = tree.last_scouts()
    sequence.tokens.extend(range(100, 100 + emitted))
    scouted = {first: 13, third: 33}  # the second column's answer was lost
    drafter.observe([Outcome(sequence, sequence.tokens[3:], {}, tree, scouted)])
    # The first and third belong to the next position now; the second keeps its place unless that is taken.
    moved = {4: (11, 12, 13), 5: (30, 31, 32), 6: (31, 32, 33)}
    first_open = 3 + emitted
    assert ahead.columns == {p: c for p, c in moved.items() if first_open <= p < first_open + 3}
    assert (10, 11, 12, 13) in ahead.pool and (30, 31, 32, 33) in ahead.pool and len(ahead.pool) == 2
    after = offered(drafter, sequence)  # and what is out of sight is filled up
    assert sorted(ahead.columns) == [first_open, first_open + 1, first_open + 2] and sum(after.scouts) == 9


def test_a_step_without_a_draft_does_not_lose_the_window() -> None:
    drafter, sequence = make(window=3, ngram=3), text_of([1, 2, 3])
    offered(drafter, sequence)
    columns = dict(sequence.drafting["lookahead"].columns)
    sequence.tokens.append(4)
    drafter.observe([Outcome(sequence, [4], {}, TokenTree(3))])
    assert sequence.drafting["lookahead"].columns == {4: columns[4], 5: columns[5]}
    drafter.observe([Outcome(text_of([1]), [], {})])  # a piece of a prompt, of a sequence that never drafted


def test_a_fresh_column_continues_its_neighbour_and_is_not_random() -> None:
    drafter, sequence = make(window=4, ngram=4), text_of([3, 1, 4, 1, 5, 9, 2, 6])
    tree = offered(drafter, sequence)
    ahead = sequence.drafting["lookahead"]
    follows = {gram[0]: gram[1] for token in range(10) for gram in ahead.pool.after(token, 1)}
    assert follows == {3: 1, 1: 5, 4: 1, 5: 9}
    fresh = [(ahead.columns[position - 1], ahead.columns[position]) for position in range(9, 12)]
    assert any(neighbour[-1] in follows for neighbour, _ in fresh)
    for neighbour, column in fresh:
        assert column[:-1] == neighbour[1:]
        assert column[-1] == follows.get(neighbour[-1], column[-1])
    assert set(tree.tokens) <= set(sequence.tokens)
    assert offered(drafter, text_of(sequence.tokens)).tokens == tree.tokens


@pytest.mark.parametrize(("window", "ngram"), [(1, 3), (5, 4), (3, 6)])
def test_the_window_finds_what_comes_and_it_is_accepted(window: int, ngram: int) -> None:
    """The target says token 100 + p at position p, whatever came before. No token ever comes twice."""
    drafter, sequence = make(window=window, ngram=ngram), text_of([7])
    emitted = [len(step(drafter, sequence, says=lambda text: 100 + len(text))) for _ in range(ngram + 1)]
    # After ngram - 1 steps the columns hold nothing but answers, the next makes true N-grams of them, and the text
    # reaches the first of these when it is through.
    assert emitted == [1] * ngram + [ngram]
    assert sequence.tokens[1:] == list(range(101, 101 + 2 * ngram))


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_the_pool_forgets_what_was_not_seen_for_longest() -> None:
    pool = NgramPool(3)
    for gram in [(1, 2), (1, 3), (2, 4), (1, 2), (1, 5)]:
        pool.add(gram)
    assert len(pool) == 3 and (1, 3) not in pool
    assert pool.after(1, 9) == [(1, 5), (1, 2)] and pool.after(1, 1) == [(1, 5)] and pool.after(7, 1) == []
    pool.add((1, 6))
    assert pool.after(2, 9) == []


def test_the_pool_is_bounded_and_begins_with_the_newest_of_the_prompt() -> None:
    drafter, sequence = make(pool=30, ngram=3), text_of(list(range(1000)))
    offered(drafter, sequence)
    pool = sequence.drafting["lookahead"].pool
    assert len(pool) == 30 and (997, 998, 999) in pool and (967, 968, 969) not in pool
    for _ in range(20):
        step(drafter, sequence, says=lambda text: 1 + noise.key(*text[-2:]) % 5000)
        assert len(pool) == 30
    assert tuple(sequence.tokens[-4:-1]) in pool


# -- whatever the policy leaves of it ---------------------------------------------------------------------------------


def shuffled(chooser: random.Random) -> Keep:
    """Some of the nodes, chosen by no rule but that they hang together."""

    def keep(tree: TokenTree) -> TokenTree:
        tree._confidence[1:] = [chooser.random() for _ in range(1, len(tree))]
        return tree.pruned(chooser.randrange(len(tree)))

    return keep


@pytest.mark.parametrize(
    "keep",
    [
        *(lambda tree, n=n: tree.pruned(n) for n in (0, 3, 7, 12)),
        lambda tree: tree.truncated(4),
        shuffled(random.Random(5)),
    ],
)
def test_nothing_wrong_is_learnt_from_a_tree_that_was_cut(keep: Keep) -> None:
    """The target's word depends on the three tokens before it, so every N-gram of four can be checked by itself."""

    def says(text: list[int]) -> int:
        return noise.key(*text[-3:]) % 7

    drafter, sequence = make(window=4, ngram=4, guesses=3), text_of([1, 2, 3])
    for _ in range(60):
        step(drafter, sequence, says, keep)
        ahead = sequence.drafting["lookahead"]
        assert all(len(column) == 3 for column in ahead.columns.values())
        assert set(ahead.columns) <= set(range(len(sequence.tokens), len(sequence.tokens) + 4))
    grams = [gram for first in range(7) for gram in ahead.pool.after(first, 10_000)]
    assert len(grams) == len(ahead.pool) > 0
    assert all(says(list(gram[:-1])) == gram[-1] for gram in grams)
    assert all(says(sequence.tokens[:i]) == sequence.tokens[i] for i in range(3, len(sequence.tokens)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [5, 17, 46])
def test_the_window_beside_other_drafters_in_a_tree_that_is_too_small(temperature: float, nodes: int) -> None:
    llm, params = plain(), SamplingParams(temperature=temperature, seed=4, max_tokens=60)
    prompts = [[1, 2, 3], [4, 5, 6, 4, 5, 6, 4]]
    llm.use(None)
    wanted = [o.token_ids for o in llm.generate(prompts, params)]
    llm.use({"method": "merge", "nodes": nodes, "drafters": ["suffix:min_confidence=0", "lookahead"]})
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == wanted and llm.engine.draft_faults == 0
    assert "lookahead" in {origin for output in outputs for origin in output.stats.origins}


# -- with a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scouts_converge_to_what_the_model_is_going_to_say(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = plain()
    llm.use("lookahead")
    drafter, foreseen, known = llm.drafter, 0, 0
    observe = drafter.observe

    def watched(outcomes: list[Outcome]) -> None:
        nonlocal foreseen, known
        for outcome in outcomes:
            text, added = outcome.sequence.tokens, len(outcome.tokens)
            before = text[: len(text) - added]
            if added > 1:  # a guess stood; had the text itself held its first two tokens?
                repeats = (before[-1], outcome.tokens[0]) in itertools.pairwise(before)
                foreseen, known = foreseen + (not repeats), known + repeats
        observe(outcomes)

    monkeypatch.setattr(drafter, "observe", watched)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=temperature, seed=3, max_tokens=200))
    assert output.stats.accepted > 50 and foreseen > 5 and known > 5
    assert set(output.stats.origins) == {None, "lookahead"}
    llm.use(None)


def test_drafts_depend_neither_on_the_batch_nor_on_the_seed_of_a_greedy_request() -> None:
    llm = plain()
    llm.use("lookahead")
    prompts = [[1, 2, 3], [9, 8, 7, 6], [5]]
    counts = []
    for batch, seed in (([[p] for p in prompts], 1), ([prompts], 2)):
        outputs = [o for b in batch for o in llm.generate(b, SamplingParams(temperature=0.0, seed=seed, max_tokens=50))]
        counts.append([(o.stats.steps, o.stats.drafted, o.stats.accepted_by_depth) for o in outputs])
    assert counts[0] == counts[1]
    llm.use(None)


def test_answers_under_rejection_follow_the_models_distribution() -> None:
    """Thousands of answers of three tokens against their exact probabilities. Most roots have several guesses."""
    vocabulary = range(6)
    model = tiny_directory(0, len(vocabulary), layers=1, context=128, sharpness=1.5)
    llm = LLM(model, speculate="lookahead:window=2,ngram=3", verifier="rejection", cache_tokens=72 * 128)
    prompt = [noise.key(i) % len(vocabulary) for i in range(40)]
    prefixes = [p for length in range(3) for p in itertools.product(vocabulary, repeat=length)]
    ask = SamplingParams(temperature=0.0, max_tokens=1, logprobs=len(vocabulary))
    raw = {}
    for prefix, output in zip(prefixes, llm.generate([[*prompt, *p] for p in prefixes], ask), strict=True):
        raw[prefix] = np.exp([output.logprobs[0][token].logprob for token in vocabulary])

    def exact(temperature: float) -> dict[tuple[int, ...], float]:
        warm = {prefix: row ** (1 / temperature) for prefix, row in raw.items()}
        rows = {prefix: row / row.sum() for prefix, row in warm.items()}
        answers = itertools.product(vocabulary, repeat=3)
        return {a: float(rows[()][a[0]] * rows[a[:1]][a[1]] * rows[a[:2]][a[2]]) for a in answers}

    counts: Counter[tuple[int, ...]] = Counter()
    accepted = late = refused = 0
    for seed in range(6):
        for answer in llm.generate([prompt], SamplingParams(n=500, seed=seed, max_tokens=3))[0].outputs:
            counts[tuple(answer.token_ids)] += 1
            accepted += answer.stats.accepted
            late += answer.stats.origins[0] is None and answer.stats.accepted > 0
            refused += answer.stats.steps == 3
    assert accepted > 1000 and refused > 500 and late > 200, "all outcomes must be in what is tested"
    assert p_value(counts, exact(1.0)) > 1e-4
    assert p_value(counts, exact(1.2)) < 1e-6, "the check must see a distribution that is a little off"


# -- options ----------------------------------------------------------------------------------------------------------


def test_the_plan_follows_from_window_ngram_and_guesses() -> None:
    assert LookaheadOptions().plan == Plan(7, 30, 5)
    assert LookaheadOptions(window=10, ngram=3, guesses=2, depth=50, nodes=60, branch=1).plan == Plan(11, 24, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("window=0", "window=0 is out of range .*1 or more"),
        ("ngram=2", "ngram=2 is out of range .*3 or more"),
        ("guesses=0", "guesses=0 is out of range"),
        ("pool=4", r"pool=4 is out of range .*guesses \(5\) or more"),
        ("nodes=29", r"nodes=29 is out of range .*\(window \+ guesses\) \* \(ngram - 1\) = 30 and more"),
        ("depth=6", r"depth=6 is out of range .*window \+ ngram - 2 = 7 and more"),
        ("window=60", r"window=60, ngram=4 and guesses=5 need 195 nodes .*192 at most"),
        ("min_confidence=0.1", "min_confidence=0.1 is out of range .*no estimate"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_speculate(f"lookahead:{options}")
