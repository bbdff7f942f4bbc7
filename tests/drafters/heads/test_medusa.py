"""`medusa`: it drafts as it was trained, its trees have the right shape, and training improves it."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, noise
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.growing.static_tree import StaticTree
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Lesson
from slipstream.drafters.heads.head_drafter import frame_of, make_head, settings_of
from slipstream.drafters.heads.medusa_head import MedusaHead, MedusaSettings
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.errors import CorruptFile, OptionError
from slipstream.train.teacher import Teacher
from slipstream.tree import TokenTree
from slipstream.types import Plan
from tests.engine.test_engine_statistics import p_value
from tests.heads import made_for
from tests.stepping import stepped
from tests.tiny import tiny_directory, tiny_llm

PROMPTS = [[5, 9, 17, 3] * 34, [1, 2], [40, 41, 60, 7, 7], list(range(20, 90))]


def fresh(llm: LLM, vocabulary: int = 61, **settings: Any) -> MedusaHead:
    """Heads that say different things: those that training begins with all say what the target says of the root."""
    size = llm.model.config.vocab_size
    torch.manual_seed(3)
    vocab = torch.randperm(size)[:vocabulary].sort().values
    shaped = MedusaSettings(vocabulary=vocabulary, **settings)
    head = make_head(MedusaDrafter, settings_of(shaped), frame_of(made_for(llm)[0], vocab))
    assert isinstance(head, MedusaHead)
    torch.nn.init.normal_(head.leave, std=0.2)
    return head


def saved(llm: LLM, head: MedusaHead, **figures: Any) -> str:
    place = Path(tempfile.mkdtemp()) / "medusa"
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    made, settings = made_for(llm)[1], settings_of(head.settings)
    kept = head_checkpoint.Trained("medusa", settings, made, head.frame.vocab, weights, figures=figures)
    head_checkpoint.save(place, kept)
    return str(place)


def lesson(llm: LLM, head: MedusaHead, texts: Seq[Seq[int]], prompt: int) -> Lesson:
    lengths = torch.tensor([len(text) for text in texts])
    tokens = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    prompts = torch.full_like(lengths, prompt)
    return Teacher(llm.model).lesson(tokens, prompts, head.frame.vocab, head.taps, lengths)


def trained_logits(llm: LLM, head: MedusaHead, text: list[int]) -> torch.Tensor:
    """[heads, draft tokens]: what the training path says at the row before the last token, the root."""
    at, asked = slice(len(text) - 2, len(text) - 1), lesson(llm, head, [text], 1)
    with torch.no_grad():
        guesses = [head.guess(head.states(asked, depth)[0, at], depth) for depth in range(head.settings.heads)]
    return torch.cat(guesses)


@pytest.mark.parametrize(
    ("tree", "verifier", "root"),
    [
        ("static", "match", False),
        ("dynamic", "match", True),
        ("static", "rejection", True),
        ("dynamic", "rejection", False),
    ],
)
def test_a_depth_has_the_logits_that_training_gives_it(
    tree: str, verifier: str, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After accepted and rejected drafts, alone and in a batch."""
    llm = tiny_llm(verifier=verifier)
    head = fresh(llm, heads=4, root=root)
    llm.use(f"medusa:checkpoint={saved(llm, head)},nodes=40,tree={tree}")
    drafter = llm.drafter
    assert isinstance(drafter, MedusaDrafter)
    seen: list[tuple[list[int], torch.Tensor]] = []
    healthy = drafter._offer

    def recording(growth: Growth) -> TokenTree:
        if growth.logits is not None:
            seen.append((list(growth.sequence.tokens), growth.logits))
        return healthy(growth)

    monkeypatch.setattr(drafter, "_offer", recording)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.0, seed=4, max_tokens=25, ignore_eos=True))
    assert llm.engine.draft_faults == 0 and sum(output.stats.accepted for output in outputs) > 5
    assert len(seen) > 40
    for text, logits in seen:
        assert torch.allclose(logits, trained_logits(llm, head, text)[: len(logits)], atol=1e-4)


def test_nothing_is_drafted_before_a_hidden_state_is_there() -> None:
    llm = tiny_llm()
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm))}")
    for prompt in (PROMPTS[0], PROMPTS[0]):  # the second time its pages are in the cache
        (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        # The first token, and one after which nothing is left to draft.
        assert output.stats.steps - 2 <= output.stats.drafting_steps < output.stats.steps


def test_only_the_hidden_state_before_the_root_serves() -> None:
    """After tokens that the target has not read nothing is drafted."""
    llm = tiny_llm()
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm))}")
    drafter, plan = llm.drafter, Plan(3, 6, 3)
    stream = stepped(llm, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    next(stream)
    (sequence,) = llm.engine.scheduler.running
    with torch.inference_mode():
        (before,) = drafter.propose([DraftRequest(sequence, plan)])
        shadow = sequence.shadow(None)
        shadow.tokens.extend([8, 9])
        assert len(drafter.propose([DraftRequest(shadow, plan)])[0]) == 1
        (after,) = drafter.propose([DraftRequest(sequence, plan)])
    assert before.tokens == after.tokens and len(after) == 7
    stream.close()  # type: ignore[attr-defined]


# -- trees ------------------------------------------------------------------------------------------------------------


def first_growth(llm: LLM, monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> tuple[Growth, TokenTree]:
    """The first draft of an answer: what it was made of, and what was offered."""
    drafter = llm.drafter
    assert isinstance(drafter, MedusaDrafter)
    kept: list[tuple[Growth, TokenTree]] = []
    healthy = drafter._offer

    def recording(growth: Growth) -> TokenTree:
        tree = healthy(growth)
        if growth.logits is not None:
            kept.append((replace(growth), tree))
        return tree

    monkeypatch.setattr(drafter, "_offer", recording)
    llm.generate([[1, 2, 3]], params)
    return kept[0]


def test_the_static_tree_is_that_of_the_measured_accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    accuracies = [[0.1, 0.6, 0.2], [0.5, 0.3, 0.1]]
    place = saved(llm, fresh(llm, heads=2), accuracies=accuracies)
    llm.use(f"medusa:checkpoint={place},nodes=5,tree=static")
    growth, tree = first_growth(llm, monkeypatch, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert growth.logits is not None
    ranked = [growth_row.argsort(descending=True) for growth_row in growth.logits]
    vocab = llm.drafter.vocab  # type: ignore[attr-defined]
    odds = torch.softmax(growth.logits, -1)
    shape = StaticTree.best(accuracies, 5, 10).nodes
    assert [rank for _, rank, _ in shape] == [1, 0, 2, 1, 0]
    assert tree.parents[1:] == [parent for parent, _, _ in shape]
    for node, (_, rank, _) in enumerate(shape, 1):
        assert tree.tokens[node] == vocab[ranked[tree.depths[node] - 1][rank]]
        joint = 1.0
        for above in tree.path(node):
            depth = tree.depths[above] - 1
            joint *= float(odds[depth, ranked[depth][shape[above - 1][1]]])
        assert tree.confidence[node] == pytest.approx(joint, rel=1e-4)


def test_the_dynamic_tree_holds_the_likeliest_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm, heads=3))},nodes=9,branch=4,tree=dynamic")
    growth, tree = first_growth(llm, monkeypatch, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert growth.logits is not None
    top = torch.softmax(growth.logits, -1).topk(4).values.tolist()
    every = [np.prod(path) for depth in (1, 2, 3) for path in itertools.product(*top[:depth])]
    assert sorted(tree.confidence[1:], reverse=True) == pytest.approx(sorted(every, reverse=True)[:9], rel=1e-4)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_when_sampling_the_noise_of_the_target_is_counted_in(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm, heads=3))},nodes=3,branch=1,tree={tree}")
    growth, offer = first_growth(llm, monkeypatch, SamplingParams(temperature=0.7, seed=5, max_tokens=9))
    assert growth.logits is not None
    vocab = llm.drafter.vocab  # type: ignore[attr-defined]
    for depth, row in enumerate(growth.logits):
        key = noise.key(5, 0, 4 + depth, noise.MATCH)  # three tokens of the prompt and the root come before
        assert offer.tokens[1 + depth] == vocab[(row / 0.7 + noise.gumbel(key, vocab)).argmax()]


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_paths_end_below_the_confidence(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    place = saved(llm, fresh(llm, heads=4))
    how = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    offers = {}
    for least in (0.0, 0.05):
        llm.use(f"medusa:checkpoint={place},nodes=60,min_confidence={least},tree={tree}")
        _, offers[least] = first_growth(llm, monkeypatch, how)
    kept = [odd for odd in offers[0.0].confidence if odd >= 0.05]
    assert sorted(offers[0.05].confidence) == pytest.approx(sorted(kept))
    assert 1 < len(kept) < len(offers[0.0])


def test_there_are_no_more_levels_than_heads() -> None:
    llm = tiny_llm()
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm, heads=2))},depth=9,nodes=30")
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.8, seed=1, max_tokens=30))
    assert len(output.stats.offered_by_depth) == 2 and output.stats.draft_faults == 0


def test_sampled_trees_have_the_static_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(verifier="traversal")
    accuracies = [[0.5, 0.3, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]
    llm.use(f"medusa:checkpoint={saved(llm, fresh(llm, heads=3), accuracies=accuracies)},nodes=9,tree=dynamic")
    growth, tree = first_growth(llm, monkeypatch, SamplingParams(temperature=1.0, seed=2, max_tokens=9))
    assert growth.sampled and growth.logits is not None and len(tree) == 10
    shape = StaticTree.best(accuracies, 9, 10)
    places = {0: ()} | {
        node: tuple(tree.children(tree.parents[above]).index(above) for above in tree.path(node))
        for node in range(1, len(tree))
    }
    assert {places[node]: len(tree.children(node)) for node in places if tree.children(node)} == shape.widths
    vocab = llm.drafter.vocab  # type: ignore[attr-defined]
    for node in range(1, len(tree)):
        draw = tree.draws[node]
        assert draw is not None
        q = torch.softmax(growth.logits[tree.depths[node] - 1].double(), -1)
        assert torch.allclose(draw.q[vocab], q, atol=1e-6) and float(draw.q.sum()) == pytest.approx(1.0)


def test_under_rejection_answers_follow_the_targets_distribution() -> None:
    """Four tokens: the first comes plain, and after it drafts have two levels."""
    folder = tiny_directory(0, 6, layers=1, context=128, sharpness=1.0)
    target = LLM(folder, speculate=None, verifier="rejection", max_num_seqs=64, cache_tokens=72 * 128)
    prefixes = [p for length in range(4) for p in itertools.product(range(6), repeat=length)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=6)
    following = {}
    for prefix, output in zip(prefixes, target.generate([[1, 2, *p] for p in prefixes], params), strict=True):
        assert output.logprobs is not None
        following[prefix] = {token: float(np.exp(found.logprob)) for token, found in output.logprobs[0].items()}
    exact = {
        answer: float(np.prod([following[answer[:i]][answer[i]] for i in range(4)]))
        for answer in itertools.product(range(6), repeat=4)
    }
    target.use(f"medusa:checkpoint={saved(target, fresh(target, 4, heads=2))},nodes=4,branch=2")
    counts: Counter[tuple[int, ...]] = Counter()
    accepted: Counter[int] = Counter()
    for seed in range(5):
        how = SamplingParams(n=500, seed=seed, max_tokens=4, ignore_eos=True)
        for completion in target.generate([[1, 2]], how)[0].outputs:
            counts[tuple(completion.token_ids)] += 1
            accepted[completion.stats.accepted] += 1
    assert min(accepted[0], accepted[1], accepted[2]) > 100, "every outcome must be in what is tested"
    assert p_value(counts, exact) > 1e-4
    flatter = {answer: odds**0.8 for answer, odds in exact.items()}
    assert p_value(counts, {a: odds / sum(flatter.values()) for a, odds in flatter.items()}) < 1e-6


# -- learning ---------------------------------------------------------------------------------------------------------


def test_the_lesson_of_a_head_is_the_row_that_speaks_of_its_token() -> None:
    llm = tiny_llm()
    head = fresh(llm, heads=3, decay=0.5)
    taught = lesson(llm, head, [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4]], prompt=2)
    with torch.no_grad():
        losses, hidden = head.losses(taught), head.states(taught, 0)
    total = 0.0
    for depth in range(3):
        missed = []
        for text, row in taught.learn.nonzero().tolist():
            if row - depth - 1 < 0:
                continue
            with torch.no_grad():
                logits = head.guess(hidden[text, row - depth - 1][None], depth)[0]
            p = taught.probabilities[text, row]
            missed.append(float((p * (torch.logsumexp(logits, 0) - logits)).sum()))
        total += 0.5**depth * sum(missed) / len(missed)
    assert float(losses.total) == pytest.approx(total, rel=1e-4)
    assert losses.accuracy.shape == (3,)


def test_texts_too_short_for_a_head_teach_it_nothing() -> None:
    llm = tiny_llm()
    head = fresh(llm, heads=4)
    losses = head.losses(lesson(llm, head, [[5, 6, 7]], prompt=1))
    assert torch.isfinite(losses.total) and losses.accuracy[2:].tolist() == [0.0, 0.0]
    assert head.facts([lesson(llm, head, [[5, 6]], prompt=1)]) == {}, "nothing counted is not the same as never right"
    losses.total.backward()
    assert head.leave.grad is not None and torch.isfinite(head.leave.grad).all()


def test_accuracies_are_counted_where_the_heads_above_were_right() -> None:
    llm = tiny_llm()
    head = fresh(llm, heads=3)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, greedy(llm, 20), strict=True)]
    taught = [lesson(llm, head, [text], prompt=len(text) - 20) for text in texts]
    teach(head, taught, 10)
    found = head.facts(taught)["accuracies"]
    right, asked = np.zeros((3, 10)), np.zeros(3)
    for text in texts:
        hidden = head.states(lesson(llm, head, [text], 1), 0)[0]
        for row in range(len(text) - 22, len(text) - 2):  # the root is in the answer, or the last of the prompt
            for depth in range(3):
                if row + depth + 2 >= len(text):
                    break
                with torch.no_grad():
                    choices = head.frame.vocab[head.guess(hidden[row][None], depth)[0].topk(10).indices].tolist()
                asked[depth] += 1
                if text[row + depth + 2] not in choices:
                    break
                right[depth, choices.index(text[row + depth + 2])] += 1
    assert right[2].sum() > 3 and asked[0] > asked[1] > asked[2]
    assert np.array(found) == pytest.approx(right / asked[:, None], abs=1e-4)


def greedy(llm: LLM, length: int) -> list[list[int]]:
    llm.use(None)
    how = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [output.token_ids for output in llm.generate(PROMPTS, how)]


def teach(head: MedusaHead, lessons: list[Lesson], steps: int) -> list[float]:
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        total = torch.stack([head.losses(part).total for part in lessons]).mean()
        total.backward()
        optimiser.step()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_training_raises_the_tokens_per_step(tree: str) -> None:
    llm = tiny_llm()
    answers = greedy(llm, 60)
    head = fresh(llm, vocabulary=97)
    taught = [
        lesson(llm, head, [[*prompt, *answer]], len(prompt)) for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]

    def tokens_per_step(**figures: Any) -> float:
        llm.use(f"medusa:checkpoint={saved(llm, head, **figures)},nodes=8,tree={tree}")
        how = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate(PROMPTS, how)
        assert [output.token_ids for output in outputs] == answers and llm.engine.draft_faults == 0
        return sum(o.stats.emitted for o in outputs) / sum(o.stats.steps for o in outputs)

    before = tokens_per_step()
    losses = teach(head, taught, 40)
    after = tokens_per_step(**head.facts(taught))
    assert losses[-1] < 0.5 * losses[0]
    assert before < 2.0 and after > before + 1.5


def test_a_new_head_says_what_the_target_says_of_the_root() -> None:
    """The residual begins at zero: this is what makes the target's own rows fit."""
    llm = tiny_llm()
    head = fresh(llm, vocabulary=97)
    torch.nn.init.zeros_(head.leave)
    taught = lesson(llm, head, [[5, 6, 7, 8, 9]], 1)
    with torch.no_grad():
        said = torch.softmax(head.guess(head.states(taught, 1)[0], 1), -1)
    assert torch.allclose(said[:4], taught.probabilities[0, :4], atol=1e-4)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused() -> None:
    llm = tiny_llm()
    with pytest.raises(OptionError, match="heads=0"):
        MedusaSettings(heads=0)
    with pytest.raises(OptionError, match="decay=0"):
        MedusaSettings(decay=0.0)
    with pytest.raises(OptionError, match=r"tree='wide'.*dynamic, static"):
        llm.use("medusa:tree=wide")
    place = saved(llm, fresh(llm, heads=3), accuracies=[[0.5]])
    with pytest.raises(CorruptFile, match="accuracies of 1 heads, but 3 heads"):
        llm.use(f"medusa:checkpoint={place}")
