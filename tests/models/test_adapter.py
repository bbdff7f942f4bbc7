"""Models that run through transformers: its own logits at every node of a tree, and the laws of every other model.

GEMMs of transformers may depend on the number of rows in a pass, so two texts may diverge where two tokens are nearly
tied. Every divergence is checked: a margin of 1e-4 or more is a fault, and the near-ties are counted.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.attention import tree_segment
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.errors import OptionError
from slipstream.models.adapter import Adapter
from slipstream.models.load import load_model
from slipstream.models.model import Model
from slipstream.models.view import TargetView
from slipstream.sampling import Sampler
from slipstream.sequence import TARGET
from slipstream.tree import TokenTree
from tests.models.foreign import CONTEXT, KINDS, VOCABULARY, foreign_directory, foreign_model
from tests.tiny import tiny_directory

STORE = "test"
GREEDY, SAMPLED = 0.0, 0.8  # temperatures
DRAFTS: dict[str, Any] = {
    "ngram": "ngram:min_n=1,max_n=3",
    "suffix": "suffix:min_confidence=0,nodes=20,depth=9",
    "native draft": {"method": "draft_model", "model": str(tiny_directory(1)), "depth": 3, "nodes": 9, "branch": 3},
    "itself": {"method": "draft_model", "model": "...", "depth": 4, "nodes": 12, "branch": 3},
}


def draft(name: str, kind: str) -> Any:
    spec = DRAFTS[name]
    return {**spec, "model": str(foreign_directory(kind))} if name == "itself" else spec


def random_tokens(seed: int, length: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCABULARY) for _ in range(length)]


@functools.cache
def engine(kind: str) -> LLM:
    return LLM(foreign_directory(kind), speculate=None)


@functools.cache
def theirs(kind: str) -> Any:
    return foreign_model(kind)


def margin(kind: str, prompt: list[int], said: list[int], rivals: tuple[int, int], how: SamplingParams) -> float:
    """By how much one of two tokens is ahead of the other after `said`, the noise of that position included."""
    with torch.no_grad():
        row = theirs(kind)(torch.tensor([prompt + said])).logits[0, -1]
    if not how.greedy:
        assert how.seed is not None
        sampler = Sampler(how, how.seed, 0, prompt, said, [])
        row = sampler.perturbed(sampler.support(row, []), [])
    return abs(float(row[rivals[0]] - row[rivals[1]]))


def near_ties(
    kind: str, asked: list[list[int]], how: list[SamplingParams], wanted: list[list[int]], other: list[list[int]]
) -> int:
    """How many texts part at a near-tie; a text that parts anywhere else is a fault."""
    count = 0
    for prompt, params, one, two in zip(asked, how, wanted, other, strict=True):
        assert len(one) == len(two)
        parting = next((i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), None)
        if parting is not None:
            assert margin(kind, prompt, one[:parting], (one[parting], two[parting]), params) < 1e-4
            count += 1
    return count


def say(llm: LLM, asked: list[list[int]], how: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(asked, how)]


def one_by_one(llm: LLM, asked: list[list[int]], how: list[SamplingParams]) -> list[list[int]]:
    return [say(llm, [p], [q])[0] for p, q in zip(asked, how, strict=True)]


def requests(temperature: float) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of awkward lengths, some of them repetitive."""
    asked = [random_tokens(1, 1), random_tokens(2, 5) * 25, random_tokens(3, PAGE_SIZE), random_tokens(4, 3) * 66]
    return asked, [SamplingParams(seed=i, max_tokens=25, temperature=temperature) for i in range(len(asked))]


@functools.cache
def plain(kind: str, temperature: float) -> list[list[int]]:
    """What plain decoding says to these requests, each alone."""
    return one_by_one(engine(kind), *requests(temperature))


def tree_logits(model: Model, prompt: list[int], tree: TokenTree, chunk: int) -> torch.Tensor:
    """Logits at every node, after a prompt fed in chunks; half of the tree is there before the other half."""
    cache = PagedCache(4)
    model.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, len(prompt) + len(tree))
    for start in range(0, len(prompt), chunk):
        model.forward(cache, STORE, [tree_segment(table, start, prompt[start : start + chunk], None)])
    root, half = [tree.tokens[0]], len(tree) // 2
    first = tree_segment(table, len(prompt), root, tree.subtree(range(half)))
    second = tree_segment(table, len(prompt), root, tree, first_node=half)
    return torch.cat([model.forward(cache, STORE, [segment]).logits for segment in (first, second)])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_unmodified_model(kind: str) -> None:
    ours = engine(kind).model
    assert isinstance(ours, Adapter) and ours.config.context == CONTEXT
    tokens = random_tokens(1, 140)
    chooser = random.Random(2)
    tree = TokenTree(tokens[120])
    for _ in range(20):
        tree.add(chooser.randrange(max(0, len(tree) - 6), len(tree)), chooser.randrange(VOCABULARY))
    with torch.inference_mode():
        whole = theirs(kind)(torch.tensor([tokens])).logits[0]
        chain = tree_logits(ours, [], TokenTree.chain(tokens[0], tokens[1:]), 1)
        torch.testing.assert_close(chain, whole, atol=1e-4, rtol=0)
        nodes = tree_logits(ours, tokens[:120], tree, 48)  # crosses a page
        for node in range(len(tree)):
            path = [*tokens[:120], tree.tokens[0], *tree.path_tokens(node)]
            expected = theirs(kind)(torch.tensor([path])).logits[0, -1]
            torch.testing.assert_close(nodes[node], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [GREEDY, SAMPLED])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_same_seed_same_text_with_any_drafter_in_any_batch(kind: str, name: str, temperature: float) -> None:
    llm = engine(kind)
    asked, how = requests(temperature)
    wanted = plain(kind, temperature)
    llm.use(draft(name, kind))
    outputs = llm.generate(asked, how)
    drafted = sum(output.stats.drafted for output in outputs)
    faults = llm.engine.draft_faults
    llm.use(None)
    assert drafted > 20 and faults == 0
    assert near_ties(kind, asked, how, wanted, [output.token_ids for output in outputs]) <= 1


@pytest.mark.parametrize("kind", ["opt", "falcon", "cohere2", "deepseek"])
def test_the_same_for_other_ways_of_keeping_keys_and_values(kind: str) -> None:
    llm = engine(kind)
    asked, how = requests(SAMPLED)
    wanted = plain(kind, SAMPLED)
    llm.use(DRAFTS["suffix"])
    other = say(llm, asked, how)
    llm.use(None)
    assert near_ties(kind, asked, how, wanted, other) <= 1


@pytest.mark.parametrize("temperature", [GREEDY, SAMPLED])
def test_the_target_as_its_own_draft_accepts_everything(temperature: float) -> None:
    llm = engine("gpt2")
    llm.use({"method": "draft_model", "model": str(foreign_directory("gpt2")), "depth": 4, "nodes": 4})
    (output,) = llm.generate([random_tokens(5, 20)], SamplingParams(seed=3, max_tokens=41, temperature=temperature))
    llm.use(None)
    assert output.stats.steps == -(-41 // 5)


def test_a_text_reaches_the_last_learned_position() -> None:
    llm = engine("gpt2")
    asked, how = [random_tokens(6, 4) * 60], [SamplingParams(temperature=0.5, seed=1)]
    wanted = say(llm, asked, how)
    assert len(asked[0]) + len(wanted[0]) == CONTEXT
    for name in ("suffix", "itself"):
        llm.use(draft(name, "gpt2"))
        assert near_ties("gpt2", asked, how, wanted, say(llm, asked, how)) == 0
        assert llm.engine.draft_faults == 0
    llm.use(None)


def test_when_pages_run_out_the_youngest_waits_and_no_token_changes() -> None:
    asked = [random_tokens(i, 90 + 20 * i) for i in range(4)]
    how = [SamplingParams(temperature=0.8, seed=i, max_tokens=70) for i in range(4)]
    wanted = one_by_one(engine("gpt2"), asked, how)
    tight = LLM(foreign_directory("gpt2"), speculate=DRAFTS["suffix"], cache_tokens=5 * PAGE_SIZE)
    other = say(tight, asked, how)
    assert tight.engine.scheduler.preemptions > 0
    assert near_ties("gpt2", asked, how, wanted, other) <= 1
    assert tight.cache.available == tight.cache.capacity


def test_a_shared_prefix_is_computed_once_and_changes_nothing() -> None:
    prefix = random_tokens(7, 2 * PAGE_SIZE + 10)
    asked = [[*prefix, *random_tokens(i, 5)] for i in range(8, 11)]
    how = [SamplingParams(temperature=0.7, seed=5, max_tokens=12)] * len(asked)
    fresh = [say(LLM(foreign_directory("phi"), speculate=None), [p], how[:1])[0] for p in asked]
    llm = LLM(foreign_directory("phi"), speculate=DRAFTS["itself"] | {"model": str(foreign_directory("phi"))})
    assert near_ties("phi", asked, how, fresh, one_by_one(llm, asked, how)) <= 1
    table = llm.cache.open(asked[0])
    assert table.lengths == {TARGET: 2 * PAGE_SIZE, "draft_model": 2 * PAGE_SIZE}
    llm.cache.release(table)


def test_a_native_target_takes_a_draft_that_is_not() -> None:
    asked, how = requests(SAMPLED)
    target = LLM(tiny_directory(0, context=CONTEXT), speculate=None)
    wanted = say(target, asked, how)
    target.use({"method": "draft_model", "model": str(foreign_directory("opt")), "depth": 3, "nodes": 6, "branch": 2})
    assert say(target, asked, how) == wanted  # the target is exact, whatever drafts for it
    assert target.engine.draft_faults == 0


def test_rows_without_logits_and_an_honest_answer_about_bits() -> None:
    llm = engine("gpt2")
    cache = PagedCache(2)
    llm.model.add_store(cache, STORE)
    table = cache.open([])
    cache.reserve(table, 20)
    chunk = tree_segment(table, 0, [1, 2, 3], None)
    last = tree_segment(table, 0, [1, 2, 3], TokenTree(3))
    assert llm.model.forward(cache, STORE, [chunk]).logits.shape == (0, VOCABULARY)
    assert llm.model.forward(cache, STORE, [chunk, last, chunk]).logits.shape == (1, VOCABULARY)
    assert not llm.exact  # stock kernels are not batch-invariant


def test_what_the_adapter_cannot_give_is_refused_by_name() -> None:
    llm = engine("phi")
    model, name = llm.model, str(foreign_directory("phi"))
    segment = tree_segment(llm.cache.open([]), 0, [1], TokenTree(1))
    view = TargetView(model, llm.cache, None, CONTEXT, False, llm.exact)
    hidden = torch.zeros(1, 32)
    asks: list[tuple[str, Any]] = [
        ("hidden states of its layers", lambda: model.forward(llm.cache, TARGET, [segment], taps=[0])),
        ("some of its layers", lambda: model.forward(llm.cache, TARGET, [segment], layers=[0])),
        ("some of its layers", lambda: view.run([segment], [0])),
        ("final norm", lambda: view.norm(hidden)),
        ("output head", lambda: view.head(hidden)),
    ]
    for words, ask in asks:
        with pytest.raises(OptionError, match=words) as raised:
            ask()
        assert name in str(raised.value)
    for drafter in ("early_exit", "layer_skip"):
        with pytest.raises(OptionError, match=f"{drafter} runs single layers of the target"):
            llm.use(drafter)
    assert view.embed(torch.tensor([3, 5])).shape == (2, 32)
    with pytest.raises(OptionError, match="early_exit"):  # before any request
        llm.use("early_exit")
    assert llm.drafter.name == "none"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_dtype_is_honoured(dtype: str) -> None:
    model, tokenizer = load_model(foreign_directory("gpt_neox"), dtype=dtype, device="cpu")
    assert tokenizer is None
    assert str(model.dtype) == str(model.embed(torch.tensor([1])).dtype) == f"torch.{dtype}"
