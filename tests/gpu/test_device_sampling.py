"""Choices of many rows at once: the same, bit for bit, as asking for one after the other."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream import SamplingParams, noise
from slipstream.gpu.device_sampling import RowCuts, _draw, choose_rows, choose_trees
from slipstream.sampling import Sampler, TreeDistributions
from slipstream.tree import TokenTree
from tests.interpreted import DEVICE
from tests.models.test_exact import random_tree

VOCABULARY = 1000


def sampler(chooser: random.Random, **params: object) -> Sampler:
    prompt = [1] * chooser.randrange(1, 5000)
    output = [2] * chooser.randrange(500)
    seed = chooser.choice([chooser.randrange(2**64), -chooser.randrange(2**63), 0, 7])
    how = SamplingParams(**{"temperature": chooser.choice([0.0, 1e-6, 0.3, 0.7, 1.0, 2.5]), **params})  # type: ignore[arg-type]
    return Sampler(how, seed, chooser.randrange(4), prompt, output, [])


def test_keys_fold_on_the_device_as_on_the_host() -> None:
    chooser = random.Random(1)
    parts = [tuple(chooser.randrange(2**60) for _ in range(4)) for _ in range(300)]
    keys = noise.halves([noise.key(*p[:2]) for p in parts])
    folded = noise.fold(noise.fold(keys, torch.tensor([p[2] for p in parts])), torch.tensor([p[3] for p in parts]))
    assert torch.equal(folded, noise.halves([noise.key(*p) for p in parts]))
    assert torch.equal(noise.fold(keys, 5), noise.halves([noise.key(*p[:2], 5) for p in parts]))


def test_noise_of_many_keys_is_the_noise_of_each() -> None:
    keys = [noise.key(seed, 3) for seed in range(20)]
    rows = noise.gumbel_rows(noise.halves(keys), VOCABULARY)
    assert torch.equal(rows, torch.stack([noise.gumbel(k, VOCABULARY) for k in keys]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_chosen_as_the_samplers_choose(dtype: torch.dtype) -> None:
    chooser = random.Random(2)
    samplers = [sampler(chooser) for _ in range(300)]  # more than a slice
    logits = (torch.randn(300, VOCABULARY) * 3).to(dtype)
    chosen = choose_rows(
        logits,
        noise.halves([s.stem for s in samplers]),
        torch.tensor([s.position for s in samplers]),
        torch.tensor([s.params.temperature for s in samplers]),
        sampled=True,
    )
    wanted = [s.choose(row, []) for s, row in zip(samplers, logits, strict=True)]
    assert chosen.tolist() == wanted
    assert sum(w != b for w, b in zip(wanted, logits.argmax(-1).tolist(), strict=True)) > 100, "noise changes choices"


def test_ties_break_by_token_id() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [700, 30, 31]] = 1.0
    stems, positions = noise.halves([1, 2]), torch.tensor([4, 5])
    assert choose_rows(logits, stems, positions, torch.zeros(2), sampled=False).tolist() == [30, 0]
    assert choose_rows(logits, stems, positions, torch.zeros(2), sampled=True).tolist() == [30, 0]


def test_trees_are_answered_at_every_node_unless_the_logits_must_be_adjusted() -> None:
    chooser = random.Random(3)
    kinds = [{}, {"top_k": 5}, {"temperature": 0.0, "top_p": 0.5}, {"min_p": 0.1}, {}, {"top_p": 0.9}]
    kinds += [{"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}, {"min_tokens": 4}, {"logprobs": 2}]
    kinds += [{"allowed_token_ids": [1, 2]}, {"bad_words": ["x"]}, {"skip_special_tokens": False}]
    for kind in kinds:
        kind.setdefault("temperature", 0.9)
    samplers = [sampler(chooser, **kind) for kind in kinds]
    trees: list[TokenTree] = [random_tree(chooser, 1, chooser.choice([0, 3, 40]), VOCABULARY) for _ in kinds]
    logits = torch.randn(sum(map(len, trees)), VOCABULARY) * 3
    answers = choose_trees(samplers, trees, logits)
    assert [answer is not None for answer in answers] == [not one.params.adjusts for one in samplers]
    rows = logits.split([len(tree) for tree in trees])
    for one, tree, part, answer in zip(samplers, trees, rows, answers, strict=True):
        lazy, eager = TreeDistributions(one, tree, part), TreeDistributions(one, tree, part, answer)
        assert [eager.choose(node) for node in range(len(tree))] == [lazy.choose(node) for node in range(len(tree))]


def test_what_a_grammar_leaves_is_cut_by_the_sampler_itself() -> None:
    """Without cuts the choice among all tokens is made together, and then checked."""
    one = sampler(random.Random(1), temperature=1.0, top_p=0.5)
    logits = torch.randn(1, VOCABULARY)
    assert choose_trees([one], [TokenTree(1)], logits) != [None]
    one.constraint = object()  # type: ignore[assignment]
    assert choose_trees([one], [TokenTree(1)], logits) == [None]
    free = sampler(random.Random(1), temperature=1.0)
    free.constraint = object()  # type: ignore[assignment]
    assert choose_trees([free], [TokenTree(1)], logits) != [None]


CUTS = [
    *({}, {"top_p": 0.9}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 1}, {"top_k": 5}, {"top_k": 2000}),
    *({"min_p": 0.1}, {"top_k": 20, "top_p": 0.8}, {"top_k": 3, "top_p": 0.5, "min_p": 0.05}, {"min_p": 1.0}),
    {"top_p": 1e-6},
    *({"temperature": 0.0, "top_k": 3}, {"temperature": 0.05, "top_p": 0.9}, {"temperature": 3.0, "top_p": 0.7}),
]


def rows_to_cut(vocabulary: int, kind: torch.dtype) -> torch.Tensor:
    """Rows of all kinds: smooth, coarse (many ties), with -inf, all alike, and with both zeros."""
    generator = torch.Generator().manual_seed(vocabulary)
    smooth = torch.randn(6, vocabulary, generator=generator) * 4
    masked = torch.where(torch.rand(6, vocabulary, generator=generator) < 0.9, -torch.inf, smooth)
    masked[:, 0] = 1.0
    zeros = torch.where(torch.rand(2, vocabulary, generator=generator) < 0.5, -0.0, 0.0)
    return torch.cat([smooth, smooth.round(), masked, torch.full((2, vocabulary), 0.5), zeros]).to(kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_cuts_of_many_rows_are_those_of_each(kind: torch.dtype) -> None:
    chooser = random.Random(6)
    logits = rows_to_cut(VOCABULARY, kind).repeat_interleave(len(CUTS), 0)
    samplers = [sampler(chooser, **{"temperature": 0.8, **CUTS[i % len(CUTS)]}) for i in range(len(logits))]
    params = [one.params for one in samplers]
    chosen = choose_rows(
        logits,
        noise.halves([one.stem for one in samplers]),
        torch.tensor([one.position for one in samplers]),
        torch.tensor([p.temperature for p in params]),
        sampled=True,
        cuts=RowCuts.of(params),
    )
    assert chosen.tolist() == [one.choose(row, []) for one, row in zip(samplers, logits, strict=True)]


@pytest.mark.kernels
@pytest.mark.parametrize(("vocabulary", "kind"), [(3000, torch.float32), (9000, torch.bfloat16)])
def test_the_kernel_cuts_the_same(vocabulary: int, kind: torch.dtype) -> None:
    from slipstream.gpu.kernels.cut_kernels import draw_cut

    rows = rows_to_cut(vocabulary, kind)
    rows = rows if DEVICE == "cuda" else rows[::3]  # the interpreter takes its time
    logits = rows.repeat_interleave(len(CUTS), 0).to(DEVICE)
    params = [SamplingParams(**{"temperature": 0.8, **how}) for how in CUTS] * len(rows)  # type: ignore[arg-type]
    keys = noise.halves([noise.key(seed, 1, 2) for seed in range(len(logits))]).to(DEVICE)
    temperatures = torch.tensor([p.temperature for p in params]).to(DEVICE)
    cuts = RowCuts.of(params).to(DEVICE)
    assert draw_cut(logits, keys, temperatures, *cuts).tolist() == _draw(logits, keys, temperatures, cuts).tolist()


@pytest.mark.kernels
def test_the_fused_kernel_draws_the_same() -> None:
    from slipstream.gpu.kernels.sampling_kernels import draw

    torch.manual_seed(0)
    for vocabulary, kind in ((2048, torch.float32), (5000, torch.float32), (3000, torch.float16)):
        logits = (torch.randn(40, vocabulary) * 3).to(kind)
        logits[0, [vocabulary - 1, 7, vocabulary // 2]] = 30.0
        temperatures = torch.tensor([0.0, 0.7, 1.0, 1e-6, 2.0] * 8)
        keys = noise.halves([noise.key(seed, 1, 2) for seed in range(40)])
        given = [tensor.to(DEVICE) for tensor in (logits, keys, temperatures)]
        chosen = draw(*given)
        assert chosen[0] == 7
        assert chosen.tolist() == _draw(*given).tolist()


@pytest.mark.kernels
def test_keys_of_one_kernel_are_those_of_the_definition() -> None:
    from slipstream.gpu.kernels.sampling_kernels import match_keys

    for count in (1, 7, 300):
        stems = torch.randint(0, 1 << 32, (2, count), generator=torch.Generator().manual_seed(count))
        positions = torch.randint(0, 1 << 34, (count,), generator=torch.Generator().manual_seed(count + 1))
        keys = [
            noise.key(at, noise.MATCH, start=high << 32 | low)
            for low, high, at in zip(*stems.tolist(), positions.tolist(), strict=True)
        ]
        assert match_keys(stems.to(DEVICE), positions.to(DEVICE)).cpu().equal(noise.halves(keys))


@pytest.mark.kernels
def test_noise_in_float32_is_as_close_as_the_kernel_assumes() -> None:
    """Over half a million hashes, close to both ends of their range too."""
    from tests.gpu.noise_probe import both

    extremes = [0.0, 0.0]
    for seed in range(8):
        key = noise.key(seed)
        near, exact = both(noise.halves([key]).flatten().to(DEVICE), 1 << 16)
        error = (exact - noise.gumbel(key, 1 << 16, DEVICE)).abs().max().item()
        assert error == 0.0 if DEVICE == "cuda" else error < 1e-12  # the interpreter has NumPy's logarithms
        assert (near.double() - exact).abs().max().item() < 2e-5
        extremes = [min(extremes[0], exact.min().item()), max(extremes[1], exact.max().item())]
    assert extremes[0] < -2.4 and extremes[1] > 11


def test_if_all_logits_must_be_adjusted_there_is_nothing_to_do() -> None:
    chooser = random.Random(4)
    assert choose_trees([sampler(chooser, temperature=1.0, min_tokens=3)], [TokenTree(1)], torch.zeros(1, 10)) == [None]
    assert choose_trees([], [], torch.zeros(0, 10)) == []
