"""`mtp`: its modules draft as they were trained, for one module and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cache import PAGE_SIZE
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_drafter import frame_of, make_head, settings_of
from slipstream.drafters.mtp import MtpDrafter, MtpHead, MtpSettings
from slipstream.errors import OptionError
from slipstream.train.teacher import Teacher
from tests.heads import made_for, random_head
from tests.stepping import stepped
from tests.tiny import tiny_llm

Seen = list[tuple[list[int], list[int], torch.Tensor]]  # a text up to the root, a path below it, logits after that

MODULES = pytest.mark.parametrize("modules", [1, 4])


def drafting(modules: int, **options: Any) -> LLM:
    settings = {"depth": 5, "nodes": 15, "branch": 3, **options}
    place = str(random_head("mtp", modules=modules))
    return tiny_llm(context=300, characters=True, speculate={"method": "mtp", "checkpoint": place, **settings})


def drafter_of(llm: LLM) -> MtpDrafter:
    assert isinstance(llm.drafter, MtpDrafter)
    return llm.drafter


def recorded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The logits of all nodes of all trees that are grown from now on."""
    drafter, seen = drafter_of(llm), Seen()
    healthy = drafter._add_level

    def recording(growth: Any, logits: torch.Tensor, level: int) -> None:
        nodes = range(growth.fed - len(logits), growth.fed)
        for node, row in zip(nodes, logits, strict=True):
            seen.append((list(growth.sequence.tokens), growth.tree.path_tokens(node), row.clone()))
        healthy(growth, logits, level)

    monkeypatch.setattr(drafter, "_add_level", recording)
    return seen


def compare(llm: LLM, seen: Seen, most: int = 24) -> None:
    """Nodes have the logits that the training path gives them."""
    drafter = drafter_of(llm)
    head = make_head(MtpDrafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
    assert isinstance(head, MtpHead)
    head.load_state_dict(drafter.trained.weights)
    teacher = Teacher(llm.model)
    depths = set()
    for text, path, row in seen[:: max(1, len(seen) // most)]:
        tokens = torch.tensor([text + path])
        taps = teacher.lesson(tokens, torch.tensor([1]), drafter.vocab, head.taps).taps
        with torch.no_grad():
            levels = [head.logits(hidden) for hidden in head.levels(tokens, taps)]
        assert torch.allclose(row, levels[len(path)][0, -1], atol=1e-4), (len(text), path)
        depths.add(len(path))
    assert depths == set(range(drafter.options.depth))


@MODULES
@pytest.mark.parametrize("branch", [1, 3])
def test_a_node_has_the_logits_that_training_gives_it(
    modules: int, branch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages, level by level, several texts at once, after accepted and rejected drafts."""
    llm = drafting(modules, branch=branch)
    seen = recorded(llm, monkeypatch)
    prompts = [[5, 9, 17, 3] * 31, [44], [7, 8] * 64]
    outputs = llm.generate(prompts, SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True))
    assert llm.engine.draft_faults == 0
    assert 0 < sum(output.stats.accepted for output in outputs) < sum(output.stats.drafted for output in outputs)
    compare(llm, seen)


@MODULES
def test_a_prefix_that_another_request_left_is_not_read_again(modules: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(modules)
    how = SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5] * 30
    llm.generate([prompt], how)
    drafter, passes = drafter_of(llm), list[int]()
    healthy = drafter._pass

    def counting(segments: Any, hidden: torch.Tensor) -> Any:
        passes.append(len(hidden))
        return healthy(segments, hidden)

    monkeypatch.setattr(drafter, "_pass", counting)
    seen = recorded(llm, monkeypatch)
    llm.generate([[*prompt, 9, 2, 6]], how)
    assert passes[0] == len(prompt) + 4 - PAGE_SIZE  # the first word of the answer is the first root
    compare(llm, seen)


@MODULES
def test_a_prefix_without_hidden_states_is_read_again(modules: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(modules)
    prompt = [2, 7, 1, 8] * 40
    how = SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True)
    spec = {"method": "mtp", "checkpoint": str(random_head("mtp", modules=modules)), "depth": 5, "branch": 3}
    monkeypatch.setattr(llm.cache, "forget_idle", lambda: None)  # as if a request had continued without drafts
    llm.use(None)
    (plain,) = llm.generate([prompt], how)
    llm.use(spec)
    seen = recorded(llm, monkeypatch)
    (output,) = llm.generate([prompt], how)
    assert output.token_ids == plain.token_ids and llm.engine.draft_faults == 0
    compare(llm, seen)


@MODULES
def test_a_proposal_that_broke_is_made_again(modules: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(modules)
    drafter, calls = drafter_of(llm), 0
    healthy = drafter._run

    def failing(growths: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if len(growths) > 1 and calls > 3:  # then the engine asks for each alone
            raise RuntimeError("too many at once")
        return healthy(growths)

    monkeypatch.setattr(drafter, "_run", failing)
    seen = recorded(llm, monkeypatch)
    prompts = [[5, 9, 17, 3] * 31, [44, 45, 46]]
    llm.generate(prompts, SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))
    assert calls > 4 and llm.engine.draft_faults == 0
    compare(llm, seen)


@MODULES
def test_tokens_that_are_taken_back_are_forgotten(modules: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(modules)
    stream = stepped(llm, [3, 1, 4, 1, 5] * 4, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
    for _ in range(4):
        next(stream)
    (sequence,) = llm.engine.scheduler.running
    lengths, drafter = sequence.table.lengths, drafter_of(llm)
    stores = [name for name in ("mtp", "mtp.outputs") if name in lengths]
    assert len(stores) == (1 if modules == 1 else 2)
    assert {lengths[name] for name in stores} == {lengths["mtp"]} and lengths["mtp"] > 20
    drafter.rollback(sequence, 21)
    assert {lengths[name] for name in stores} == {21}
    seen = recorded(llm, monkeypatch)
    for _ in stream:
        pass
    assert llm.engine.draft_faults == 0
    compare(llm, seen)


@MODULES
@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_sampled_trees_follow_the_logits_too(modules: int, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(random_head("mtp", modules=modules))
    speculate = {"method": "mtp", "checkpoint": place, "depth": 3, "nodes": 9, "branch": 2}
    llm = tiny_llm(context=300, characters=True, speculate=speculate, verifier=verifier)
    seen = recorded(llm, monkeypatch)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True))
    assert llm.engine.draft_faults == 0 and output.stats.accepted > 0
    narrow = [(text, path, row[drafter_of(llm).vocab] if len(row) == 97 else row) for text, path, row in seen]
    compare(llm, narrow)


@MODULES
def test_training_makes_its_guesses_right(modules: int, tmp_path: Path) -> None:
    """What it learnt of a few texts by heart comes out again when the engine decodes them."""
    llm = tiny_llm(context=300, characters=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    chooser = torch.Generator().manual_seed(0)
    prompts = torch.randint(97, (12, 6), generator=chooser).tolist()
    answers = [output.token_ids for output in llm.generate(prompts, greedy)]
    tokens = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    view, made = made_for(llm)
    settings = MtpSettings(vocabulary=0, modules=modules, unroll=4)
    vocab = torch.arange(97)
    torch.manual_seed(0)
    head = make_head(MtpDrafter, settings_of(settings), frame_of(view, vocab))
    lesson = Teacher(llm.model).lesson(tokens, torch.full((12,), 6), vocab, head.taps)

    def tokens_per_step() -> float:
        weights = {name: weight.detach().clone() for name, weight in head.state_dict().items()}
        place = tmp_path / "mtp"
        head_checkpoint.save(place, head_checkpoint.Trained("mtp", settings_of(settings), made, vocab, weights), bits=8)
        llm.use({"method": "mtp", "checkpoint": str(place), "depth": 4, "branch": 1})
        outputs = llm.generate(prompts, greedy)
        assert [output.token_ids for output in outputs] == answers
        return sum(o.stats.emitted for o in outputs) / sum(o.stats.steps for o in outputs)

    before = tokens_per_step()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(45):
        result = head.losses(lesson)
        optimizer.zero_grad()
        result.total.backward()
        if not losses:
            assert all(weight.grad is not None and weight.grad.any() for weight in head.parameters())
        optimizer.step()
        losses.append(result)
    assert losses[0].accuracy.shape == (4,)
    assert losses[-1].total < 0.5 * losses[0].total
    assert (losses[-1].accuracy > losses[0].accuracy + 0.3).all()
    after = tokens_per_step()
    assert before < 1.3 and after > 2.5


def test_a_lesson_too_short_for_a_level_teaches_nothing_there() -> None:
    llm = tiny_llm(context=300, characters=True)
    view, _ = made_for(llm)
    head = make_head(MtpDrafter, settings_of(MtpSettings(unroll=6)), frame_of(view, torch.arange(97)))
    lesson = Teacher(llm.model).lesson(torch.tensor([[1, 2, 3, 4]]), torch.tensor([1]), torch.arange(97), head.taps)
    result = head.losses(lesson)
    assert torch.isfinite(result.total) and result.total > 0
    assert torch.equal(result.accuracy[2:], torch.zeros(4))


@pytest.mark.parametrize(
    "settings", [{"modules": 0}, {"modules": 3, "unroll": 2}, {"decay": 0.0}, {"decay": 1.5}, {"mlp": -1}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is out of range"):
        MtpSettings(**settings)
