"""The whole engine, sampling with `rejection`: its output follows the model's own probabilities.

Thousands of short answers of a tiny random model, drafted by another one, against the exact joint distribution of three
tokens, which comes from the log-probabilities of every prefix without any draft. The seeds are fixed; with fresh ones a
right engine would fail one of the 5 chi-squares (p > 1e-4 each) once in 2,000 runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from slipstream import LLM, SamplingParams
from tests.tiny import tiny_directory

VOCABULARY = 8
POSITIONS = 3
PROMPT = [1, 2, 3]
SAMPLES = 3_000
CHOICES = 500  # of one request
PASSES = 1e-4

Answer = tuple[int, ...]


def tiny(seed: int) -> str:
    """Flat enough for a draft to be right now and then by luck."""
    return str(tiny_directory(seed, VOCABULARY, layers=1, context=128, sharpness=1.5))


def build(speculate: dict[str, Any] | None = None) -> LLM:
    return LLM(tiny(0), speculate=speculate, verifier="rejection", max_num_seqs=64, cache_tokens=72 * 128)


@functools.cache
def following() -> dict[Answer, np.ndarray]:
    """The model's distribution after every answer shorter than three tokens."""
    prefixes = [p for length in range(POSITIONS) for p in itertools.product(range(VOCABULARY), repeat=length)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=VOCABULARY)
    found = {}
    for prefix, output in zip(prefixes, build().generate([[*PROMPT, *p] for p in prefixes], params), strict=True):
        found[prefix] = np.exp([output.logprobs[0][token].logprob for token in range(VOCABULARY)])
    return found


def nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.where(np.isin(np.arange(VOCABULARY), order[before < top_p]), probabilities, 0.0)
    return kept / kept.sum()


def exact_joint(temperature: float, top_p: float) -> dict[Answer, float]:
    rows = {}
    for prefix, row in following().items():
        warm = row ** (1 / temperature)
        rows[prefix] = nucleus(warm / warm.sum(), top_p) if top_p < 1 else warm / warm.sum()
    answers = itertools.product(range(VOCABULARY), repeat=POSITIONS)
    return {a: float(np.prod([rows[a[:i]][a[i]] for i in range(POSITIONS)])) for a in answers}


def p_value(counts: Counter[Answer], exact: dict[Answer, float]) -> float:
    """Chi-square in which answers of expectation under 5 are one cell; 0 if something impossible was said."""
    samples = counts.total()
    if any(counts[answer] for answer, probability in exact.items() if probability == 0):
        return 0.0
    common = [answer for answer, probability in exact.items() if probability * samples >= 5]
    observed = [counts[answer] for answer in common]
    expected = [exact[answer] * samples for answer in common]
    if samples - sum(expected) >= 5:
        observed.append(samples - sum(observed))
        expected.append(samples - sum(expected))
    # A remainder too small for a cell of its own is left out: the statistic then has that cell's freedom too much.
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(observed) - 1))


def model(seed: int, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": tiny(seed), **options}


CASES: dict[str, tuple[Any, dict[str, float]]] = {
    "chain": (model(1, depth=2), {}),
    "tree": (model(1, depth=2, nodes=6, branch=2), {}),
    "tree, top-p": (model(1, depth=2, nodes=6, branch=2), {"top_p": 0.8, "temperature": 1.3}),
    # Every level verifies the one below by rejection, with random numbers of its own.
    "cascade of two": ({"method": "cascade", "levels": [model(2, depth=1), model(1, depth=2)]}, {}),
    "cascade of three": (
        {"method": "cascade", "levels": ["ngram:min_n=1", model(2, depth=1), model(1, depth=2)]},
        {"temperature": 1.2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_follow_the_models_distribution(case: str) -> None:
    draft, sampling = CASES[case]
    llm = build(draft)
    counts: Counter[Answer] = Counter()
    accepted = refused = 0
    for request in range(SAMPLES // CHOICES):
        seed = 1_000 * list(CASES).index(case) + request
        params = SamplingParams(n=CHOICES, seed=seed, max_tokens=POSITIONS, ignore_eos=True, **sampling)
        for completion in llm.generate([PROMPT], params)[0].outputs:
            counts[tuple(completion.token_ids)] += 1
            accepted += completion.stats.accepted
            refused += completion.stats.steps == POSITIONS
    assert counts.total() == SAMPLES
    assert accepted > 0.1 * SAMPLES and refused > 0.02 * SAMPLES, "both outcomes must be in what is tested"
    exact = exact_joint(params.temperature, params.top_p)
    assert p_value(counts, exact) > PASSES
    # The check has to see a distribution that is a little off: the same answers, judged at a temperature 0.15 higher.
    assert p_value(counts, exact_joint(params.temperature + 0.15, params.top_p)) < 1e-6
