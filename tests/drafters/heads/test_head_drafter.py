"""Shared by all trained drafters: shared pages, top-k and top-p, NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads.head_drafter import HeadDrafter
from slipstream.drafters.heads.parallel_head import ParallelHead
from slipstream.tree import TokenTree
from tests.heads import random_head
from tests.lessons import new_head, saved
from tests.tiny import tiny_llm

PROMPT = [5, 9, 17, 3, 80, 2] * 44  # two pages and a little


def build(speculate: object, **kwargs: object) -> LLM:
    return tiny_llm(context=300, characters=True, speculate=speculate, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["eagle3", "mtp", "parallel", "kangaroo"])
def test_a_request_that_ends_at_once_leaves_its_hidden_states_to_others(method: str) -> None:
    checkpoint = random_head(method, **({"exit": 1} if method == "kangaroo" else {}))
    how = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    fresh = build(f"{method}:checkpoint={checkpoint}").generate([PROMPT], how)[0].stats
    llm = build(f"{method}:checkpoint={checkpoint}")
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    features = next(data for name, data in llm.cache.stores.items() if name.endswith(".features"))
    table = llm.cache.open(PROMPT)
    assert len(table.pages) == 2 and bool(features[0, 0, table.pages].abs().amax(-1).gt(0).all())
    llm.cache.release(table)
    again = llm.generate([PROMPT], how)[0].stats
    assert (again.accepted_by_depth, again.steps) == (fresh.accepted_by_depth, fresh.steps)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp", "parallel", "kangaroo", "draft_model"])
def test_a_drafter_is_loaded_without_drawing_numbers(method: str) -> None:
    """Random initialisation would be thrown away and takes seconds for a large target. No random state changes."""
    llm, place = build(None), random_head(method)
    before = torch.get_rng_state()
    llm.use(f"{method}:checkpoint={place}")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["eagle3", "parallel"])
def test_hidden_states_that_exceed_float16_do_not_end_drafting(method: str) -> None:
    """As those of the first token of a text do: three layers of up to 22,512 each are summed for SmolLM2."""
    llm = build(None)
    head, settings = new_head(llm, method, torch.arange(97))
    assert isinstance(head, Eagle3Head | ParallelHead)
    head.fuse.weight.data *= 6e4
    place = saved(llm, method, head, settings)
    half = build(f"{method}:checkpoint={place}", dtype="half")
    output = half.generate([PROMPT[:30]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
    assert half.engine.draft_faults == 0 and output.stats.drafted > 0


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.3}])
def test_only_tokens_that_can_be_chosen_are_drafted(cut: dict[str, float]) -> None:
    """A draft that is the target itself is right whenever it knows which tokens are cut off."""
    llm = build(None)
    head, settings = new_head(llm, "draft_model", torch.arange(97), layers=2)
    place = saved(llm, "draft_model", head, settings)
    llm.use({"method": "draft_model", "checkpoint": str(place), "depth": 4})
    how = SamplingParams(temperature=1.0, seed=2, max_tokens=41, ignore_eos=True, **cut)  # type: ignore[arg-type]
    stats = llm.generate([PROMPT[:30]], how)[0].stats
    assert stats.accepted == stats.drafted


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp", "parallel", "kangaroo", "draft_model"])
def test_numbers_that_are_none_drop_the_drafter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = HeadDrafter._restored

    def broken(drafter: HeadDrafter) -> torch.nn.Module:  # type: ignore[type-arg]
        head = restored(drafter)
        for weight in head.parameters():
            weight.data.fill_(float("nan"))
        return head

    monkeypatch.setattr(HeadDrafter, "_restored", broken)
    llm = build(f"{method}:checkpoint={random_head(method)}")
    how = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    output = llm.generate([PROMPT[:20]], how)[0]
    assert output.stats.draft_faults == 1
    llm.use(None)
    assert llm.generate([PROMPT[:20]], how)[0].token_ids == output.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_what_could_not_be_offered_is_not_fed(method: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees are those of a draft that feeds every level in full, made with fewer rows."""

    def grown() -> tuple[list[list[tuple[tuple[int, ...], float]]], int]:
        llm = build(f"{method}:checkpoint={random_head(method)},nodes=7,branch=3,depth=5")
        drafter = llm.drafter
        offered: list[list[tuple[tuple[int, ...], float]]] = []
        rows = 0

        def offer(growth: Growth, healthy: Callable[[Growth], TokenTree] = drafter._offer) -> TokenTree:  # type: ignore[attr-defined]
            nonlocal rows
            tree = healthy(growth)
            rows += growth.fed
            paths = [(tuple(tree.path_tokens(node)), tree.confidence[node]) for node in range(1, len(tree))]
            offered.append(sorted(paths))
            return tree

        monkeypatch.setattr(drafter, "_offer", offer)
        llm.generate([PROMPT[:30]], SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True))
        assert llm.engine.draft_faults == 0
        return offered, rows

    sparing, few = grown()
    monkeypatch.setattr(Growth, "bar", lambda growth, candidates: -1.0)
    lavish, many = grown()
    assert len(sparing) == len(lavish) > 10 and few < many
    for one, other in zip(sparing, lavish, strict=True):
        assert [path for path, _ in one] == [path for path, _ in other]
        assert [joint for _, joint in one] == pytest.approx([joint for _, joint in other], rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "own_kernels", "nodes", "depth"),
    [
        *(("none", "matrix unit", 16, 8), ("int8", "matrix unit", 7, 8), ("int4", "matrix unit", 5, 5)),
        *(("none", "vectors", 16, 8), ("int8", "vectors", 6, 6), ("int4", "vectors", 5, 5)),
        *(("none", "pairs", 16, 8), ("int8", "pairs", 6, 6), ("int4", "pairs", 3, 3)),
        *(("none", "", 16, 8), ("int8", "", 16, 8), ("int4", "", 3, 3)),
    ],
)
def test_trees_have_as_many_nodes_as_rows_are_cheap(
    mode: str, own_kernels: str, nodes: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.decoder.int8_kernels_work", lambda: own_kernels != "")
    monkeypatch.setattr("slipstream.models.decoder.has_int8_dot", lambda: own_kernels in ("matrix unit", "vectors"))
    monkeypatch.setattr("slipstream.models.decoder.has_matrix_unit", lambda: own_kernels == "matrix unit")
    monkeypatch.setattr("slipstream.models.decoder.short_vectors", lambda: own_kernels == "pairs")
    checkpoint = random_head("eagle3")
    plan = build(f"eagle3:checkpoint={checkpoint}", quantize=mode).drafter.plan
    dear = nodes < 7 or (mode, own_kernels) == ("none", "pairs")
    assert plan.min_confidence == (0.2 if dear else 0.07)
    assert (plan.nodes, plan.depth) == (nodes, depth)
    asked = build(f"eagle3:checkpoint={checkpoint},nodes=9", quantize=mode).drafter.plan
    assert (asked.nodes, asked.depth) == (9, 8)
