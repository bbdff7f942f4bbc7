"""A draft model's own K/V stay in step with the text, whatever was accepted, and a draft that fits is not refused."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE
from slipstream.errors import DraftMismatch
from slipstream.models.load import load_model
from slipstream.sequence import TARGET
from tests.stepping import stepped
from tests.tiny import plain_answers, tiny_directory, tiny_llm

STORE = "draft_model"


def rows(llm: LLM, store: str, pages: list[int], count: int) -> torch.Tensor:
    """[layers, 2, kv heads, count, size] of a sequence's first rows."""
    return torch.cat([llm.cache.stores[store][:, :, page] for page in pages], dim=3)[:, :, :, :count]


@pytest.mark.parametrize("shape", [{"depth": 4, "nodes": 4}, {"depth": 3, "nodes": 9, "branch": 3}])
@pytest.mark.parametrize("draft_seed", [0, 1])  # the target itself: all accepted; another model: nearly all rejected
def test_the_store_holds_exactly_the_committed_text(draft_seed: int, shape: dict[str, int]) -> None:
    llm = tiny_llm(speculate={"method": "draft_model", "model": f"tiny:{draft_seed}", **shape})
    stream = stepped(llm, [3, 1, 4, 1, 5] * 24, SamplingParams(temperature=0.9, seed=2, max_tokens=60))
    for _ in range(9):
        next(stream)
    (sequence,) = llm.engine.scheduler.running
    known = sequence.table.lengths[STORE]
    assert len(sequence.tokens) - 6 <= known < len(sequence.tokens)
    got = rows(llm, STORE, sequence.table.pages, known)

    model, _ = load_model(tiny_directory(draft_seed), dtype="float32", device="cpu")
    table = llm.cache.open([])
    llm.cache.reserve(table, known)
    with torch.inference_mode():
        model.forward(llm.cache, STORE, [tree_segment(table, 0, sequence.tokens[:known], None)])
    assert torch.equal(got, rows(llm, STORE, table.pages, known))
    llm.cache.release(table)
    stream.close()  # type: ignore[attr-defined]


def test_a_prefix_is_shared_while_the_tree_of_its_owner_is_in_flight() -> None:
    llm = tiny_llm(speculate={"method": "draft_model", "model": "tiny:1", "depth": 3, "nodes": 6, "branch": 2})
    how = SamplingParams(temperature=0.8, seed=4, max_tokens=40)
    prompt = [7, 8, 9] * 60
    first = stepped(llm, prompt, how)
    said = [token for _ in range(12) for token in next(first).token_ids]
    longer = prompt + said
    second = stepped(llm, longer, how)
    begun = next(second).token_ids
    newest = llm.engine.scheduler.running[-1]
    assert newest.table.pages[:1] == llm.engine.scheduler.running[0].table.pages[:1]
    rest_of_second = [token for delta in second for token in delta.token_ids]
    rest_of_first = [token for delta in first for token in delta.token_ids]
    plain = tiny_llm()
    assert said + rest_of_first == plain.generate([prompt], how)[0].token_ids
    assert begun + rest_of_second == plain.generate([longer], how)[0].token_ids


def test_a_draft_with_a_shorter_context_stops_drafting_and_nothing_else() -> None:
    draft = {"method": "draft_model", "model": str(tiny_directory(0, context=100)), "depth": 4, "nodes": 4}
    llm = tiny_llm(speculate=draft, context=300)
    how = SamplingParams(temperature=0.7, seed=1)
    (output,) = llm.generate([[1, 2, 3]], how)
    assert output.token_ids == plain_answers([[1, 2, 3]], how, context=300)[0].token_ids
    assert output.stats.draft_faults == 0
    assert output.stats.accepted > 60  # the target is its own draft until the draft's context is over


def test_a_padded_vocabulary_is_no_difference() -> None:
    draft = str(tiny_directory(1, vocab_size=128, characters=True))
    for verifier in ("match", "rejection"):
        llm = tiny_llm(speculate={"method": "draft_model", "model": draft}, verifier=verifier, characters=True)
        (output,) = llm.generate("padding", SamplingParams(temperature=1.0, seed=1, max_tokens=30))
        assert len(output.token_ids) == 30
        assert output.stats.draft_faults == 0 and output.stats.drafted > 0


def test_the_same_size_with_another_token_map_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tiny_directory(1, characters=True)
    other = tmp_path_factory.mktemp("other")
    for file in source.iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(text.replace(b'"A": 33', b'"A": 34').replace(b'"B": 34', b'"B": 33'))
    with pytest.raises(DraftMismatch, match="token 33 is 'B' in the draft and 'A' in the target"):
        tiny_llm(speculate={"method": "draft_model", "model": str(other)}, characters=True)


def test_a_shared_page_is_written_once_and_read_by_both() -> None:
    llm = tiny_llm()
    prompt = list(range(90)) * 2
    llm.generate([prompt], SamplingParams(max_tokens=1, seed=1))
    before = llm.cache.open(prompt)
    kept = rows(llm, TARGET, before.pages, PAGE_SIZE).clone()
    llm.generate([[*prompt[:PAGE_SIZE], 5, 6, 7]], SamplingParams(max_tokens=20, seed=2))
    assert torch.equal(kept, rows(llm, TARGET, before.pages, PAGE_SIZE))
    llm.cache.release(before)
