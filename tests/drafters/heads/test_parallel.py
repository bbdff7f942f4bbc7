"""`parallel`: it drafts as it was trained, and training improves it."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.drafters.growing.tree_growth import Growth
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Lesson
from slipstream.drafters.heads.head_drafter import frame_of, make_head
from slipstream.drafters.heads.parallel_head import ParallelHead, ParallelSettings
from slipstream.drafters.parallel import ParallelDrafter
from slipstream.errors import OptionError
from slipstream.train.teacher import Teacher
from tests.heads import random_head
from tests.stepping import stepped
from tests.tiny import plain_answers, tiny_llm

PROMPTS = [[7], [5, 9, 17, 3] * 13, list(range(90)), [8, 1, 30] * 44]
TAUGHT = [[(31 * i + 7 * j) % 97 for j in range(4)] for i in range(16)]  # prompts whose answers a head was trained on
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def speaking(place: Path, verifier: str = "match", **options: Any) -> LLM:
    speculate = {"method": "parallel", "checkpoint": str(place), **options}
    return tiny_llm(context=300, characters=True, speculate=speculate, verifier=verifier)


def parts(llm: LLM) -> tuple[ParallelDrafter, ParallelHead]:
    """The drafter, and its head as it is trained."""
    drafter = llm.drafter
    assert isinstance(drafter, ParallelDrafter)
    head = make_head(ParallelDrafter, drafter.trained.settings, frame_of(drafter.target, drafter.vocab))
    assert isinstance(head, ParallelHead)
    head.load_state_dict(drafter.trained.weights)
    return drafter, head


def lesson_of(llm: LLM, head: ParallelHead, texts: list[list[int]], prompt: int = 1) -> Lesson:
    lesson = Teacher(llm.model).lesson(
        torch.tensor(texts), torch.full((len(texts),), prompt), head.frame.vocab, head.taps
    )
    return replace(lesson, taps={layer: hidden.clone() for layer, hidden in lesson.taps.items()})


def changed(place: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same checkpoint with other weights."""
    other = Path(tempfile.mkdtemp(dir=place.parent)) / "parallel"
    head_checkpoint.save(other, replace(head_checkpoint.load(place), weights=weights))
    return other


GROWN: dict[str, Any] = {"block": 12, "layers": 3, "rank": 16, "inject": True, "confidence": True, "loss": "lk"}


@functools.cache
def scattered(**settings: Any) -> Path:
    """Weights that are random everywhere, those that begin at zero or at one too."""
    place = random_head("parallel", **settings)
    generator = torch.Generator().manual_seed(3)
    stored = head_checkpoint.load(place).weights
    return changed(
        place, {name: weight + 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in stored.items()}
    )


@functools.cache
def taught(**settings: Any) -> tuple[Path, Path]:
    """A head before and after a short training on what the tiny target answers."""
    before = random_head("parallel", vocabulary=0, **{"block": 5, "rank": 16, **settings})
    llm = speaking(before)
    _, head = parts(llm)
    texts = [p + o.token_ids for p, o in zip(TAUGHT, llm.generate(TAUGHT, GREEDY), strict=True)]
    lesson = lesson_of(llm, head, texts, prompt=4)
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for _ in range(60):
            optimiser.zero_grad()
            head.losses(lesson).total.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
    return before, changed(before, {name: weight.detach() for name, weight in head.state_dict().items()})


class Blocks:
    """Every block that a drafter makes, with the text before it and the tree made from it."""

    def __init__(self, drafter: ParallelDrafter, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], torch.Tensor, torch.Tensor, Growth]] = []
        healthy = drafter._catch_up

        def recording(growths: list[Growth]) -> list[torch.Tensor | None]:
            rows = healthy(growths)
            for growth in growths:
                if growth.fed:
                    logits, gates = growth.logits, growth.gates
                    self.seen.append((list(growth.sequence.tokens), logits.clone(), gates.clone(), growth))
            return rows

        patch.setattr(drafter, "_catch_up", recording)

    def behind(self, text: list[int]) -> list[tuple[int, torch.Tensor, torch.Tensor, Growth]]:
        """(root, logits, gates, growth) of the blocks that were made in this text."""
        return [(len(t) - 1, *rest) for t, *rest in self.seen if text[: len(t)] == t]  # type: ignore[misc]


@pytest.mark.parametrize("depth", [3, 12])
@pytest.mark.parametrize("settings", [{}, GROWN], ids=["", "grown"])
@pytest.mark.parametrize("kind", ["scattered", "taught"])
def test_a_block_has_the_logits_that_training_gives_it(
    kind: str, settings: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages, fed in pieces, several answers at once, after accepted and rejected drafts."""
    monkeypatch.setattr("slipstream.drafters.growing.catch_up.CHUNK", 50)
    place = scattered(**settings) if kind == "scattered" else taught(**settings)[1]
    llm = speaking(place, depth=depth, nodes=12, branch=3)
    drafter, head = parts(llm)
    blocks = Blocks(drafter, monkeypatch)
    asked = PROMPTS + TAUGHT[:3]
    outputs = llm.generate(asked, GREEDY)
    assert llm.engine.draft_faults == 0
    if kind == "taught":
        assert sum(o.stats.accepted for o in outputs) > 40
    for prompt, output in zip(asked, outputs, strict=True):
        text = prompt + output.token_ids
        made = blocks.behind(text)
        assert len(made) == output.stats.drafting_steps > 3
        with torch.no_grad():
            roots = torch.tensor([root for root, *_ in made])
            rows, behind = head.blocks(lesson_of(llm, head, [text]), roots)
            for number, (root, logits, gates, growth) in enumerate(made):
                hidden = torch.cat([rows[0, root, None], behind[0, number]])[: len(logits)]
                assert len(logits) == min(growth.plan.depth, head.settings.block)
                assert torch.allclose(logits, head.logits(hidden), atol=1e-4), root
                before = torch.arange(len(hidden)) * 3 % len(drafter.vocab)
                linked = (drafter._links[before] * gates) @ drafter._pull.T
                wanted = head.linked(hidden, head.frame.embed(drafter.vocab[before]))
                assert torch.allclose(linked, wanted, atol=1e-4), root


def path_probabilities(
    head: ParallelHead, hidden: torch.Tensor, path: list[int], temperature: float, *, sure: bool = False
) -> torch.Tensor:
    """The head's own distribution after a path below the root, from what the output rows read in the block; `sure`: of
    the target's first choice, if the head has learnt it.
    """
    row = hidden[len(path)]
    if sure and head.settings.confidence:
        temperature /= float((row @ head.sure).clamp(-2, 2).exp())
    logits = head.logits(row)
    if path:
        logits = logits + head.linked(row, head.frame.embed(torch.tensor(path[-1])))
    return torch.softmax(logits / temperature, -1)


def block_rows(llm: LLM, head: ParallelHead, text: list[int]) -> torch.Tensor:
    """What the output rows read in the block after the last token, [block, width], by the training path."""
    rows, behind = head.blocks(lesson_of(llm, head, [text]), torch.tensor([len(text) - 1]))
    return torch.cat([rows[0, -1:], behind[0, 0]])


@pytest.mark.parametrize(("verifier", "temperature"), [("match", 0.0), ("rejection", 0.8)])
@pytest.mark.parametrize("settings", [{}, GROWN], ids=["", "grown"])
def test_a_nodes_confidence_is_the_product_of_what_the_head_gives_to_its_path(
    verifier: str, temperature: float, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target takes its first choice, and where no noise is known by which it will choose."""
    llm = speaking(scattered(**settings), verifier, depth=4, nodes=14, branch=3, draw="top")
    drafter, head = parts(llm)
    blocks = Blocks(drafter, monkeypatch)
    llm.generate([PROMPTS[1]], SamplingParams(temperature=temperature, seed=2, max_tokens=8))
    place = {token: index for index, token in enumerate(drafter.vocab.tolist())}
    with torch.no_grad():
        for text, _, _, growth in blocks.seen[:3]:
            hidden, tree = block_rows(llm, head, text), growth.tree
            assert len(tree) == 15
            for node in range(1, len(tree)):
                path = tree.path_tokens(node)
                q = path_probabilities(head, hidden, path[:-1], temperature or 1.0, sure=temperature == 0.0)
                above = tree.confidence[tree.parents[node]]
                assert tree.confidence[node] == pytest.approx(above * float(q[place[path[-1]]]), rel=1e-3)
            likeliest = path_probabilities(head, hidden, [], 1.0).topk(3).indices
            firsts = [tree.tokens[child] for child in tree.children(0)]
            assert firsts == drafter.vocab[likeliest[: len(firsts)]].tolist()


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("settings", [{}, GROWN], ids=["", "grown"])
def test_sampled_nodes_are_drawn_from_the_heads_own_distribution(
    verifier: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = 1 if verifier == "block" else 2
    llm = speaking(scattered(**settings), verifier, depth=4, nodes=7, branch=branch)
    drafter, head = parts(llm)
    blocks = Blocks(drafter, monkeypatch)
    llm.generate([PROMPTS[1]], SamplingParams(temperature=0.8, seed=5, max_tokens=10))
    assert llm.engine.draft_faults == 0
    with torch.no_grad():
        for text, _, _, growth in blocks.seen[:3]:
            hidden, tree = block_rows(llm, head, text), growth.tree
            assert tree.depth > 1
            for node in range(1, len(tree)):
                draw = tree.draws[node]
                assert draw is not None
                wanted = path_probabilities(head, hidden, tree.path_tokens(node)[:-1], 0.8)
                assert torch.allclose(draw.q[drafter.vocab].float(), wanted, atol=1e-5)


def test_chosen_nodes_read_the_noise_that_the_target_will_read() -> None:
    """The same head, right as often as it is, coincides with a sampling target far above its mere probability."""
    place = taught()[1]
    how = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40) for seed in range(6)]
    asked = TAUGHT[:6]
    llm = speaking(place, depth=2, branch=1)
    with_noise = sum(o.stats.accepted for o in llm.generate(asked, how))
    llm = speaking(place, depth=2, branch=1)
    drafter = llm.drafter
    assert isinstance(drafter, ParallelDrafter)
    drafter._scores = lambda growth: growth.logits.float()  # type: ignore[method-assign]
    without = sum(o.stats.accepted for o in llm.generate(asked, how))
    assert with_noise > without


@pytest.mark.parametrize("settings", [{}, GROWN], ids=["", "grown"])
def test_training_makes_it_draft_better(settings: dict[str, Any]) -> None:
    """Tokens a step by real decoding, on answers that it was taught, of a chain and of a tree."""
    asked = TAUGHT[:12]
    plain = [o.token_ids for o in plain_answers(asked, GREEDY, context=300, characters=True)]
    for shape in ({"branch": 1}, {"branch": 3, "nodes": 10}):
        speeds = []
        for place in taught(**settings):
            outputs = speaking(place, **shape).generate(asked, GREEDY)
            assert [o.token_ids for o in outputs] == plain
            speeds.append(sum(o.stats.emitted for o in outputs) / sum(o.stats.steps for o in outputs))
        before, after = speeds
        assert before < 1.4 and after > 2.5, (shape, speeds)


@pytest.mark.parametrize("settings", [{}, GROWN], ids=["", "grown"])
def test_rows_of_guesses_are_never_taken_for_known_ones(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until `observe`, which an answer that ends does not reach: its pages are shared all the same. Neither
    is the root's own row, if known tokens have rows from the target's hidden states.
    """
    llm = speaking(random_head("parallel", **settings))
    drafter, known = llm.drafter, []
    healthy = drafter.propose

    def recording(requests: Any) -> Any:
        trees = healthy(requests)
        known.extend((request.sequence.table.lengths["parallel"], len(request.sequence.tokens)) for request in requests)
        return trees

    monkeypatch.setattr(drafter, "propose", recording)
    llm.generate([PROMPTS[1]], GREEDY)
    assert known[0] == (0, 52), "the prompt has not been through the target yet"
    assert len(known) > 30 and all(rows == tokens - bool(settings) for rows, tokens in known[1:])


def test_a_big_tree_comes_from_one_pass_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speaking(scattered(**GROWN), depth=12, nodes=63, branch=8)
    drafter, head = parts(llm)
    passes = []
    healthy = drafter._read
    monkeypatch.setattr(drafter, "_read", lambda segments: passes.append(1) or healthy(segments))  # type: ignore[func-returns-value]
    (output,) = llm.generate([PROMPTS[1]], replace(GREEDY, max_tokens=20))
    assert len(passes) == output.stats.drafting_steps
    trees = [tree for delta in stepped(llm, PROMPTS[1], GREEDY, trace=True) for tree in delta.trees if tree is not None]
    assert max(len(tree) for tree in trees) == 64 and head.settings.block == 12
    chain = speaking(scattered(**GROWN), branch=1)
    trees = [tree for delta in stepped(chain, [3, 1], GREEDY, trace=True) for tree in delta.trees if tree is not None]
    assert max(tree.depth for tree in trees) == 12, "as deep as the block, if nobody says anything else"


def test_a_checkpoint_from_before_the_newer_settings_drafts_the_same(tmp_path: Path) -> None:
    place = scattered()
    description = json.loads((place / head_checkpoint.DESCRIPTION).read_text())
    older = {"block", "layers", "rank", "anchors", "decay", "mlp", "vocabulary"}
    assert older < description["settings"].keys()
    description["settings"] = {name: description["settings"][name] for name in older}
    shutil.copytree(place, tmp_path / "old")
    (tmp_path / "old" / head_checkpoint.DESCRIPTION).write_text(json.dumps(description))
    drafts = []
    for checkpoint in (place, tmp_path / "old"):
        deltas = stepped(speaking(checkpoint, nodes=20, branch=3), PROMPTS[1], GREEDY, trace=True)
        trees = [tree for delta in deltas for tree in delta.trees if tree is not None]
        drafts.append([(tree.tokens, tree.parents, tree.confidence) for tree in trees])
    assert drafts[0] == drafts[1] and len(drafts[0]) > 20
    _, head = parts(speaking(tmp_path / "old"))
    assert head.taps == (0, 1) and not head.settings.inject


def test_a_block_is_no_deeper_than_it_was_trained() -> None:
    llm = speaking(random_head("parallel", block=3), depth=9, nodes=9, branch=1)
    trees = [tree for delta in stepped(llm, [3, 1, 4], GREEDY, trace=True) for tree in delta.trees]
    assert max(tree.depth for tree in trees if tree is not None) == 3


# -- learning ---------------------------------------------------------------------------------------------------------


def linked_lesson(head: ParallelHead, texts: int = 16, length: int = 24) -> Lesson:
    """Texts in which every second token is random, and the next one depends on it alone."""
    generator = torch.Generator().manual_seed(0)
    count = len(head.frame.vocab)
    indices = torch.randint(count, (texts, length), generator=generator)
    indices[:, 1::2] = (indices[:, : length // 2 * 2 : 2] * 5 + 3) % count
    follows = torch.nn.functional.one_hot((indices * 5 + 3) % count, count).float()
    follows[:, 1::2] = 1.0 / count
    best = follows.argmax(-1)
    best[:, 1::2] = -1
    taps = {layer: torch.zeros(texts, length, head.frame.config.hidden_size) for layer in head.taps}
    learn = torch.ones(texts, length, dtype=torch.bool)
    learn[:, -1] = False
    return Lesson(head.frame.vocab[indices], learn, taps, follows, best)


def fresh(**settings: Any) -> ParallelHead:
    _, head = parts(speaking(random_head("parallel", **settings)))
    return head


def test_what_follows_from_the_token_before_is_learnt_by_the_link() -> None:
    """No row can know it: at depth 1 the token before is not there yet. Half of the rows can be right."""
    head = fresh(vocabulary=16, block=2, rank=16, anchors=1.0)
    lesson = linked_lesson(head)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    before = head.losses(lesson).accuracy
    for _ in range(60):
        optimiser.zero_grad()
        head.losses(lesson).total.backward()
        optimiser.step()
    after = head.losses(lesson).accuracy
    assert before[1] < 0.2 and after[1] > 0.4, (before, after)
    with torch.no_grad():
        head.pull.weight.zero_()
        assert head.losses(lesson).accuracy[1] < 0.25, "without links the rows know nothing of it"


def test_every_weight_learns_and_the_draw_of_anchors_can_be_had_again() -> None:
    head = fresh(vocabulary=20, block=4)
    lesson = linked_lesson(head)
    totals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        totals.append(head.losses(lesson).total)
    assert totals[0] == totals[1] != totals[2]
    assert head.losses(lesson).accuracy.shape == (4,)
    totals[0].backward()  # type: ignore[no-untyped-call]
    silent = {name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()}
    assert silent == {"fuse.weight"}, "its inputs are zeros in this lesson"


def test_the_loss_is_that_of_blocks_which_end_where_the_text_is_not_the_targets() -> None:
    """Computed block by block; the content of rows that are not learnt from does not count."""
    head = fresh(vocabulary=20, block=4, anchors=1.0)
    lesson = linked_lesson(head, texts=5)
    for foreign in ((slice(None), slice(9)), (3, slice(None)), (slice(None), 14)):
        lesson.learn[foreign] = False
    lesson.probabilities[~lesson.learn] = 0.5
    wanted = torch.zeros(())
    with torch.no_grad():
        text, behind = head.blocks(lesson, torch.arange(1, 24))
        for depth in range(4):
            reached = [
                (row, a) for row in range(5) for a in range(1, 24 - depth) if lesson.learn[row, a : a + depth + 1].all()
            ]
            for row, anchor in reached:
                place = anchor + depth
                hidden = behind[row, anchor - 1, depth - 1] if depth else text[row, anchor]
                guesses = [(1.0, head.logits(hidden))]
                if depth:
                    linked = head.linked(hidden, head.frame.embed(lesson.tokens[row, place]))
                    guesses = [(1.0, guesses[0][1] + linked), (0.3, guesses[0][1])]
                for weight, logits in guesses:
                    missed = -(lesson.probabilities[row, place] * logits.log_softmax(-1)).sum()
                    wanted += 0.9**depth * weight * missed / len(reached)
        assert float(head.losses(lesson).total) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_texts_shorter_than_a_block_are_no_trouble(length: int) -> None:
    head = fresh(vocabulary=20, block=8)
    losses = head.losses(linked_lesson(head, texts=2, length=length))
    assert losses.total.isfinite() and losses.accuracy.shape == (8,)
    assert not losses.accuracy[length:].any()


@pytest.mark.parametrize(
    "bad", [{"block": 0}, {"layers": 0}, {"rank": 0}, {"anchors": 0.0}, {"decay": 1.5}, {"mlp": -1}]
)
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        ParallelSettings(**bad)
