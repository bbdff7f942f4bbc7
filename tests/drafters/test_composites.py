"""Drafters made of drafters: several merged into one tree, and cascades in which each level verifies the one below."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from slipstream import LLM, Output, SamplingParams
from slipstream.attention import tree_segment
from slipstream.drafters import DrafterSpec, parse_speculate
from slipstream.errors import ModelNotFound, OptionError
from slipstream.models.load import load_model
from tests.heads import random_head
from tests.stepping import stepped
from tests.tiny import tiny_directory, tiny_draft, tiny_llm

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=41)
HOW = (
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=41),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=6, max_tokens=41),
)


def model(seed: int, **options: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": f"tiny:{seed}", **options}


def cascade(*levels: Any) -> dict[str, Any]:
    return {"method": "cascade", "levels": list(levels)}


def answer(speculate: Any, *how: SamplingParams) -> list[Output]:
    """One answer for each of the ways, in one batch."""
    outputs = tiny_llm(speculate=speculate).generate([PROMPT] * len(how), how)
    assert all(output.stats.draft_faults == 0 for output in outputs)
    return outputs


@functools.cache
def alone() -> list[tuple[int, int, int]]:
    """What becomes of the drafts of one model on its own."""
    return [counts(output) for output in answer(model(2, depth=4), *HOW)]


def counts(output: Output) -> tuple[int, int, int]:
    return output.stats.steps, output.stats.accepted, output.stats.drafted


# -- how they are spelled ---------------------------------------------------------------------------------------------


def test_plus_merges_and_cascade_stacks() -> None:
    assert parse_speculate("suffix+ngram") == DrafterSpec(
        "merge", {"drafters": (DrafterSpec("suffix"), DrafterSpec("ngram"))}
    )
    spec = parse_speculate("cascade:suffix:depth=4+draft_model:model=/a+b/c,depth=2")
    assert [part.method for part in spec.parts()] == ["cascade", "suffix", "draft_model"]
    assert spec.options["levels"][1].options == {"model": "/a+b/c", "depth": "2"}  # this plus is part of a path
    for text in ("auto:max_nodes=3,drafters=suffix+ngram", "auto:drafters=suffix+ngram,max_nodes=3"):
        spec = parse_speculate(text)
        assert [part.method for part in spec.parts()] == ["auto", "suffix", "ngram"]
        assert spec.options["max_nodes"] == "3"


@pytest.mark.parametrize(
    "text",
    [
        "suffix+ngram:max_n=3",
        "cascade:ngram+draft_model:model=x",
        "ngram:max_n=5",
        "auto:drafters=suffix+ngram",
        "auto:max_nodes=4,drafters=suffix",
    ],
)
def test_a_spec_reads_as_it_was_typed(text: str) -> None:
    assert str(parse_speculate(text)) == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("suffix+sufix", "unknown drafter 'sufix'"),
        ("suffix+ngram:max_m=1", "unknown option of drafter 'ngram': 'max_m'"),
        ({"method": "merge", "drafters": ["suffix"]}, "two drafters or more"),
        ({"method": "merge", "drafters": "suffix"}, "not a list of drafters"),
        ({"method": "merge", "drafters": ["suffix", "ngram"], "branch": 3}, "branch=3"),
        ("cascade:suffix", "two levels or more"),
        ("cascade:suffix+ngram", "ngram cannot verify the level below it"),
        ({"method": "cascade", "levels": ["suffix", {"model": "x"}], "depth": 3}, "depth=3"),
        ("cascade:suffix+draft_model:model=x,branch=2", "drafts a chain"),
        ("cascade:suffix+draft_model:model=x,draw=top", "drafts a chain"),
    ],
)
def test_what_cannot_be_composed_is_refused(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_speculate(value)


# -- merging ----------------------------------------------------------------------------------------------------------


def test_two_draft_models_have_stores_of_their_own() -> None:
    llm = tiny_llm(speculate={"method": "merge", "drafters": [model(0), model(1)]})
    assert set(llm.cache.stores) == {"target", "draft_model.0", "draft_model.1"}
    llm.use("suffix")
    assert set(llm.cache.stores) == {"target"}


def test_what_one_of_them_knows_is_accepted() -> None:
    """A draft that knows nothing beside one that is the target: every step accepts what the latter says."""
    for output in answer({"method": "merge", "drafters": [model(1, depth=4), model(0, depth=4)]}, *HOW):
        assert output.stats.steps == -(-41 // 5)


def test_merged_trees_share_common_prefixes() -> None:
    merged = {"method": "merge", "drafters": [model(0, depth=3), model(0, depth=3), model(1, depth=3)]}
    (output,) = answer(merged, SamplingParams(temperature=0.0, max_tokens=9))
    assert output.stats.drafted < 3 * 3 * output.stats.steps  # two of the three say the same


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
def test_sampled_nodes_are_not_merged(verifier: str) -> None:
    with pytest.raises(OptionError, match=r"draft_model samples its nodes.*cannot be merged.*`match`"):
        tiny_llm(speculate={"method": "merge", "drafters": ["suffix", model(0)]}, verifier=verifier)
    llm = tiny_llm(speculate={"method": "merge", "drafters": ["suffix", model(0, draw="top")]}, verifier=verifier)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=1.0, seed=1, max_tokens=30))
    assert output.stats.draft_faults == 0 and output.stats.accepted > 0


# -- cascades ---------------------------------------------------------------------------------------------------------


def test_a_head_cannot_draft_for_a_level_that_has_no_hidden_states() -> None:
    levels = [{"method": "eagle3", "checkpoint": str(random_head("eagle3"))}, model(0)]
    with pytest.raises(OptionError, match=r"eagle3 reads hidden states of the target.*suffix\+eagle3"):
        tiny_llm(context=300, characters=True, speculate={"method": "cascade", "levels": levels})


STACKS: dict[str, list[Any]] = {
    "two models": [model(1, depth=3)],
    "a model below a tree": [model(1, depth=3, nodes=6, branch=2)],
    "repetition": ["suffix:min_confidence=0"],
    "three levels": ["suffix:min_confidence=0", model(1, depth=3)],
    "four levels": ["ngram:min_n=1", model(2, depth=2), model(1, depth=3)],
}


@pytest.mark.parametrize("stack", STACKS)
def test_the_draft_is_the_text_of_the_last_model_alone(stack: str) -> None:
    """The target as the last level: every token is accepted, whatever the levels below guess."""
    for output in answer(cascade(*STACKS[stack], model(0, depth=4)), *HOW):
        assert output.stats.steps == -(-41 // 5)
        assert output.stats.accepted == 41 - output.stats.steps


@pytest.mark.parametrize("stack", STACKS)
def test_a_cascade_accepts_what_its_last_model_accepts_alone(stack: str) -> None:
    stacked = answer(cascade(*STACKS[stack], model(2, depth=4)), *HOW)
    assert [counts(output) for output in stacked] == alone()


def test_levels_save_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that guesses right spares the model above it passes: that is all a cascade is for."""
    counted = 0

    def passes(speculate: Any) -> int:
        nonlocal counted
        counted = 0
        llm = tiny_llm(speculate=speculate)
        drafter = llm.drafter
        last = drafter._models[-1] if hasattr(drafter, "_models") else drafter
        forward = last._model.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal counted
            counted += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(last._model, "forward", counting)
        llm.generate([PROMPT], GREEDY)
        return counted

    alone = passes(model(1, depth=6))
    assert passes(cascade(model(1, depth=5), model(1, depth=6))) < alone / 5


def test_the_stores_hold_exactly_the_committed_text() -> None:
    for levels in (["suffix:min_confidence=0", model(1, depth=4)], [model(0, depth=2), model(1, depth=3), model(0)]):
        llm = tiny_llm(speculate=cascade(*levels))
        stream = stepped(llm, PROMPT * 4, SamplingParams(temperature=0.9, seed=2, max_tokens=60))
        for _ in range(9):
            next(stream)
        (sequence,) = llm.engine.scheduler.running
        for number, level in enumerate(levels):
            if isinstance(level, dict):
                store, seed = f"draft_model.{number}", int(level["model"][-1])
                assert_in_step(llm, store, seed, sequence)
        stream.close()  # type: ignore[attr-defined]


def assert_in_step(llm: LLM, store: str, seed: int, sequence: Any) -> None:
    known = sequence.table.lengths[store]
    assert len(sequence.tokens) - 8 <= known < len(sequence.tokens)
    fresh, _ = load_model(tiny_directory(seed), dtype="float32", device="cpu")
    table = llm.cache.open([])
    llm.cache.reserve(table, known)
    table.lengths[store] = 0
    with torch.inference_mode():
        fresh.forward(llm.cache, store, [tree_segment(table, 0, sequence.tokens[:known], None)])

    def rows(pages: list[int]) -> torch.Tensor:
        return torch.cat([llm.cache.stores[store][:, :, page] for page in pages], dim=3)[:, :, :, :known]

    assert torch.equal(rows(sequence.table.pages), rows(table.pages))
    llm.cache.release(table)


def test_a_draft_with_a_short_context_ends_the_cascade_and_nothing_else() -> None:
    short = {"method": "draft_model", "model": str(tiny_directory(0, context=90)), "depth": 4}
    how = SamplingParams(temperature=0.7, seed=1, max_tokens=120)
    (output,), (plain,) = answer(cascade("suffix", short), how), answer(None, how)
    assert output.token_ids == plain.token_ids
    assert 20 < output.stats.accepted < 60


@pytest.mark.parametrize("first", ["early_exit:exit=1,depth=3", "layer_skip:skip=0,depth=3", "lookahead"])
def test_any_drafter_is_a_first_level(first: str) -> None:
    """Also one that prepares rows of the target, which are none of the draft model's."""
    for output in answer(cascade(first, model(0, depth=4)), *HOW):
        assert output.stats.steps == -(-41 // 5)


def test_one_bad_sequence_does_not_cost_the_others_their_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model has been fed when a drafter merged with it raises: each is asked for again, alone."""
    llm = tiny_llm(speculate={"method": "merge", "drafters": [model(0, depth=4), "ngram"]})
    ngram = llm.drafter.drafters[1]  # type: ignore[attr-defined]
    healthy = ngram.propose

    def failing(requests: Any) -> Any:
        if any(request.sequence.tokens[0] == 50 for request in requests):
            raise RuntimeError("a bad sequence")
        return healthy(requests)

    monkeypatch.setattr(ngram, "propose", failing)
    good, bad = llm.generate([PROMPT, [50, *PROMPT]], GREEDY)
    assert (good.stats.draft_faults, bad.stats.draft_faults) == (0, 1)
    assert good.stats.steps == -(-41 // 5)


def test_a_level_that_was_not_asked_has_no_rows() -> None:
    """With two tokens to come a draft of one needs no guesses: the level below must not be said to know the prompt."""
    llm = tiny_llm(speculate=cascade(model(2, depth=2), model(1, depth=3)))
    stream = stepped(llm, PROMPT * 4, SamplingParams(temperature=0.0, max_tokens=2))
    next(stream)
    (sequence,) = llm.engine.scheduler.running  # the guess was refused
    assert sequence.table.lengths["draft_model.0"] == 0
    assert sequence.table.lengths["draft_model.1"] == len(sequence.tokens) - 1
    stream.close()  # type: ignore[attr-defined]


def test_a_draft_that_cannot_be_attached_leaves_nothing() -> None:
    llm = tiny_llm()
    missing = {"method": "draft_model", "model": "/no/such/model"}
    with pytest.raises(ModelNotFound):
        llm.use({"method": "merge", "drafters": [tiny_draft(model(1)), missing]})
    assert set(llm.cache.stores) == {"target"} and llm.drafter.name == "none"


def test_a_cascade_is_refused_in_a_merge_where_it_samples() -> None:
    stacked = cascade("suffix", model(0))
    with pytest.raises(OptionError, match="cascade samples its nodes"):
        tiny_llm(speculate={"method": "merge", "drafters": ["ngram", stacked]}, verifier="rejection")
    assert tiny_llm(speculate=tiny_draft({"method": "merge", "drafters": ["ngram", stacked]})).drafter.origins
