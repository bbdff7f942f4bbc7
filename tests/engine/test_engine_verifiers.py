"""The whole engine under `block`, `traversal` and `typical`, with a draft model.

The lossless ones are judged as in `tests/engine/test_engine_statistics.py`, by the exact joint distribution of three
tokens. The seeds are fixed; with fresh ones a right engine would fail one of the 2 chi-squares (p > 1e-4) once in
5,000 runs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.engine.test_engine_statistics import CHOICES, PASSES, POSITIONS, PROMPT, Answer, exact_joint, p_value, tiny

SAMPLES = 2_500
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": ({"depth": 2, "nodes": 2}, {}),
    "traversal": ({"depth": 2, "nodes": 5, "branch": 2}, {"temperature": 1.3}),
}


def build(verifier: str, **draft: Any) -> LLM:
    speculate = {"method": "draft_model", **draft}
    return LLM(tiny(0), speculate=speculate, verifier=verifier, max_num_seqs=64, cache_tokens=72 * 128)


@pytest.mark.parametrize("verifier", CASES)
def test_answers_follow_the_models_distribution(verifier: str) -> None:
    draft, sampling = CASES[verifier]
    llm = build(verifier, model=tiny(1), **draft)
    counts: Counter[Answer] = Counter()
    accepted = refused = 0
    for request in range(SAMPLES // CHOICES):
        seed = 100_000 + 1_000 * list(CASES).index(verifier) + request
        params = SamplingParams(n=CHOICES, seed=seed, max_tokens=POSITIONS, ignore_eos=True, **sampling)
        for completion in llm.generate([PROMPT], params)[0].outputs:
            counts[tuple(completion.token_ids)] += 1
            accepted += completion.stats.accepted
            refused += completion.stats.steps == POSITIONS
    assert accepted > 0.1 * SAMPLES and refused > 0.02 * SAMPLES, "both outcomes must be in what is tested"
    assert p_value(counts, exact_joint(params.temperature, params.top_p)) > PASSES
    # The check has to see a distribution that is a little off: the same answers, judged at a temperature 0.2 higher.
    assert p_value(counts, exact_joint(params.temperature + 0.2, params.top_p)) < 1e-6


@pytest.mark.parametrize("masked", [{}, {"allowed_token_ids": [1, 2, 4], "top_p": 0.95}])
@pytest.mark.parametrize("branch", [1, 2])
@pytest.mark.parametrize("verifier", CASES)
def test_the_target_as_its_own_draft_accepts_everything(verifier: str, branch: int, masked: dict[str, Any]) -> None:
    """Four tokens a step, to the last one: 1 + 3 drafted, with the draft's own K/V in step with the target's."""
    llm = build(verifier, model=tiny(0), depth=3, nodes=3 if branch == 1 else 14, branch=branch)
    params = SamplingParams(n=8, seed=5, max_tokens=40, ignore_eos=True, **masked)
    for completion in llm.generate([PROMPT], params)[0].outputs:
        assert completion.stats.steps == 10
        assert completion.stats.accepted == 30


def test_typical_accepts_more_and_greedy_is_the_models_own_text() -> None:
    drafts = {"model": tiny(1), "depth": 3, "nodes": 6, "branch": 2}
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sampled = SamplingParams(n=16, seed=6, max_tokens=40, ignore_eos=True)
    outputs = {}
    for verifier in ("match", "typical"):
        llm = build(verifier, **drafts)
        outputs[verifier] = llm.generate([PROMPT, PROMPT], [greedy, sampled])
    plain, lossy = outputs["match"], outputs["typical"]
    assert lossy[0].token_ids == plain[0].token_ids
    accepted = {
        name: sum(completion.stats.accepted / completion.stats.steps for completion in output[1].outputs)
        for name, output in outputs.items()
    }
    assert accepted["typical"] > accepted["match"]
    assert all(completion.stats.lossy for completion in lossy[1].outputs)
