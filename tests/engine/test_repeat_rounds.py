"""Rounds of `suffix` beside a drafter that grows trees: the text is the plain one, and repetitions are drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.drafters.device.device_draft import DeviceDraft
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.engine.launched import Launched
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan
from tests.corpora import write_corpus
from tests.engine.test_rounds import TREES, asked, drafting_llm
from tests.heads import random_head
from tests.laned import burst_of, burst_on_cpu
from tests.stepping import stepped
from tests.tiny import plain_answers, tiny_llm

LOOP = [3, 1, 4, 1, 5, 9, 2, 6] * 12


def rounds_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let an LLM decode in bursts, and write down how many rounds each is given."""
    burst, seen = burst_of(burst_on_cpu(llm, monkeypatch)), list[int]()
    launch, go_on = burst.launch, burst.go_on

    def launched(sequences: list[Sequence], plan: Plan, rounds: int) -> Launched:
        seen.append(rounds)
        return launch(sequences, plan, rounds)

    def gone_on(begun: Launched, plan: Plan, *, alone: bool) -> Launched:
        if alone:
            seen.append(begun.most)
        return go_on(begun, plan, alone=alone)

    monkeypatch.setattr(burst, "launch", launched)
    monkeypatch.setattr(burst, "go_on", gone_on)
    return seen


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_say_what_plain_steps_say_and_accept_what_the_text_repeats(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [LOOP, [5] * 50, *asked(3)]
    how = [SamplingParams(temperature=temperature, seed=i, max_tokens=60 + 5 * i) for i in range(5)]
    plain = plain_answers(prompts, how, context=300, characters=True)
    alone = burst_on_cpu(drafting_llm(name, TREES[name]), monkeypatch).generate(prompts, how)
    llm = drafting_llm(f"suffix+{name}", TREES[name])
    seen = rounds_of(llm, monkeypatch)
    merged = llm.generate(prompts, how)
    assert seen and llm.engine.draft_faults == 0
    for one, other in zip(plain, merged, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert {origin for origin in other.stats.origins if origin} <= llm.drafter.origins
        assert other.stats.accepted == sum(origin is not None for origin in other.stats.origins)
    both = [sum(output.stats.accepted for output in outputs) for outputs in (merged, alone)]
    assert both[0] > 1.3 * both[1]
    deepest = [sum(count > 0 for count in output.stats.accepted_by_depth) for output in merged]
    assert temperature > 0.0 or max(deepest) > TREES[name]["depth"], "no chain was longer than a tree is deep"
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("name", TREES)
def test_without_a_match_the_trees_are_those_of_the_other_drafter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as deep and as wide, though the lanes have room for longer paths."""
    how = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40) for i in range(5)]
    llms = (drafting_llm(kind, TREES[name]) for kind in (name, f"suffix:min_match=100+{name}"))
    alone, merged = (burst_on_cpu(llm, monkeypatch).generate(asked(), how) for llm in llms)
    for one, other in zip(alone, merged, strict=True):
        assert [o is None for o in one.stats.origins] == [o is None for o in other.stats.origins]
        assert one.stats.offered_by_depth == other.stats.offered_by_depth


@pytest.mark.parametrize("name", [name for name in TREES if name != "medusa"])  # which reads no tokens but the last
def test_a_drafter_reads_all_tokens_of_a_long_chain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those that single steps make, where more tokens come at once than its own trees have levels."""

    def rows(llm: LLM) -> tuple[int, torch.Tensor]:
        """Tokens so far, and the K/V that the drafter has of them, [layers, 2, heads, tokens, size]."""
        stream = stepped(llm, LOOP, SamplingParams(temperature=0.0, max_tokens=100))
        count = 0
        while count < 70:
            count += len(next(stream).token_ids)
        table = llm.engine.scheduler.running[0].table
        key = next(key for key in llm.cache.stores if key.endswith(f"{name}.1"))
        known = llm.cache.stores[key][:, :, table.pages].transpose(2, 3).flatten(3, 4)[..., : table.lengths[key], :]
        return count, known.clone()

    _, wanted = rows(drafting_llm(f"suffix+{name}", TREES[name]))
    count, found = rows(burst_on_cpu(drafting_llm(f"suffix+{name}", TREES[name]), monkeypatch, ahead=False))
    shared = min(found.shape[3], wanted.shape[3])
    assert shared > len(LOOP) + 50 and found.shape[3] + 16 >= len(LOOP) + count
    assert torch.allclose(found[..., :shared, :], wanted[..., :shared, :], atol=1e-4)


def test_single_steps_and_bursts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that needs the host comes and goes twice; what `suffix` keeps there has seen what bursts gave."""
    propose, looked = SuffixDrafter._one, 0

    def compared(self: SuffixDrafter, sequence: Sequence, plan: Plan) -> TokenTree:
        nonlocal looked
        tree = propose(self, sequence, plan)
        kept = sequence.drafting.pop(self.key)
        anew = propose(self, sequence, plan)
        sequence.drafting[self.key] = kept
        assert (tree.tokens, tree.parents) == (anew.tokens, anew.parents)
        looked += len(tree) > 1
        return tree

    monkeypatch.setattr(SuffixDrafter, "_one", compared)
    how = SamplingParams(temperature=0.0, max_tokens=150)
    odd = SamplingParams(temperature=0.0, max_tokens=12, logprobs=21)
    wanted = plain_answers([LOOP], how, context=300, characters=True)[0]
    llm = drafting_llm("suffix+eagle3", TREES["eagle3"])
    seen = rounds_of(llm, monkeypatch)
    stream = stepped(llm, LOOP, how)
    given = list[int]()
    for bursts in (2, 4):
        while len(seen) < bursts:
            given += next(stream).token_ids
        other = stepped(llm, [7] * 30, odd)
        assert next(other).token_ids
        steps = looked
        for delta in other:
            assert delta is not None
        assert looked > steps, "the host drafted nothing"
    for delta in stream:
        given += delta.token_ids
    assert given == wanted.token_ids
    assert len(seen) > 4 and llm.engine.draft_faults == 0


# -- which merges, and their shapes -----------------------------------------------------------------------------------


def drafted(lanes: int, *drafters: Any, **options: Any) -> DeviceDraft | None:
    llm = tiny_llm(context=300, characters=True)
    llm.use({"method": "merge", "drafters": list(drafters), **options})
    return llm.drafter.device_draft(lanes)


def trees(name: str = "eagle3", **options: Any) -> dict[str, Any]:
    return {"method": name, "checkpoint": str(random_head(name)), "depth": 4, "nodes": 40, **options}


@pytest.mark.parametrize(
    ("suffix", "other", "options", "shape"),
    [
        ("suffix", {}, {}, (40, 16)),
        ("suffix:depth=5", {}, {}, (40, 5)),
        ("suffix:depth=2", {}, {}, (40, 4)),
        ("suffix:nodes=7", {}, {}, (40, 7)),
        ("suffix", {}, {"nodes": 10}, (10, 10)),
        ("suffix", {}, {"depth": 3}, (40, 3)),
        ("suffix", {"nodes": 3}, {"nodes": 24}, (3, 3)),  # so few nodes reach no fourth level
        ("suffix", {"branch": 1, "nodes": 0}, {}, (4, 4)),
    ],
)
def test_a_chain_is_as_long_as_its_options_and_the_nodes_of_the_tree_allow(
    suffix: str, other: dict[str, Any], options: dict[str, Any], shape: tuple[int, int]
) -> None:
    for drafters in ((suffix, trees(**other)), (trees(**other), suffix)):
        draft = drafted(1, *drafters, **options)
        assert draft is not None
        assert (draft.nodes, draft.depth) == shape
        assert draft.scratch >= 2 * draft.depth


def test_other_merges_are_left_to_the_host(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [LOOP], tokenizer=tiny_llm(context=300, characters=True).tokenizer)
    assert drafted(1, {"method": "suffix", "corpus": str(tmp_path / "corpus")}, trees()) is None
    assert drafted(1, "suffix:shared=true", trees()) is None
    assert drafted(1, "suffix:depth=0", trees()) is None
    assert drafted(1, "suffix:min_confidence=0.4", trees()) is None, "a chain has no such limit, and the user set one"
    assert drafted(1, "suffix", trees(min_confidence=0.1)) is None
    static = {"method": "medusa", "checkpoint": str(random_head("medusa")), "tree": "static"}
    assert drafted(1, "suffix", static) is None
    assert drafted(1, "suffix", "suffix") is None
    assert drafted(1, "suffix", "ngram", trees()) is None
    assert drafted(1, "ngram", trees()) is None
