"""What is Gemma's own: soft caps, scaled embeddings, two rotations; both layouts of its config; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.models.config import LinearScaling
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.load import load_model
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.models.test_families import SHAPE, build, tree_logits

TOKENS = [(37 * i + 11) % SHAPE["vocab_size"] for i in range(60)]
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def rewrite(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json, or take them out (...)."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    model, _ = load_model(folder, dtype=dtype, device="cpu")
    with torch.inference_mode():
        return tree_logits(model, [], TokenTree.chain(TOKENS[0], TOKENS[1:]), 1).float()


def test_the_caps_of_the_parity_test_bite(tmp_path: Path) -> None:
    build("gemma2", tmp_path)
    capped = logits(tmp_path)
    assert 0.4 < capped.abs().max() < 0.5
    for cap in CAPS:
        assert (logits(rewrite(tmp_path, **{cap: None})) - capped).abs().max() > 0.05
        rewrite(tmp_path, **{cap: 0.5})
    assert torch.equal(logits(tmp_path), capped)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma3-untied", "qwen3moe", "olmoe-clip"])
def test_in_16_bits_logits_are_near_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = build(name, tmp_path).half()
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].float()
    assert (logits(tmp_path, "float16") - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_embeddings_are_scaled_as_in_transformers_and_the_head_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = build("gemma2", tmp_path, hidden_size=96).to(dtype)  # a root that 16 bits must round
    ours, _ = load_model(tmp_path, dtype=dtype, device="cpu")
    with torch.inference_mode():
        assert torch.equal(ours.embed(torch.tensor(TOKENS)), theirs.model.embed_tokens(torch.tensor(TOKENS)))
        assert torch.equal(ours.embed(torch.tensor(5)), ours.embed(torch.tensor([5]))[0])
        hidden = torch.randn(4, 96, dtype=dtype)
        subset = torch.tensor([0, 8, 210])
        torch.testing.assert_close(ours.head(hidden, subset), ours.head(hidden)[:, subset])
        assert ours.head(hidden).abs().max() <= 0.5


GEMMA3_OLD = {
    "rope_parameters": ...,
    "layer_types": ...,
    "rope_theta": 50_000.0,
    "rope_local_base_freq": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 6,
}


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("gemma3", GEMMA3_OLD),
        ("gemma3", {"layer_types": ..., "tie_word_embeddings": ..., "hidden_activation": ..., "rms_norm_eps": ...}),
        ("gemma2", {"layer_types": ..., "rope_parameters": ..., "rope_theta": 10_000.0, "tie_word_embeddings": ...}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None, "rope_parameters": ...}),
    ],
    ids=str,
)
def test_older_layouts_of_the_config_say_the_same(name: str, old: dict[str, Any], tmp_path: Path) -> None:
    build(name, tmp_path)
    config = HFCheckpoint(tmp_path).config
    assert HFCheckpoint(rewrite(tmp_path, **old)).config == config
    if name == "gemma3":
        assert (config.rope_theta, config.rope_local_theta) == (50_000.0, 500.0)
        assert config.rope_scaling == LinearScaling(8.0)
        assert [config.local_rope(layer) for layer in range(7)] == [True] * 5 + [False, True]
        assert config.windows == (40,) * 5 + (None, 40)
    else:
        assert config.windows == (40, None, 40, None)
        assert (config.query_scale, config.embed_scale, config.activation) == (1.0, 8.0, "gelu_tanh")


def test_what_absence_means(tmp_path: Path) -> None:
    build("gemma2", tmp_path)
    absent = dict.fromkeys([*CAPS, "sliding_window", "query_pre_attn_scalar"], ...)
    config = HFCheckpoint(rewrite(tmp_path, **absent)).config
    assert (config.attention_softcap, config.logit_softcap, config.query_scale) == (50.0, 30.0, 256**-0.5)
    assert config.windows == (4096, None, 4096, None)
    (tmp_path / "3").mkdir()
    build("gemma3", tmp_path / "3")
    absent = dict.fromkeys([*CAPS, "rope_parameters", "sliding_window"], ...)
    config = HFCheckpoint(rewrite(tmp_path / "3", **absent)).config
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert (config.rope_theta, config.rope_local_theta, config.rope_scaling) == (1e6, 1e4, None)
    assert config.window(0) == 4096


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("gemma3")
    build("gemma3", folder)
    first = {"sliding_window_pattern": ..., **json.loads((folder / "config.json").read_text())}
    return lambda **changes: rewrite(folder, **(first | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["Gemma3ForConditionalGeneration"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"hidden_activation": "gelu"}, ["hidden_activation", "'gelu'", "gelu_pytorch_tanh"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"layer_types": ["chunked_attention"] * 7}, ["chunked_attention"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, ["rope_parameters"]),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, ["linear", "window"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, ["yarn"]),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, ["partial_rotary_factor"]),
    ],
    ids=str,
)
def test_what_we_do_not_compute_is_refused(
    gemma3: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    with refused(UnsupportedModel, *words):
        HFCheckpoint(gemma3(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"final_logit_softcapping": -1.0},
        {"query_pre_attn_scalar": 0},
        {"layer_types": None, "sliding_window_pattern": 0.5},
        {"layer_types": ["full_attention"]},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense(gemma3: Callable[..., Path], changes: dict[str, Any]) -> None:
    with refused(CorruptFile, "config.json"):
        HFCheckpoint(gemma3(**changes))
