"""Rounds on the device draft, verify and commit what the host's steps do. Here on a CPU: called instead of captured."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream import LLM, SamplingParams, attention
from slipstream.cache import PAGE_SIZE
from slipstream.drafters.device.device_draft import DeviceLoop
from slipstream.models.decoder import Decoder
from slipstream.policy.sizes import TREE_ROUNDS
from slipstream.types import Output
from tests.heads import random_head
from tests.laned import burst_of, burst_on_cpu
from tests.tiny import plain_answers, tiny_draft, tiny_llm

# Methods that draft on the device, with the options under which random heads are right often enough to see it.
TREES: dict[str, dict[str, Any]] = {
    "eagle3": {"depth": 4, "nodes": 40, "branch": 12},
    "mtp": {"depth": 4, "nodes": 40, "branch": 12},
    "parallel": {"depth": 4, "nodes": 40, "branch": 12},
    "draft_model": {"depth": 4, "nodes": 40, "branch": 12},
    "medusa": {"depth": 3, "nodes": 30, "branch": 3},
}
CHAINS: dict[str, dict[str, Any]] = {name: {"depth": 3, "branch": 1} for name in TREES}
GROWN = {"parallel grown": TREES["parallel"], "eagle3 normed": TREES["eagle3"]}
CASES = [(name, options) for group in (TREES, CHAINS) for name, options in group.items()]
WIDE = {"depth": 3, "nodes": 40}
CASES += [*GROWN.items(), ("parallel grown", {"depth": 9, "branch": 1})]
CASES += [("medusa before", WIDE), *((name, WIDE | {"tree": "static"}) for name in ("medusa", "medusa before"))]
MERGES = {f"suffix+{name}": TREES[name] for name in ("eagle3", "parallel")}
# Fresh heads all say the same: stirred ones show which of them was asked.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"stirred": 0.2}),
    "medusa before": ("medusa", {"before": True, "stirred": 0.2}),
    "eagle3 normed": ("eagle3", {"norm_each": True, "feed_normed": True}),
    "parallel grown": (
        "parallel",
        {"inject": True, "confidence": True, "block": 10, "layers": 3, "rank": 16, "stirred": 0.02},
    ),
}


def asked(count: int = 5, longest: int = 200) -> list[list[int]]:
    chooser = random.Random(count)
    return [[chooser.randrange(97) for _ in range(chooser.randrange(1, longest))] for _ in range(count)]


def drafting_llm(name: str, options: dict[str, Any], **engine: Any) -> LLM:
    """`options`: those of a trained drafter; another drafter and a plus may come before it."""
    llm = tiny_llm(**{"context": 300, "characters": True, **engine})
    beside, _, name = name.rpartition("+")
    method, settings = HEADS.get(name, (name, {}))
    trees = {"method": method, "checkpoint": str(random_head(method, **settings)), **options}
    llm.use({"method": "merge", "drafters": [beside, trees]} if beside else trees)
    return llm


def story(output: Output) -> list[str | None]:
    """Where the tokens came from. Near the end of an answer the host drafts less deep, and so another tree."""
    return output.stats.origins[:-8]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: str(case))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_say_what_plain_steps_say_and_accept_what_the_hosts_do(
    name: str, options: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = [SamplingParams(temperature=temperature, seed=i, max_tokens=40 + 7 * i) for i in range(5)]
    plain = plain_answers(asked(), how, context=300, characters=True)
    by_host = drafting_llm(name, options).generate(asked(), how)
    llm = burst_on_cpu(drafting_llm(name, options), monkeypatch)
    rounds = 0
    burst = burst_of(llm)
    original = burst._verify

    def verify(*args: Any) -> None:
        nonlocal rounds
        rounds += 1
        original(*args)

    monkeypatch.setattr(burst, "_verify", verify)
    by_device = llm.generate(asked(), how)
    assert rounds > 10 and llm.engine.draft_faults == 0
    for one, host, device in zip(plain, by_host, by_device, strict=True):
        assert device.token_ids == one.token_ids
        assert device.text == one.text
        assert story(device) == story(host)
    assert sum(output.stats.accepted for output in by_device) > (0 if options.get("branch") == 1 else 10)
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("name", TREES)
def test_ends_pages_and_other_choices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS inside an accepted run, the end of the context, several choices, a batch that is filled up."""
    prompts = [*asked(3, 60), [5] * 120, [6] * 127]
    how = [
        *(SamplingParams(temperature=1.0, seed=i, max_tokens=60, stop_token_ids=[11, 12]) for i in range(2)),
        SamplingParams(n=3, temperature=0.8, seed=9, max_tokens=30),
        *(SamplingParams(temperature=0.0) for _ in range(2)),
    ]
    plain = plain_answers(prompts, how, context=160, characters=True, eos=5)
    llm = tiny_llm(context=160, characters=True, eos=5)
    llm.use({"method": name, "checkpoint": str(random_head(name)), **TREES[name]})
    given = burst_on_cpu(llm, monkeypatch).generate(prompts, how)
    for one, other in zip(plain, given, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.token_ids, left.finish_reason) == (right.token_ids, right.finish_reason)
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize(("name", "options"), (TREES | MERGES | GROWN).items(), ids=str)
def test_pages_that_rounds_filled_hold_the_right_rows(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request begins with an answer that rounds wrote: K/V of the target and of the drafter are read again."""
    llm = burst_on_cpu(drafting_llm(name, options), monkeypatch)
    prompt, how = asked(1)[0][:100], SamplingParams(temperature=0.7, seed=3, max_tokens=100)
    answer = llm.generate([prompt], how)[0].token_ids
    told = [*prompt, *answer, 1, 2, 3]
    table = llm.cache.open(told)
    assert len(table.pages) == (len(prompt) + len(answer) - 1) // PAGE_SIZE >= 1
    llm.cache.release(table)
    fresh = drafting_llm(name, options).generate([told], how)[0]
    again = llm.generate([told], how)[0]
    assert again.token_ids == fresh.token_ids
    assert again.stats.accepted == fresh.stats.accepted, "the drafter read other rows"


@pytest.mark.parametrize(
    "speculate",
    [
        {"model": "tiny:0"},
        {"model": "tiny:0", "depth": 4, "nodes": 12, "branch": 3},
        {"model": "tiny:1", "depth": 3, "nodes": 30, "branch": 8},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_model_drafts_on_the_device(
    speculate: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = [SamplingParams(temperature=temperature, seed=i, max_tokens=30 + 7 * i) for i in range(3)]
    plain = plain_answers(asked(3), how, context=300, characters=True)
    host, device = (tiny_llm(context=300, characters=True) for _ in range(2))
    for llm in (host, device):
        llm.use(tiny_draft({"method": "draft_model", **speculate}))
    by_host, by_device = host.generate(asked(3), how), burst_on_cpu(device, monkeypatch).generate(asked(3), how)
    assert [o.token_ids for o in by_device] == [o.token_ids for o in plain]
    assert list(map(story, by_device)) == list(map(story, by_host))
    if speculate == {"model": "tiny:0"}:
        assert all(o.stats.accepted_by_depth[-1] >= o.stats.steps - 3 for o in by_device), "its own draft was refused"


class HostReads(TorchDispatchMode):
    """Counts what makes a GPU wait for the host, or the host for a GPU."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and (kwargs or {}).get("device") not in (None, torch.device("cpu"))
        if self.counting and name in self.READS and (name != "_to_copy" or moved):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "options"), (TREES | MERGES | GROWN).items(), ids=str)
def test_nothing_is_asked_of_the_host_inside_a_round(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = burst_on_cpu(drafting_llm(name, options), monkeypatch)
    burst, reads = burst_of(llm), HostReads()
    of_tiles = attention.over_tiles

    def uncounted(*args: Any, **options: Any) -> Any:
        """The attention of this machine asks the host for everything; that of a GPU is captured without."""
        reads.counting = False
        made = of_tiles(*args, **options)
        reads.counting = True

        def attend(*rows: Any) -> torch.Tensor:
            reads.counting = False
            mixed = made(*rows)
            reads.counting = True
            return mixed

        return attend

    monkeypatch.setattr(attention, "over_tiles", uncounted)
    rounds = 0
    halves = burst.draft, burst.verify

    def counted(half: Any) -> Any:
        def run(*args: Any) -> None:
            nonlocal rounds
            rounds += 1
            with reads:
                half(*args)

        return run

    monkeypatch.setattr(burst, "draft", counted(halves[0]))
    monkeypatch.setattr(burst, "verify", counted(halves[1]))
    llm.generate(asked(3), SamplingParams(temperature=0.9, seed=1, max_tokens=30))
    assert rounds > 20 and reads.found == []
    with reads:
        assert torch.ones(3).sum().item() == 3
    assert reads.found == ["_local_scalar_dense"], "the count counts nothing"


def test_a_broken_loop_leaves_the_requests_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(drafting_llm("eagle3", TREES["eagle3"]), monkeypatch)
    wanted = plain_answers(asked(), SamplingParams(seed=2, max_tokens=30), context=300, characters=True)

    def broken(self: DeviceLoop, sampled: bool) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("slipstream.drafters.device.tree_loop.TreeLoop.draft", broken)
    given = llm.generate(asked(), SamplingParams(seed=2, max_tokens=30))
    assert [o.token_ids for o in given] == [o.token_ids for o in wanted]
    assert llm.burst is None
    assert llm.engine.draft_faults == 1


def test_a_loop_whose_numbers_are_not_finite_spoils_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(drafting_llm("eagle3", TREES["eagle3"]), monkeypatch)
    drafter: Any = llm.drafter
    monkeypatch.setattr(drafter, "judged", lambda hidden: torch.full((len(hidden), 61), float("nan")))
    how = SamplingParams(seed=2, max_tokens=30)
    wanted = plain_answers(asked(), how, context=300, characters=True)
    assert [o.token_ids for o in llm.generate(asked(), how)] == [o.token_ids for o in wanted]


def test_a_stream_gets_several_rounds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = burst_on_cpu(drafting_llm("medusa", TREES["medusa"]), monkeypatch)
    how = SamplingParams(temperature=0.9, seed=4, max_tokens=60)
    deltas = list(llm.stream([5, 6, 7], how))
    wanted = plain_answers([[5, 6, 7]], how, context=300, characters=True)[0]
    assert [t for d in deltas for t in d.token_ids] == wanted.token_ids
    assert max(len(d.token_ids) for d in deltas) >= TREE_ROUNDS


def test_what_cannot_be_done_in_one_shape_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(context=300, characters=True)
    monkeypatch.setattr(Decoder, "captures", True)
    llm.engine.set_runners()
    odd: list[dict[str, Any]] = [{"min_confidence": 0.1}, {"draw": "sample"}]
    for options in ({}, *odd):
        llm.use({"method": "eagle3", "checkpoint": str(random_head("eagle3")), "nodes": 16, **options})
        assert (llm.burst is not None) == (options == {}), options
    llm.use({"method": "mtp", "checkpoint": str(random_head("mtp", modules=2)), "nodes": 16})
    assert llm.burst is None
    assert tiny_llm(context=300, characters=True, verifier="rejection").engine.device is None


def test_the_trees_of_a_batch_share_the_rows_that_come_nearly_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "cheap_rows", 64)  # as on a GPU
    llm = tiny_llm(context=300, characters=True)
    llm.use({"method": "eagle3", "checkpoint": str(random_head("eagle3"))})
    drafter: Any = llm.drafter
    drafter.target.device = "cuda"  # all else that a plan asks for
    shapes = {lanes: (plan.nodes, plan.depth) for lanes in (1, 2, 4, 16, 64, 96) if (plan := drafter.plan_for(lanes))}
    assert shapes == {1: (63, 6), 2: (63, 6), 4: (31, 6), 16: (7, 4), 64: (3, 3), 96: (1, 2)}
    for options in ({"nodes": 20}, {"depth": 9}):
        drafter.target.device = "cpu"
        llm.use({"method": "eagle3", "checkpoint": str(random_head("eagle3")), **options})
        drafter = llm.drafter
        drafter.target.device = "cuda"
        plan = drafter.plan_for(16)
        assert {name: getattr(plan, name) for name in options} == options, "what is given holds"
