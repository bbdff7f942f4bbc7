"""Bodies: a large model with the output of the small one in it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bodies import bodies
from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.shapes import SHAPES, SIGNALS, BodyShape, layer_order
from slipstream import LLM, SamplingParams
from slipstream.attention import tree_segment
from slipstream.errors import OptionError
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.layers.mlp import MixtureMLP
from slipstream.models.layers.rope import inverse_frequencies
from slipstream.models.load import load_model
from slipstream.models.shapes import expected_shape, weight_names
from slipstream.sequence import TARGET
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.models.test_families import build, tree_logits
from tests.tiny import tiny_directory

pytestmark = pytest.mark.usefixtures("one_thread")

SMOLLM2 = ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, rope_theta=1e5, tied_head=True)
DENSE = BodyShape(176, 5, 9, 3, 32, 160, 230)
BODIES = {
    "dense": DENSE,
    "same heads": replace(DENSE, heads=8, kv_heads=2, head_dim=16),
    "four times the head": replace(DENSE, heads=8, kv_heads=2, head_dim=64, layers=3),
    "moe": replace(DENSE, experts=4, experts_per_token=2, expert_size=128),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def body_of(path: Path, shape: BodyShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> BodyCheckpoint:
    return BodyCheckpoint(open_checkpoint(path), "test", shape, "cpu", dtype, seed)


@pytest.mark.parametrize("family", ["smollm2", "llama3", "mistral"])
@pytest.mark.parametrize("kind", BODIES)
def test_logits_are_the_small_models_for_a_prompt_and_a_tree(kind: str, family: str, tmp_path: Path) -> None:
    """Tied and untied tables, a scaled rotation, a window, three query heads for a KV head or two."""
    build(family, tmp_path)
    shape = BODIES[kind]
    small, _ = load_model(tmp_path, dtype="float32", device="cpu")
    big, _ = load_model(body_of(tmp_path, shape), dtype="float32", device="cpu")
    assert isinstance(small, Decoder) and isinstance(big, Decoder)
    chooser = random.Random(2)
    prompt = [chooser.randrange(211) for _ in range(140)]  # more than a page
    tree = TokenTree(7)
    for _ in range(25):
        tree.add(chooser.randrange(max(0, len(tree) - 6), len(tree)), chooser.randrange(211))
    with torch.inference_mode():
        wanted, got = (tree_logits(model, prompt, tree, 48) for model in (small, big))
    assert got.shape[1] == 230
    torch.testing.assert_close(got[:, :211], wanted, atol=1e-4, rtol=0)
    assert bool((got[:, 211:].amax(1) < got[:, :211].amin(1) - 100).all()), "extra tokens are out of the question"


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("speculate", [None, "suffix:min_confidence=0", "ngram"])
def test_texts_are_the_small_models(kind: str, speculate: Any) -> None:
    """Greedy and drawn, plain and speculative."""
    path = tiny_directory(0, layers=3, context=300)
    how = [GREEDY, SamplingParams(temperature=1.5, seed=3, max_tokens=40), SamplingParams(seed=4, top_p=0.9)]
    prompts = [[5, 9, 17, 3] * 33, [1, 2, 3], [8] * 20]
    small, big = (LLM(m, speculate=speculate, max_model_len=200) for m in (path, body_of(path, BODIES[kind])))
    said, repeated = ([o.token_ids for o in llm.generate(prompts, how)] for llm in (small, big))
    assert repeated == said
    assert big.exact and big.model.config.vocab_size == 230


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extra_tokens_never_win_whatever_the_hidden_state(dtype: torch.dtype) -> None:
    body = body_of(tiny_directory(0, layers=3), DENSE, dtype)
    norm, rows, signal = body.weight("norm").to(dtype), body.weight("head"), body.weight("embed")[5, -1]
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 30.0, 1000.0):
        hidden = torch.zeros(200, 176, dtype=dtype)
        hidden[:, :64] = scale * torch.randn(200, 64, generator=generator)
        hidden[:, -1] = signal
        normed = torch.nn.functional.rms_norm(hidden, norm.shape, norm, body.config.norm_eps)
        logits = (normed.float() @ rows.float().T).to(dtype)  # as a GPU does it; not every CPU has such products
        real, extra = logits.split([97, 230 - 97], 1)
        twins = real[:, torch.arange(97, 230) % 97]
        assert bool((extra < twins).all()) and bool((logits.argmax(1) < 97).all())
        if scale <= 30.0:  # hidden states of real models are smaller
            assert bool((extra < real.amin(1, keepdim=True)).all())


def test_extra_tokens_are_never_drawn() -> None:
    llm = LLM(body_of(tiny_directory(0, layers=3), DENSE), speculate=None, max_model_len=200)
    outputs = llm.generate([[1, 2]] * 8, [SamplingParams(temperature=50.0, seed=i, max_tokens=100) for i in range(8)])
    said = Counter(token for output in outputs for token in output.token_ids)
    assert max(said) < 97 and len(said) == 97, "nearly uniform over the real tokens"


def test_weights_have_their_shapes_and_what_costs_is_not_zero(tmp_path: Path) -> None:
    build("smollm2", tmp_path)
    for shape in (DENSE, BODIES["moe"]):
        body = body_of(tmp_path, shape)
        idle = tuple(f"layers.{number}." for number, layer in enumerate(body.order) if layer is None)
        for name in weight_names(body.config):
            weight = body.weight(name)
            assert weight.shape == expected_shape(body.config, name), name
            part = name.rpartition(".")[2]
            filled = float((weight.view(-1, weight.shape[-1])[:, :-SIGNALS] != 0).float().mean())
            if part in ("k", "v", "gate", "up", "head"):
                assert filled > 0.99, name
            elif part == "q":  # all but what six heads of 16 leave of heads of 32
                silent = 0 if name.startswith(idle) else 6 * 16 / (9 * 32)
                assert filled == pytest.approx(1 - silent, abs=0.01), name
            elif part in ("o", "down"):
                assert bool(weight.any()) != name.startswith(idle), name


def test_weights_come_in_the_type_asked_for_and_depend_on_the_seed() -> None:
    path = tiny_directory(0, layers=3)
    one, same, other = (body_of(path, DENSE, torch.bfloat16, seed) for seed in (1, 1, 2))
    name = "layers.0.q"
    assert one.weight(name).dtype == torch.bfloat16
    assert torch.equal(one.weight(name), same.weight(name))
    assert not torch.equal(one.weight(name), other.weight(name))
    assert not torch.equal(one.weight(name)[16:32], one.weight("layers.0.k")[16:32])
    models = [Decoder(body, torch.float32, "cpu") for body in (one, other)]
    assert models[0].fingerprint != models[1].fingerprint != one.source_fingerprint
    assert one.source_fingerprint == load_model(path, dtype="float32", device="cpu")[0].fingerprint


def test_experts_are_chosen_evenly_and_anew_in_every_layer() -> None:
    """As a pass over many rows would in a trained mixture, whatever hidden states have in common."""
    path = tiny_directory(0, layers=3)
    body = body_of(path, replace(DENSE, experts=8, experts_per_token=2, expert_size=96))
    llm = LLM(body, speculate=None, max_model_len=200)
    model = llm.model
    assert isinstance(model, Decoder)
    table = llm.cache.open([])
    llm.cache.reserve(table, 97)
    tokens = list(range(97))
    with torch.inference_mode():
        taps = range(model.config.layers)
        taken = model.forward(llm.cache, TARGET, [tree_segment(table, 0, tokens, None)], taps=list(taps)).taps
        choices = []
        for layer, hidden in zip(model.layers, taken.values(), strict=True):
            assert isinstance(layer.mlp, MixtureMLP)
            choices.append(layer.mlp._router(model._scaled(hidden)).topk(2).indices.sort().values)
    for chosen in choices:
        counts = chosen.flatten().bincount(minlength=8)
        assert int(counts.min()) >= 10 and int(counts.max()) <= 40, "24 of 97 tokens on average"
    agreement = (choices[0] == choices[1]).all(1).float().mean()
    assert float(agreement) < 0.2


@pytest.mark.parametrize(("small", "big"), [(30, 32), (30, 30), (8, 10), (16, 28), (2, 7), (7, 48)])
def test_idle_layers_are_where_heads_by_their_own_rule_read_the_same_states(small: int, big: int) -> None:
    order = layer_order(small, big)
    assert len(order) == big and [layer for layer in order if layer is not None] == list(range(small))
    if small < 7:
        return  # low, middle and high are not three layers

    def low_middle_high(layers: int) -> list[int]:
        return [2, layers // 2, layers - 3]

    found = [max(x for x in order[: tap + 1] if x is not None) for tap in low_middle_high(big)]
    assert found == low_middle_high(small)


def test_the_named_bodies_have_the_sizes_they_are_named_for() -> None:
    configs = {name: shape.around(SMOLLM2, "smollm2") for name, shape in SHAPES.items()}
    assert configs["8b"].parameters == 8_030_261_248, "Llama 3 8B"
    tables = {name: config.vocab_size * config.hidden_size for name, config in configs.items()}
    assert 1.5e9 < configs["1.5b"].parameters - tables["1.5b"] < 1.6e9  # an embedding is looked up, not read
    moe = configs["moe"]
    idle_experts = 6 * 3 * moe.hidden_size * moe.expert_size * moe.layers
    routers = moe.layers * moe.experts * moe.hidden_size
    assert moe.parameters - idle_experts - routers == configs["8b"].parameters
    assert configs["8b"].norm_eps * 4096 == pytest.approx(SMOLLM2.norm_eps * 576)


def test_frequencies_are_kept_with_the_divisors_that_files_bring() -> None:
    small = replace(SMOLLM2, rope_factors=tuple(1.0 + i for i in range(32)))
    big = SHAPES["8b"].around(small, "small")
    assert torch.equal(inverse_frequencies(big)[::2], inverse_frequencies(small))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tiny_directory(0, layers=3)
    with refused(OptionError, "'7b'", "8b", "moe"):
        bodies.make("7b", path, device="cpu")
    for changes, words in [
        ({"hidden_size": 128}, ("hidden_size=128", "129 or more")),
        ({"layers": 2}, ("layers=2", "3 or more")),
        ({"vocab_size": 96}, ("vocab_size=96", "97 or more")),
        ({"heads": 8, "kv_heads": 1}, ("kv_heads=1", "2 or more")),
        ({"heads": 3}, ("heads=3, kv_heads=3", "2 or more query heads")),
        ({"heads": 8}, ("heads=8, kv_heads=3", "2 or more query heads")),
        ({"head_dim": 24}, ("head_dim=24", "multiples of 16")),
        ({"experts": 4, "expert_size": 95}, ("expert_size=95", "96 or more")),
    ]:
        with refused(OptionError, str(path), *words):
            body_of(path, replace(DENSE, **changes))
    build("qwen3", tmp_path)
    with refused(OptionError, "qk_norm=True"):
        body_of(tmp_path, DENSE)


def test_a_named_body_is_made_of_a_path_or_of_an_open_checkpoint() -> None:
    path = tiny_directory(0, layers=3)
    for model in (path, open_checkpoint(path)):
        body = bodies.make("8b", model, device="cpu")
        assert body.config.hidden_size == 4096 and body.name == f"{path} in a body of 8b"
        assert body.weight("layers.0.k").shape == (1024, 4096)
        assert body.tokenizer() is None


@pytest.mark.real_model
def test_the_real_model_in_a_body(smollm2_path: Path) -> None:
    shape = BodyShape(656, 32, 12, 3, 128, 1552, 49_200)
    body = body_of(smollm2_path, shape)
    prompt = "Why is the sky blue?"
    small, big = (LLM(m, speculate=None, max_model_len=256) for m in (smollm2_path, body))
    how = [SamplingParams(temperature=t, seed=1, max_tokens=16) for t in (0.0, 0.8)]
    conversations = [[{"role": "user", "content": prompt}]] * 2
    said, repeated = ([o.text for o in llm.chat(conversations, how)] for llm in (small, big))
    assert repeated == said
