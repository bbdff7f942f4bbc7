"""What every drafter must hold, over the whole registry. A new drafter is added to CASES and to nothing else.

`tests/engine/test_equality.py` asks the same cases for the text of plain decoding, with every sampler and in any batch.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.drafters import drafter_names
from slipstream.drafters.registry import drafter_class
from tests.corpora import tiny_corpus
from tests.tiny import tiny_directory, tiny_draft, tiny_llm

GROWN = "inject=1,confidence=1,reach=4,layers=3,block=12"  # settings of a head of `parallel`

CASES: dict[str, list[Any]] = {
    "none": [None],
    "auto": [
        # Without the clock it drafts here, too: a pass of the tiny model is cheaper than a draft.
        "auto:clock=no",
        "auto:max_nodes=5,max_depth=3,objective=throughput,clock=no",
        {"method": "auto", "drafters": ["suffix", {"method": "eagle3", "checkpoint": "head:eagle3"}], "clock": False},
        {"method": "auto", "drafters": ["ngram:min_n=1", {"method": "draft_model", "model": "tiny:0"}], "clock": False},
    ],
    "ngram": ["ngram:min_n=1,max_n=3"],
    "suffix": [
        "suffix:min_confidence=0,nodes=20,depth=9",
        "suffix:shared=true,min_confidence=0",
        f"suffix:corpus={tiny_corpus()},min_confidence=0",
    ],
    "lookahead": ["lookahead", "lookahead:window=3,ngram=3,guesses=2,pool=20", "lookahead:window=1,ngram=6,branch=1"],
    "prediction": ["prediction"],  # with predictions: test_prediction.py
    "grammar": ["grammar"],  # with grammars: tests/grammar/
    "draft_model": [
        {"method": "draft_model", "model": "tiny:0"},  # the target itself: everything is accepted
        {"method": "draft_model", "model": "tiny:1", "depth": 3},
        {"method": "draft_model", "model": "tiny:0", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 9, "branch": 3, "min_confidence": 0.01},
        {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 9, "branch": 2, "draw": "sample"},
        {"method": "draft_model", "checkpoint": "head:draft_model"},
        {"method": "draft_model", "checkpoint": "head:draft_model", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "draft_model", "checkpoint": "head:draft_model", "nodes": 9, "branch": 2, "draw": "sample"},
    ],
    "foreign_draft": [
        {"method": "foreign_draft", "model": "speaker:self"},  # the target itself, its tokens numbered otherwise
        {"method": "foreign_draft", "model": "speaker:bytes", "depth": 3, "min_confidence": 0.01},
    ],
    "early_exit": [
        "early_exit:exit=1,depth=3",
        "early_exit:exit=1,depth=3,nodes=9,branch=3,reuse=no",
        "early_exit:exit=1,depth=3,nodes=9,branch=3,min_confidence=0.01,reuse=yes",
    ],
    "merge": [
        "suffix:min_confidence=0+ngram:min_n=1,max_n=3",
        {
            "method": "merge",
            "drafters": [
                "suffix:min_confidence=0",
                {"method": "draft_model", "model": "tiny:0", "depth": 3},
                {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 9, "branch": 3},
            ],
        },
        {
            "method": "merge",
            "nodes": 6,
            "drafters": [
                "early_exit:exit=1,depth=3",
                {"method": "cascade", "levels": ["ngram:min_n=1", {"method": "draft_model", "model": "tiny:0"}]},
            ],
        },
    ],
    "cascade": [
        {
            "method": "cascade",
            "levels": [
                "suffix:min_confidence=0",
                {"method": "draft_model", "model": "tiny:0", "depth": 6},
            ],
        },
        {
            "method": "cascade",
            "levels": [
                {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 6, "branch": 2},
                {"method": "draft_model", "model": "tiny:0", "depth": 5, "min_confidence": 0.05},
            ],
        },
        {
            "method": "cascade",
            "levels": [
                "suffix:min_confidence=0",
                {"method": "draft_model", "model": "tiny:1", "depth": 3},
                {"method": "draft_model", "model": "tiny:0", "depth": 6},
            ],
        },
    ],
    "eagle3": [
        {"method": "eagle3", "checkpoint": "head:eagle3", "depth": 3, "branch": 1},
        {"method": "eagle3", "checkpoint": "head:eagle3", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "eagle3", "checkpoint": "head:eagle3", "depth": 3, "nodes": 9, "branch": 2, "draw": "sample"},
        {
            "method": "eagle3",
            "checkpoint": "head:eagle3,heads=6,kv_heads=3,head_dim=8,own_rows=1,norm_taps=1",
            "nodes": 8,
        },
    ],
    "mtp": [
        {"method": "mtp", "checkpoint": "head:mtp", "depth": 3, "branch": 1},
        {"method": "mtp", "checkpoint": "head:mtp", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "mtp", "checkpoint": "head:mtp,modules=3", "depth": 5, "branch": 1},
        {"method": "mtp", "checkpoint": "head:mtp,modules=3", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "mtp", "checkpoint": "head:mtp,modules=3", "depth": 3, "nodes": 9, "branch": 2, "draw": "sample"},
    ],
    "parallel": [
        {"method": "parallel", "checkpoint": "head:parallel", "depth": 3, "branch": 1},
        {"method": "parallel", "checkpoint": "head:parallel", "nodes": 12, "branch": 3},
        {"method": "parallel", "checkpoint": "head:parallel,layers=1", "depth": 4, "nodes": 9, "min_confidence": 0.001},
        {"method": "parallel", "checkpoint": "head:parallel", "depth": 3, "nodes": 9, "branch": 2, "draw": "sample"},
        {"method": "parallel", "checkpoint": f"head:parallel,{GROWN}", "nodes": 20, "branch": 3},
        {"method": "parallel", "checkpoint": f"head:parallel,{GROWN}", "nodes": 9, "branch": 2, "draw": "sample"},
    ],
    "layer_skip": ["layer_skip:skip=0,depth=3", "layer_skip:depth=3,nodes=9,branch=3"],
    "medusa": [
        {"method": "medusa", "checkpoint": "head:medusa", "branch": 1},
        {"method": "medusa", "checkpoint": "head:medusa", "nodes": 12, "tree": "static"},
        {"method": "medusa", "checkpoint": "head:medusa", "nodes": 12, "branch": 3},
        {"method": "medusa", "checkpoint": "head:medusa,heads=3", "nodes": 30, "min_confidence": 0.01},
        {"method": "medusa", "checkpoint": "head:medusa,heads=3,own_rows=1", "nodes": 12},
        {"method": "medusa", "checkpoint": "head:medusa,heads=3,root=1", "nodes": 12, "tree": "static"},
        {"method": "medusa", "checkpoint": "head:medusa,heads=3,before=1", "nodes": 12},
        {"method": "medusa", "checkpoint": "head:medusa,heads=3,before=1", "nodes": 12, "tree": "static"},
        {"method": "medusa", "checkpoint": "head:medusa", "depth": 3, "nodes": 9, "draw": "sample"},
    ],
    "kangaroo": [
        {"method": "kangaroo", "checkpoint": "head:kangaroo"},
        {"method": "kangaroo", "checkpoint": "head:kangaroo", "depth": 4, "nodes": 12, "branch": 3},
        {"method": "kangaroo", "checkpoint": "head:kangaroo", "depth": 3, "nodes": 40, "branch": 3, "reuse": "yes"},
        {"method": "kangaroo", "checkpoint": "head:kangaroo", "depth": 3, "nodes": 9, "branch": 2, "draw": "sample"},
    ],
}
ALL = [pytest.param(case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)]

SIGNS = "acegikmoqsuwyACEGIKMOQSUWY"
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=0.7": {"temperature": 0.7},
    "T=1 top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 5": {"temperature": 1.2, "top_k": 5},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "logit bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -100.0, 11: 2.5}},
    "min tokens": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": list(range(0, 97, 4))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(0, 97, 3)), "top_p": 0.95},
    "greedy allowed two": {"temperature": 0.0, "allowed_token_ids": [5, 17], "frequency_penalty": 0.1},
    "bad words": {"temperature": 0.9, "bad_words": ["a", "b", "ca", "dd", "efg", "%", *map(str, range(10))]},
    "greedy bad words": {"temperature": 0.0, "bad_words": [x + y for x in SIGNS for y in SIGNS]},
}


@functools.cache
def model() -> LLM:
    return tiny_llm(speculate=None, context=300, characters=True)


@pytest.fixture
def drafting(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The one model with the drafter of the case; whatever happened, no fault may have been hidden."""
    llm = model()
    llm.use(tiny_draft(request.param))
    yield llm
    faults = llm.engine.draft_faults
    llm.use(None)
    assert faults == 0


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts of awkward lengths, half of them repetitive."""
    chooser = random.Random(seed)
    result = []
    for number in range(count):
        length = chooser.choice([1, 2, 3, 17, 60, 127, 128, 129, 200])
        period = chooser.choice([3, 7, 20]) if number % 2 else length
        base = [chooser.randrange(97) for _ in range(min(period, length))]
        result.append((base * length)[:length])
    return result


def params(count: int, **settings: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=number, **settings) for number in range(count)]


@functools.cache
def plain() -> LLM:
    """A model that never drafts."""
    return tiny_llm(speculate=None, context=300, characters=True)


@functools.cache
def expected(count: int, seed: int, **settings: Any) -> list[list[int]]:
    """What plain decoding says, each prompt alone."""
    pairs = zip(prompts(count, seed), params(count, **settings), strict=True)
    return [plain().generate([prompt], how)[0].token_ids for prompt, how in pairs]


def test_every_registered_drafter_is_under_these_tests() -> None:
    assert set(CASES) == set(drafter_names())
    for name in CASES:
        kind = drafter_class(name)
        assert kind.name == name and kind.summary and kind.helps


@pytest.mark.parametrize("drafting", ALL, indirect=True)
def test_interleaved_requests_do_not_disturb_each_other(drafting: LLM) -> None:
    how = params(3, temperature=0.9, max_tokens=25)
    streams = [drafting.stream(p, q) for p, q in zip(prompts(3, 3), how, strict=True)]
    got: list[list[int]] = [[], [], []]
    live = list(range(3))
    while live:
        for number in list(live):
            delta = next(streams[number], None)
            if delta is None:
                live.remove(number)
            else:
                got[number].extend(delta.token_ids)
    assert got == expected(3, 3, temperature=0.9, max_tokens=25)


@pytest.mark.parametrize("drafting", ALL, indirect=True)
def test_an_answer_runs_to_the_last_position_of_the_context(drafting: LLM) -> None:
    (prompt,) = prompts(1, 17)
    (output,) = drafting.generate([prompt], params(1, temperature=0.5, max_tokens=None))
    assert output.finish_reason == "length"
    assert len(prompt) + len(output.token_ids) == drafting.max_model_len
    assert [output.token_ids] == expected(1, 17, temperature=0.5, max_tokens=None)


@pytest.mark.parametrize("drafting", ALL, indirect=True)
def test_counters_add_up(drafting: LLM) -> None:
    for output in drafting.generate(prompts(6, 5), params(6, temperature=0.7, max_tokens=33)):
        stats = output.stats
        assert stats.emitted == len(output.token_ids) == len(stats.origins)
        # Each step emits what it accepted and one token of the target's own, which a stop may cut off.
        assert stats.steps <= stats.emitted <= stats.accepted + stats.steps
        assert stats.accepted == sum(origin is not None for origin in stats.origins)
        assert stats.accepted == sum(stats.accepted_by_depth) <= stats.drafted
        assert len(stats.accepted_by_depth) == len(stats.offered_by_depth)
        assert all(a <= o for a, o in zip(stats.accepted_by_depth, stats.offered_by_depth, strict=True))
        assert stats.drafting_steps <= stats.steps
        assert {origin for origin in stats.origins if origin} <= drafting.drafter.origins


@pytest.mark.parametrize("drafting", ALL[1:], indirect=True)
def test_a_drafter_that_breaks_is_dropped_and_the_text_goes_on(
    drafting: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, calls = drafting.drafter, 0
    healthy, met = drafter.propose, set[str]()  # requests that were asked to draft after it broke

    def failing(requests: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            met.update(request.sequence.request.id for request in requests)
            raise RuntimeError("the draft broke")
        return healthy(requests)

    monkeypatch.setattr(drafter, "propose", failing)
    with caplog.at_level(logging.WARNING, "slipstream"):
        outputs = drafting.generate(prompts(4, 6), params(4, temperature=0.7, max_tokens=40))
    assert [o.stats.draft_faults for o in outputs] == [int(o.request_id in met) for o in outputs]
    assert met if drafter.parts else len(met) == 4  # a policy may leave some requests without drafts
    assert "the draft broke" in caplog.text
    drafting.use(None)
    assert [o.token_ids for o in outputs] == expected(4, 6, temperature=0.7, max_tokens=40)


def test_the_target_as_its_own_draft_accepts_everything() -> None:
    for options in ({"depth": 4, "nodes": 4}, {"depth": 4, "nodes": 12, "branch": 3}):
        target = str(tiny_directory(characters=True))
        llm = tiny_llm(speculate={"method": "draft_model", "model": target, **options}, characters=True)
        for settings in SAMPLERS.values():
            settings = {k: v for k, v in settings.items() if k not in ("min_tokens", "stop_token_ids")}
            (output,) = llm.generate([prompts(1, 7)[0]], SamplingParams(seed=3, max_tokens=41, **settings))
            # The first step has no draft cache yet but drafts all the same: every step emits 5 tokens.
            assert output.stats.steps == -(-41 // 5)
            assert output.stats.accepted == 41 - output.stats.steps
