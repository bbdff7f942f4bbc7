"""Several drafters in one engine: each request has its own, one batch has them all, and no text depends on it."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import OptionError
from tests.heads import random_head
from tests.laned import burst_on_cpu
from tests.tiny import tiny_directory, tiny_llm

HEADS: dict[str, dict[str, Any]] = {
    name: {"method": name, "checkpoint": str(random_head(name)), "depth": 3, "nodes": 40, "branch": 12}
    for name in ("eagle3", "medusa", "mtp")
}
DRAFT = {"method": "draft_model", "model": str(tiny_directory(1, characters=True)), "depth": 3, "nodes": 3}
LOADED: list[Any] = ["suffix", *HEADS.values(), DRAFT, "ngram"]
NAMES = [None, False, "suffix", "eagle3", "medusa", "mtp", "draft_model", "ngram"]
PROMPTS = [[3, 1, 4, 1, 5, 9 + i] * (2 + 5 * (i % 3)) for i in range(2 * len(NAMES))]


def together(**options: Any) -> LLM:
    return tiny_llm(characters=True, context=300, speculate="suffix", drafters=LOADED, **options)


def asked(**options: Any) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30 + i, speculate=NAMES[i % len(NAMES)], **options)
        for i in range(len(PROMPTS))
    ]


def plain(**options: Any) -> list[list[int]]:
    llm = tiny_llm(characters=True, context=300, speculate=None)
    how = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30 + i, **options) for i in range(len(PROMPTS))]
    return [output.token_ids for output in llm.generate(PROMPTS, how)]


@pytest.mark.parametrize("bursts", [False, True])
def test_a_mixed_batch_gives_the_plain_texts(bursts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = together()
    if bursts:
        burst_on_cpu(llm, monkeypatch)
    outputs = llm.generate(PROMPTS, asked())
    assert [output.token_ids for output in outputs] == plain()
    assert llm.engine.draft_faults == 0 and llm.cache.available == llm.cache.capacity
    for output, params in zip(outputs, asked(), strict=True):
        origins = {origin for origin in output.stats.origins if origin}
        expected = "suffix" if params.speculate is None else params.speculate
        assert origins <= ({expected} if expected else set())
        assert (output.stats.drafted > 0) == (expected is not False) or expected in ("suffix", "ngram")
    drafted = {p.speculate for o, p in zip(outputs, asked(), strict=True) if o.stats.accepted}
    assert len(drafted) >= 5, "most of them had something accepted"


def test_a_mixed_batch_in_a_tight_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of all drafters are set aside and come back; on a device none whose pages are being written."""
    llm = burst_on_cpu(together(cache_tokens=8 * 128), monkeypatch)
    assert [output.token_ids for output in llm.generate(PROMPTS, asked())] == plain()
    assert llm.engine.scheduler.preemptions > 0 and llm.engine.draft_faults == 0
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("bursts", [False, True])
def test_a_prefix_without_features_leaves_acceptance_as_it_is(
    name: str, bursts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of those pages are missing: they are computed again, never replaced by zeros."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 30
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    fresh = together()
    if bursts:
        burst_on_cpu(fresh, monkeypatch)
    wanted = fresh.generate([prompt], SamplingParams(speculate=name, **how))[0]
    llm = together()
    if bursts:
        burst_on_cpu(llm, monkeypatch)
    first = llm.generate([prompt], SamplingParams(speculate=False, **how))[0]
    output = llm.generate([prompt], SamplingParams(speculate=name, **how))[0]
    assert output.token_ids == first.token_ids == wanted.token_ids
    assert output.stats.accepted_by_depth == wanted.stats.accepted_by_depth
    assert output.stats.accepted > 0


def test_one_drafter_s_faults_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = together()

    def broken(requests: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(llm.engine.drafters["suffix"], "propose", broken)
    outputs = llm.generate(PROMPTS, asked())
    assert [output.token_ids for output in outputs] == plain()
    for output, params in zip(outputs, asked(), strict=True):
        assert output.stats.draft_faults == (params.speculate in (None, "suffix"))
    assert set(llm.engine.drafters.faults) == {"suffix"}


def test_what_can_be_named_is_what_is_loaded() -> None:
    llm = together()
    with pytest.raises(OptionError, match="unknown loaded drafter 'lookahead'"):
        llm.generate([[1, 2]], SamplingParams(speculate="lookahead"))
    with pytest.raises(OptionError, match="unknown drafter 'sufix'"):
        llm.generate([[1, 2]], SamplingParams(speculate="sufix"))
    model = str(tiny_directory(characters=True))
    assert LLM(model, drafters=["ngram", "suffix"]).drafter.name == "ngram", "the first is the default"
    assert LLM(model, speculate="ngram", drafters=["suffix"]).drafter.name == "ngram"
    llm.use("ngram")
    how = SamplingParams(temperature=0.0, max_tokens=9, speculate="eagle3")
    assert llm.generate([[1, 2, 3]], how)[0].stats.drafted > 0, "what was loaded stays"


def test_two_drafters_of_a_kind_have_stores_of_their_own() -> None:
    small = {**HEADS["eagle3"], "nodes": 3, "depth": 2}
    llm = tiny_llm(characters=True, context=300, drafters=[HEADS["eagle3"], small])
    with pytest.raises(OptionError, match="unknown loaded drafter"):
        llm.generate([[1, 2]], SamplingParams(speculate="eagle3"))  # which of them?
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30}
    outputs = llm.generate([[5, 6, 7]] * 2, [SamplingParams(speculate=s, **how) for s in (HEADS["eagle3"], small)])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert [max(1, len(output.stats.offered_by_depth)) for output in outputs] == [3, 2]


def test_stores_of_all_drafters_are_part_of_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds fewer tokens where drafters keep more for each."""
    monkeypatch.setattr("slipstream.models.memory.available_bytes", lambda device: 6 * 2**20)
    alone = tiny_llm(characters=True, context=300, speculate=None)
    several = together()
    assert several.cache.capacity < alone.cache.capacity
    kept = sum(store.nbytes for store in several.cache.stores.values())
    assert kept <= 6 * 2**20
