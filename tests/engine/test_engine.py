"""The engine around the drafters: pages, chunks, sharing, setting aside, choices, cancelling, logprobs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, Stats
from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE
from slipstream.errors import DraftMismatch, NotEnoughMemory, OptionError, PromptError
from slipstream.sequence import TARGET
from slipstream.tree import Draw, TokenTree
from tests.tiny import tiny_directory, tiny_draft, tiny_llm

DRAFT = {"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 6, "branch": 2}


def random_prompt(seed: int, length: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(97) for _ in range(length)]


def test_when_pages_run_out_the_youngest_waits_and_no_token_changes() -> None:
    asked = [random_prompt(i, 90 + 20 * i) for i in range(5)]
    how = [SamplingParams(temperature=0.8, seed=i, max_tokens=70) for i in range(5)]
    roomy = tiny_llm(speculate=None, context=384)
    wanted = [roomy.generate([p], q)[0].token_ids for p, q in zip(asked, how, strict=True)]
    tight = tiny_llm(speculate=None, context=384, cache_tokens=5 * PAGE_SIZE)
    for speculate in (None, "suffix:min_confidence=0", DRAFT):
        tight.use(tiny_draft(speculate))
        outputs = tight.generate(asked, how)
        assert tight.engine.scheduler.preemptions > 0
        assert [o.token_ids for o in outputs] == wanted
        assert tight.engine.draft_faults == 0
        assert tight.cache.available == tight.cache.capacity


def test_a_shared_prefix_is_computed_once_and_changes_nothing() -> None:
    prefix = random_prompt(1, 2 * PAGE_SIZE + 30)
    asked = [[*prefix, *random_prompt(i, 5)] for i in range(2, 6)]
    how = SamplingParams(temperature=0.7, seed=5, max_tokens=20)
    fresh = [tiny_llm(speculate=None).generate([p], how)[0].token_ids for p in asked]
    llm = tiny_llm(speculate=DRAFT)
    assert [llm.generate([p], how)[0].token_ids for p in asked] == fresh
    table = llm.cache.open(asked[0])
    assert len(table.pages) == 2
    # The draft's rows are shared with the pages: it can draft after a shared prefix.
    assert table.lengths == {TARGET: 2 * PAGE_SIZE, "draft_model": 2 * PAGE_SIZE}
    llm.cache.release(table)


def test_a_repeated_prompt_in_one_batch_is_answered_each_time_by_its_own_seed() -> None:
    llm = tiny_llm(speculate="suffix:min_confidence=0")
    prompt = random_prompt(3, PAGE_SIZE + 1)
    how = [SamplingParams(temperature=1.0, seed=i % 3, max_tokens=12) for i in range(6)]
    outputs = [o.token_ids for o in llm.generate([prompt] * 6, how)]
    assert outputs[:3] == outputs[3:]
    assert len({tuple(o) for o in outputs}) == 3


@pytest.mark.parametrize("speculate", [None, "suffix:min_confidence=0", DRAFT])
def test_choices_fork_from_one_prompt_and_differ_by_their_index_alone(speculate: object) -> None:
    llm = tiny_llm(speculate=speculate)  # type: ignore[arg-type]
    prompt = random_prompt(4, 150)
    (output,) = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=15))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    (fewer,) = tiny_llm().generate([prompt], SamplingParams(n=2, temperature=1.0, seed=9, max_tokens=15))
    assert [c.token_ids for c in fewer.outputs] == [c.token_ids for c in output.outputs[:2]]
    assert llm.cache.available == llm.cache.capacity


def test_only_choices_of_one_request_share_a_prompt_that_is_being_answered() -> None:
    """Choices have the first of two pages together; others do only where it was full before they came."""
    prompt = random_prompt(4, PAGE_SIZE + 20)
    how = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=15)
    for asked, pages in (([how], 1), ([replace(how, n=1)] * 3, 3)):
        llm = tiny_llm()
        sequences = [s for each in asked for s in llm.sequences(prompt, each)]
        llm.engine.scheduler.add(sequences)
        while not all(s.first_token_at for s in sequences):
            llm.engine.step()
        assert len({s.table.pages[0] for s in sequences}) == pages


def test_prompts_longer_than_a_chunk_are_fed_in_pieces() -> None:
    prompt = random_prompt(5, 1300)
    how = SamplingParams(temperature=0.0, max_tokens=5)
    llm = tiny_llm(context=2048)
    steps = []
    original = llm.engine.model.forward

    def counting(cache, store, segments, **kwargs):  # type: ignore[no-untyped-def]
        steps.append([s.rows for s in segments])
        return original(cache, store, segments, **kwargs)

    llm.engine.model.forward = counting  # type: ignore[method-assign]
    llm.generate([prompt], how)
    assert steps[:3] == [[512], [512], [276]]


def test_logprobs_are_those_of_the_raw_distribution_for_accepted_tokens_too() -> None:
    prompt = random_prompt(6, 20)
    how = SamplingParams(temperature=0.5, top_k=3, seed=2, max_tokens=20, logprobs=4, repetition_penalty=1.2)
    plain = tiny_llm().generate([prompt], how)[0]
    drafted = tiny_llm(speculate={"method": "draft_model", "model": "tiny:0"}).generate([prompt], how)[0]
    assert drafted.stats.accepted > 0
    assert drafted.logprobs == plain.logprobs
    assert plain.logprobs is not None and len(plain.logprobs) == 20
    # Against an independent computation: one pass over everything, no sampling code.
    llm = tiny_llm()
    tokens = prompt + plain.token_ids
    table = llm.cache.open([])
    llm.cache.reserve(table, len(tokens))
    chain = TokenTree.chain(tokens[0], tokens[1:])
    rows = llm.model.forward(llm.cache, TARGET, [tree_segment(table, 0, tokens[:1], chain)]).logits.log_softmax(-1)
    for index, entry in enumerate(plain.logprobs):
        row = rows[len(prompt) - 1 + index]
        token = plain.token_ids[index]
        assert next(iter(entry)) == token, "the chosen token comes first"
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        best = sorted(entry, key=lambda t: entry[t].rank)[:4]
        assert best == torch.topk(row, 4).indices.tolist() and set(entry) == {token, *best}
        for other, found in entry.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
    assert plain.cumulative_logprob == pytest.approx(
        sum(float(rows[len(prompt) - 1 + i][t]) for i, t in enumerate(plain.token_ids)), abs=1e-3
    )


def test_a_closed_stream_gives_its_pages_back() -> None:
    llm = tiny_llm(speculate="suffix")
    stream = llm.stream(random_prompt(7, 200), SamplingParams(temperature=1.0, seed=1))
    next(stream)
    assert llm.cache.available < llm.cache.capacity
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.scheduler.idle
    assert llm.cache.available == llm.cache.capacity


def test_a_stream_gives_the_text_of_generate() -> None:
    llm = tiny_llm(speculate="suffix:min_confidence=0", characters=True)
    how = SamplingParams(temperature=0.7, seed=3, max_tokens=60, stop=["zq!"])
    whole = llm.generate("abc abc abc", how)[0]
    deltas = list(llm.stream("abc abc abc", how))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].completion is not None and deltas[-1].completion.text == whole.text


def test_without_a_seed_each_answer_has_its_own_and_can_be_had_again() -> None:
    llm = tiny_llm(speculate="suffix")
    first, second = (llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20))[0] for _ in range(2))
    assert first.token_ids != second.token_ids
    again = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, seed=first.outputs[0].seed))[0]
    assert again.token_ids == first.token_ids


def test_what_cannot_be_honoured_is_refused_before_any_work() -> None:
    llm = tiny_llm(context=64)
    with pytest.raises(PromptError, match="empty"):
        llm.generate([[]])
    with pytest.raises(PromptError, match="64 tokens"):
        llm.generate([list(range(64))])
    with pytest.raises(OptionError, match="no token 97"):
        llm.generate([[97]])
    with pytest.raises(OptionError, match="logit_bias"):
        llm.generate([[1]], SamplingParams(logit_bias={500: 1.0}))
    with pytest.raises(OptionError, match="tokenizer"):
        llm.generate("text for a model without a tokenizer")
    with pytest.raises(OptionError, match="2 sampling parameters for 1"):
        llm.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(OptionError, match="max_model_len=999"):
        tiny_llm(context=64, max_model_len=999)
    with pytest.raises(OptionError, match="cache_tokens=100"):
        tiny_llm(context=512, cache_tokens=100)
    with pytest.raises(NotEnoughMemory, match="MiB of K/V"):
        tiny_llm(cache_tokens=10**12)
    with pytest.raises(OptionError, match="unknown verifier 'magic'"):
        tiny_llm(verifier="magic")
    assert llm.engine.scheduler.idle


def test_a_change_of_drafter_leaves_running_requests_theirs() -> None:
    llm: LLM = tiny_llm(speculate=tiny_draft({"method": "draft_model", "model": "tiny:0"}))
    how = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    wanted = tiny_llm().generate([[1, 2, 3]], how)[0].token_ids
    stream = llm.stream([1, 2, 3], how)
    said = list(next(stream).token_ids)
    llm.use("ngram")
    assert llm.drafter.name == "ngram" and "draft_model" in llm.cache.stores, "somebody still drafts with it"
    (other,) = llm.generate([[1, 2, 3]], how)
    assert other.token_ids == wanted and set(other.stats.origins) <= {None, "ngram"}
    for delta in stream:
        said += delta.token_ids
        last = delta
    assert said == wanted and last.completion is not None
    assert set(last.completion.stats.origins) == {None, "draft_model"}
    llm.use("suffix")
    assert set(llm.cache.stores) == {"target"} and llm.engine.draft_faults == 0, "nobody does any more"


def test_a_failed_change_of_drafter_leaves_plain_decoding(tmp_path: Path) -> None:
    llm = tiny_llm(speculate=DRAFT)
    other = tiny_directory(seed=1, vocab_size=50)
    with pytest.raises(DraftMismatch, match="50 tokens, the target 97"):
        llm.use({"method": "draft_model", "model": str(other)})
    assert llm.drafter.name == "none"
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3, seed=1))[0].stats.draft_faults == 0


def test_another_draft_under_the_same_name_is_not_taken_for_the_first() -> None:
    """Marks that say 'the rows of this store are here' must go with the store."""
    llm = tiny_llm(speculate={"method": "draft_model", "model": "tiny:5"})
    prompt, how = random_prompt(8, 300), SamplingParams(temperature=0, max_tokens=41)
    llm.generate([prompt], how)
    llm.use(tiny_draft({"method": "draft_model", "model": "tiny:0"}))
    (output,) = llm.generate([prompt], how)
    assert output.stats.accepted == 41 - output.stats.steps


def test_pages_completed_by_accepted_drafts_are_shared_under_all_their_tokens() -> None:
    llm = tiny_llm(speculate={"method": "draft_model", "model": "tiny:0"})
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=300))
    table = llm.cache.open([1, 2, 3, *output.token_ids])
    assert len(table.pages) == 2
    llm.cache.release(table)


def test_a_draft_too_large_for_the_cache_is_not_made() -> None:
    wide = {"method": "draft_model", "model": "tiny:1", "depth": 8, "nodes": 100, "branch": 90}
    llm = tiny_llm(speculate=wide, context=384, cache_tokens=5 * PAGE_SIZE)
    (output,) = llm.generate([random_prompt(1, 300)], SamplingParams(temperature=0))
    assert output.finish_reason == "length"


def test_an_observer_that_breaks_is_dropped_once_for_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(speculate="suffix")

    def failing(outcomes: Any) -> None:
        if any(outcome.sequence.request.prompt_ids == [7] for outcome in outcomes):
            raise RuntimeError("cannot look at this")

    monkeypatch.setattr(llm.drafter, "observe", failing)
    outputs = llm.generate([[5, 6], [7]], SamplingParams(max_tokens=12, seed=1))
    assert [o.stats.draft_faults for o in outputs] == [0, 1]


def test_taps_of_every_committed_row_reach_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a prompt that is fed in pieces, and of accepted nodes in the order of the text."""
    llm = tiny_llm(speculate={"method": "draft_model", "model": "tiny:0"}, context=1024)
    drafter = llm.drafter
    drafter.taps = (0,)
    rows: list[torch.Tensor] = []
    original = drafter.observe

    def watching(outcomes: Any) -> None:
        rows.extend(outcome.taps[0] for outcome in outcomes)
        original(outcomes)

    monkeypatch.setattr(drafter, "observe", watching)
    prompt = random_prompt(2, 700)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=23))
    tokens = prompt + output.token_ids
    table = llm.cache.open([])
    llm.cache.reserve(table, len(tokens))
    segment = tree_segment(table, 0, tokens, None)
    expected = llm.model.forward(llm.cache, TARGET, [segment], taps=[0]).taps[0]
    got = torch.cat(rows)
    assert len(got) >= 700 + 15
    assert torch.equal(got, expected[: len(got)])


def test_prompts_may_be_arrays_and_statistics_add_up_over_requests() -> None:
    llm = tiny_llm()
    how = SamplingParams(max_tokens=6, seed=1)
    (one,) = llm.generate(np.array([1, 2, 3]), how)
    (two,) = llm.generate([[1, 2, 3]], how)
    assert one.token_ids == two.token_ids
    total = Stats()
    for output in (one, two):
        total.add(output.stats)
    assert total.decoded == 10
    assert total.tokens_per_second == pytest.approx(1000 * 10 / total.decode_ms)


class _Bad:
    """Distributions that no drafter may hand in."""

    nan = torch.full((97,), float("nan"))
    short = torch.full((50,), 1 / 50)
    zero_at_the_token = torch.nn.functional.one_hot(torch.tensor(9), 97).double()
    unnormalised = torch.ones(97)
    text = "nonsense"
    numpy = np.full(97, 1 / 97)


@pytest.mark.parametrize("kind", ["nan", "short", "zero_at_the_token", "unnormalised", "text", "numpy", "many"])
def test_nonsense_of_a_drafter_is_a_fault_and_not_a_bent_distribution(kind: str, monkeypatch: Any) -> None:
    llm = tiny_llm(speculate="suffix", verifier="rejection")

    def nonsense(requests: Any) -> list[TokenTree]:
        trees = []
        for request in requests:
            tree = TokenTree(request.sequence.tokens[-1])
            if kind == "many":
                even = Draw(torch.full((97,), 1 / 97))
                for token in range(60):
                    tree.add(0, token, draw=even)
            else:
                tree.add(0, 5, draw=Draw(getattr(_Bad, kind)))
            trees.append(tree)
        return trees

    monkeypatch.setattr(llm.drafter, "propose", nonsense)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, seed=1))
    assert output.stats.draft_faults == 1
    assert len(output.token_ids) == 5


def test_another_drafter_finds_no_pages_that_it_knows_nothing_of() -> None:
    """Its state besides K/V would be missing there, and its guesses after them would be useless."""
    llm = tiny_llm()
    prompt = [7, 3] * (PAGE_SIZE + 10)
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
    table = llm.cache.open(prompt)
    assert len(table.pages) == 2
    llm.cache.release(table)
    llm.use("suffix")
    assert llm.cache.open(prompt).pages == []
    assert llm.cache.available == llm.cache.capacity


def test_warming_up_asks_prompts_that_fit_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(context=512)
    asked: list[int] = []
    original = llm._finished

    def finished(source: Any, at_once: int) -> Any:
        requests = list(source)
        asked.extend(len(request.prompt_ids) for _, request in requests)
        monkeypatch.setattr(llm.model, "device", "cpu")
        outputs = list(original(iter(requests), at_once))
        monkeypatch.setattr(llm.model, "device", "cuda")
        return outputs

    monkeypatch.setattr(llm, "_finished", finished)
    llm.warm_up()
    assert asked == [], "a CPU has nothing to warm up"
    monkeypatch.setattr(llm.model, "device", "cuda")
    llm.warm_up()
    fitting = [1, 15, 23, 31, 47, 63, 95, 127, 191, 255, 383]
    assert asked == [*(n for length in fitting for n in (length, length)), 30], "twice every length that fits"
    assert llm.cache.open([0] * 300).pages == []
    assert llm.cache.available == llm.cache.capacity
