"""Choices of many rows at once: the same, bit for bit, as asking for one after the other."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream import SamplingParams, noise
from slipstream.gpu.device_sampling import _draw, choose_rows, choose_trees
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


def test_trees_are_answered_at_every_node_and_only_where_the_sampler_is_simple() -> None:
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
    simple = [answer is not None for answer in answers]
    assert simple == [True, False, True, False, True, False, False, False, False, True, False, False, True]
    rows = logits.split([len(tree) for tree in trees])
    for one, tree, part, answer in zip(samplers, trees, rows, answers, strict=True):
        lazy, eager = TreeDistributions(one, tree, part), TreeDistributions(one, tree, part, answer)
        assert [eager.choose(node) for node in range(len(tree))] == [lazy.choose(node) for node in range(len(tree))]


@pytest.mark.kernels
def test_the_fused_kernel_draws_the_same() -> None:
    from slipstream.gpu.sampling_kernels import draw

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


def test_no_simple_sampler_means_no_work() -> None:
    chooser = random.Random(4)
    assert choose_trees([sampler(chooser, temperature=1.0, top_k=3)], [TokenTree(1)], torch.zeros(1, 10)) == [None]
    assert choose_trees([], [], torch.zeros(0, 10)) == []
