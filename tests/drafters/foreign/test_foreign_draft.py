"""A draft with another tokenizer: the same text, its cache in step, no leaks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.commands.check.verb import check
from slipstream.commands.shared.options import ModelSetup
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.foreign.separate_cache import Held, SeparateCache
from slipstream.drafters.foreign.translate import Crossing
from slipstream.drafters.foreign_draft import ForeignDraftDrafter
from slipstream.errors import DraftMismatch, OptionError
from slipstream.models.load import load_model
from slipstream.types import Plan
from tests.drafters.test_conformance import SAMPLERS
from tests.stepping import stepped
from tests.tiny import plain_answers, tiny_directory, tiny_draft, tiny_llm
from tests.tongues import KINDS, RHYME, byte_level, characters, directory, reciter, renumbered, speaker, wanderer

PROMPTS = ["Hello there, ", "x", "The quick brown fox " * 9, "a b c " * 20, "0123", "<a>zz"]


def foreign(model: Path | str, **options: Any) -> dict[str, Any]:
    return {"method": "foreign_draft", "model": str(model), **options}


def drafter_of(llm: LLM) -> ForeignDraftDrafter:
    drafter = llm.drafter
    assert isinstance(drafter, ForeignDraftDrafter)
    return drafter


def store_of(llm: LLM) -> SeparateCache:
    return drafter_of(llm)._store


def assert_nothing_is_held(llm: LLM) -> None:
    store = store_of(llm)
    assert store.free == store._cache.capacity and not store._holding


# -- the same text, sooner --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(1, 5), (5, 1), (5, 3), (3, 8)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_text_in_other_tokens_is_accepted(target: int, draft: int, temperature: float) -> None:
    how = SamplingParams(temperature=temperature, seed=1, max_tokens=60)
    (plain,) = LLM(reciter(target), speculate=None).generate([RHYME], how)
    assert plain.text.startswith(RHYME) or target == 8
    (output,) = LLM(reciter(target), speculate=foreign(reciter(draft))).generate([RHYME], how)
    assert output.token_ids == plain.token_ids
    assert output.stats.accepted == output.stats.drafted >= 40  # it is never wrong


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_target_under_other_ids_reads_the_targets_noise(sampler: str) -> None:
    llm = tiny_llm(speculate=tiny_draft(foreign("speaker:self")), characters=True)
    settings = {k: v for k, v in SAMPLERS[sampler].items() if k not in ("min_tokens", "stop_token_ids")}
    (output,) = llm.generate(["Once more: "], SamplingParams(seed=3, max_tokens=41, **settings))
    assert output.stats.steps == -(-41 // 5) and output.stats.accepted == 41 - output.stats.steps


def test_noise_is_read_inside_characters_too() -> None:
    how = SamplingParams(temperature=1.0, seed=4, max_tokens=60)
    (plain,) = LLM(wanderer(0), speculate=None).generate(["中京"], how)
    assert plain.text.count("中") > 5 and plain.text.count("京") > 5
    (output,) = LLM(wanderer(0), speculate=foreign(wanderer(1))).generate(["中京"], how)
    assert output.token_ids == plain.token_ids and output.stats.accepted == output.stats.drafted > 20


def test_noise_is_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = []
    for _ in range(2):
        llm = tiny_llm(speculate=tiny_draft(foreign("speaker:self")), characters=True)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=3, max_tokens=40))
        accepted.append(sum(output.stats.accepted for output in outputs))
        monkeypatch.setattr(Crossing, "aligned", False)
    assert accepted[0] > 1.2 * accepted[1] > 0


@pytest.mark.parametrize("target", ["byte level", "sentencepiece", "unigram"])
@pytest.mark.parametrize("draft", KINDS)
def test_strangers_change_nothing(target: str, draft: str) -> None:
    """Random models: texts full of half characters, unknown ones and special tokens."""
    if draft == target:
        draft = "bytes"
    llm = LLM(speaker(target), speculate=None, max_model_len=400)
    how = [SamplingParams(temperature=0.9, seed=seed, max_tokens=12) for seed in range(len(PROMPTS))]
    plain = [output.token_ids for output in llm.generate(PROMPTS, how)]
    llm.use(foreign(speaker(draft), depth=2))
    outputs = llm.generate(PROMPTS, how)
    assert [output.token_ids for output in outputs] == plain
    assert llm.engine.draft_faults == 0
    assert_nothing_is_held(llm)


def test_the_end_of_the_text_is_offered_too() -> None:
    draft = foreign(reciter(5, last="ml;kj"), depth=16, nodes=16)
    llm = LLM(reciter(1, last="j"), speculate=draft)
    (output,) = llm.generate([RHYME[:10]], SamplingParams(temperature=0.0))
    assert output.text == RHYME[10:20] and output.finish_reason == "stop"
    assert output.stats.steps == 1 and output.stats.origins[-1] == "foreign_draft"


def test_below_other_drafters() -> None:
    how = [SamplingParams(temperature=0.8, seed=seed, max_tokens=20) for seed in range(len(PROMPTS))]
    llm = tiny_llm(speculate=None, characters=True)
    plain = [output.token_ids for output in llm.generate(PROMPTS, how)]
    own = foreign("speaker:self", depth=3)
    for speculate in (
        {"method": "merge", "drafters": ["suffix:min_confidence=0", own, foreign("speaker:bytes", depth=3)]},
        {"method": "cascade", "levels": [own, {"method": "draft_model", "model": "tiny:0", "depth": 6}]},
        {"method": "cascade", "levels": [foreign("speaker:bytes"), {"method": "draft_model", "model": "tiny:1"}]},
    ):
        llm.use(tiny_draft(speculate))
        outputs = llm.generate(PROMPTS, how)
        assert [output.token_ids for output in outputs] == plain
        assert llm.engine.draft_faults == 0


# -- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["self", "bytes", "recited"],  # all accepted, nearly all refused, and texts that end inside the draft's tokens
)
def test_the_store_holds_the_committed_text(kind: str) -> None:
    recited = kind == "recited"
    target = reciter(1) if recited else tiny_directory(0, characters=True)
    draft = reciter(5) if recited else speaker(kind)
    llm = LLM(target, speculate=foreign(draft, depth=3))
    store, drafter = store_of(llm), drafter_of(llm)
    stream = stepped(llm, RHYME * 9, SamplingParams(temperature=0.9, seed=2, max_tokens=60))
    for _ in range(9):
        next(stream)
    (sequence,) = llm.engine.scheduler.running
    held: Held = sequence.drafting["foreign_draft"].held
    text = llm.tokenizer.decode(sequence.tokens, skip_special=False) if llm.tokenizer else ""
    final = sequence.drafting["foreign_draft"].reading.fixed
    assert held.ids[: len(final)] == final and len(final) > 60
    assert text.startswith(drafter._tokenizer.decode(final, skip_special=False))

    model, _ = load_model(draft, dtype="float32", device="cpu")
    twin = SeparateCache(model, "twin", 4)
    again = Held()
    assert twin.hold(again, held.ids, 0, 0, [])
    with torch.inference_mode():
        twin.feed([(again, held.ids)])
    rows = [
        torch.cat([cache.stores[name][:, :, page] for page in part.table.pages], dim=3)[:, :, :, : len(held.ids)]
        for cache, name, part in ((store._cache, "foreign_draft", held), (twin._cache, "twin", again))
    ]
    assert torch.equal(*rows)
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_is_held(llm)


def test_guesses_of_another_drafter_are_read_and_forgotten() -> None:
    llm = LLM(reciter(1), speculate=foreign(reciter(5)))
    stream = stepped(llm, RHYME, SamplingParams(temperature=0.0, max_tokens=50))
    next(stream)
    (sequence,) = llm.engine.scheduler.running
    assert llm.tokenizer is not None
    for skipped in (0, 7, 3, 0):
        shadow = sequence.shadow(None)
        text = llm.tokenizer.decode(shadow.tokens)
        guesses = (RHYME * 3)[len(text) : len(text) + skipped + 4]
        shadow.tokens += llm.tokenizer.encode(guesses[:skipped])
        with torch.inference_mode():
            (tree,) = drafter_of(llm).propose([DraftRequest(shadow, Plan(4, 4, 1, 0.0))])
        assert llm.tokenizer.decode(tree.tokens[1:]) == guesses[skipped:]
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_is_held(llm)


def test_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(speculate=tiny_draft(foreign("speaker:bytes")), characters=True)
    how = SamplingParams(temperature=0.9, seed=2, max_tokens=30)
    streams = [stepped(llm, prompt, how) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    assert store_of(llm).free < store_of(llm)._cache.capacity
    for stream in streams[:3]:  # cancelled
        stream.close()  # type: ignore[attr-defined]
    healthy, calls = drafter_of(llm)._write, 0

    def failing(*arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("the draft broke")
        return healthy(*arguments)

    monkeypatch.setattr(drafter_of(llm), "_write", failing)
    rest = [list(stream)[-1].completion for stream in streams[3:]]
    assert all(done is not None and done.stats.draft_faults == 1 for done in rest)
    assert_nothing_is_held(llm)


def test_a_prompt_that_was_fed_before_is_not_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(speculate=tiny_draft(foreign("speaker:self")), characters=True)
    fed: list[int] = []
    feed = store_of(llm).feed
    monkeypatch.setattr(
        store_of(llm), "feed", lambda pending: (fed.append(sum(len(ids) for _, ids in pending)), feed(pending))[1]
    )
    prompt = "Again and again. " * 16
    for _ in range(2):
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))
        first, fed[:] = fed[0], []
        assert first == len(prompt) if _ == 0 else first <= len(prompt) - 2 * PAGE_SIZE


def test_a_full_store_costs_drafts_and_no_text() -> None:
    how = [SamplingParams(temperature=0.7, seed=seed, max_tokens=60) for seed in range(5)]
    prompts = ["Fill the pages! " * 7] * 5
    plain = [output.token_ids for output in plain_answers(prompts, how, characters=True)]
    llm = tiny_llm(speculate=tiny_draft(foreign("speaker:self")), characters=True)
    drafter_of(llm)._store = SeparateCache(store_of(llm)._model, "foreign_draft", 3)  # each needs two
    outputs = llm.generate(prompts, how)
    assert [output.token_ids for output in outputs] == plain
    drafted = [output.stats.drafted for output in outputs]
    assert drafted[0] == 48 and max(drafted[3:]) < 48  # 60 tokens in steps of 5, if there is always room
    assert_nothing_is_held(llm)


def test_pages_are_freed_from_idle_sequences() -> None:
    model, _ = load_model(tiny_directory(0), dtype="float32", device="cpu")
    store = SeparateCache(model, "own", 3)
    old, young, new = Held(), Held(), Held()
    text = list(range(90)) * 3
    with torch.inference_mode():
        assert store.hold(old, text[:130], 0, 4, [old]) and store.hold(young, text[40:140], 0, 4, [young])
        store.feed([(old, text[:130]), (young, text[40:140])])
        assert store.free == 0 and old.ids == text[:130]
        assert not store.hold(new, text[:200], 0, 4, [old, young, new]) and new.ids == []
        assert store.hold(new, text[:200], 0, 4, [young, new]) and old.ids == [] and young.ids
        store.feed([(new, text[:200])])
        assert store.hold(young, text[40:240], 0, 4, [young, new]) and new.ids == []  # the younger one gives way
        assert young.ids == text[40:140] and store.free == 1
        assert not store.hold(young, text, 0, 200, [young]) and young.ids == []  # more than the whole store
        assert store.free == 3


def test_only_committed_rows_are_shared() -> None:
    model, _ = load_model(tiny_directory(0), dtype="float32", device="cpu")
    store = SeparateCache(model, "own", 6)
    first, second = Held(), Held()
    said, guessed = list(range(90)) * 3, list(range(90)) * 2 + [5] * 90
    with torch.inference_mode():
        assert store.hold(first, guessed, 0, 0, [first])
        store.feed([(first, guessed)])
        assert store.hold(first, said, 0, 0, [first]) and first.ids == said[:180]
        store.share(first, said)
        assert store.hold(second, said, 0, 0, [second]) and second.ids == said[:PAGE_SIZE]
        store.feed([(first, said[180:]), (second, said[PAGE_SIZE:])])
        assert first.ids == second.ids == said


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "foreign_draft needs a model"),
        ({"model": "x", "branch": 2}, "branch=2 is out of range .valid: 1: `foreign_draft` offers one chain"),
        ({"model": "x", "draw": "top"}, "unknown option of drafter 'foreign_draft': 'draw'"),
    ],
)
def test_refused_before_anything_is_loaded(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        tiny_llm(speculate={"method": "foreign_draft", **options})


def test_what_does_not_fit_is_refused_by_name() -> None:
    llm = tiny_llm(characters=True)
    with pytest.raises(DraftMismatch, match=r"has the target's own vocabulary \(draft_model is"):
        llm.use(foreign(tiny_directory(1, characters=True)))
    with pytest.raises(DraftMismatch, match=r"draft .* has no tokenizer"):
        llm.use(foreign(tiny_directory(1)))
    with pytest.raises(DraftMismatch, match="the target has no tokenizer"):
        tiny_llm(speculate=foreign(speaker("bytes")))
    with pytest.raises(DraftMismatch, match="foreign_draft takes drafts of another vocabulary"):
        llm.use({"method": "draft_model", "model": str(speaker("self"))})
    for verifier in ("rejection", "block", "traversal"):
        with pytest.raises(OptionError, match="cannot serve a verifier that reads q"):
            tiny_llm(speculate=foreign(speaker("bytes")), characters=True, verifier=verifier)


def test_a_draft_with_a_shorter_context_stops_drafting_and_nothing_else() -> None:
    backend = characters(order=7)
    order = {id: backend.token_to_id(token) for token, id in characters().get_vocab().items()}
    short = directory(renumbered(tiny_directory(0, context=100), order), backend)
    llm = tiny_llm(speculate=foreign(short), context=300, characters=True)
    how = SamplingParams(temperature=0.7, seed=1, max_tokens=150)
    stream = stepped(llm, "abc", how)
    deltas = [next(stream) for _ in range(50)]
    assert_nothing_is_held(llm)  # long before the end: there is nothing more to draft for
    deltas += stream
    plain = plain_answers(["abc"], how, context=300, characters=True)[0]
    assert [token for delta in deltas for token in delta.token_ids] == plain.token_ids
    assert deltas[-1].completion is not None
    assert deltas[-1].completion.stats.draft_faults == 0 and deltas[-1].completion.stats.accepted > 60


@pytest.mark.parametrize("rows", [300, 256])  # padded; and one token of the tokenizer has no row
def test_a_tokenizer_and_a_model_of_different_sizes(rows: int) -> None:
    draft = directory(tiny_directory(1, vocab_size=rows), byte_level(257))
    llm = LLM(speaker("sentencepiece"), speculate=foreign(draft))
    streams = [stepped(llm, prompt, SamplingParams(temperature=0.0, max_tokens=9)) for prompt in ("plain", "m\u00ed")]
    for stream in streams:
        next(stream)
    held = [sequence.drafting["foreign_draft"].held.ids for sequence in llm.engine.scheduler.running]
    assert [len(ids) > 2 for ids in held] == [True, rows == 300]
    for stream in streams:
        assert list(stream)[-1].finish_reason == "length"
    assert llm.engine.draft_faults == 0


def test_check_tells_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = str(tiny_directory(0, characters=True)), str(speaker("bytes"))
    assert check(ModelSetup(model=target, speculate=f"foreign_draft:model={draft}")) == 0
    told = capsys.readouterr().out
    assert "draft tokens per target token" in told and "draft K/V" in told and told.endswith("fits\n")
    assert check(ModelSetup(model=target, speculate=f"foreign_draft:model={draft}"), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["drafts"][0]["translation"]
    assert found["draft_tokens"] > 400 and 0 < found["common_entries"] <= found["target_entries"] == 97
    assert check(ModelSetup(model=target, speculate=f"draft_model:model={draft}")) == 2
    assert "foreign_draft takes drafts of another vocabulary" in capsys.readouterr().out
    assert check(ModelSetup(model=target, speculate=f"foreign_draft:model={target}")) == 2
    assert "the target's own vocabulary" in capsys.readouterr().out
