"""GGUF files of the newer families: written by the rules of the converters, they compute what transformers computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.models.formats.gguf_config import config_from_gguf
from slipstream.models.formats.gguf_file import GGUFCheckpoint
from slipstream.models.formats.gguf_metadata import GGUFHead
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.load import load_model
from slipstream.tree import TokenTree
from tests.checkpoints import refused
from tests.models.test_families import SHAPE, build, tree_logits

KINDS = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
}
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


def tensors_of(folder: Path, architecture: str) -> dict[str, torch.Tensor]:
    """A directory's tensors under the names that the gguf package gives them.

    Experts are stacked and 1 is added to Gemma's norms. Nothing is permuted: only files of architecture llama are.
    """
    names = gguf.get_tensor_name_map(KINDS[architecture], 16)
    whole: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if found := EXPERT.fullmatch(name):
            stacks.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = tensor
        else:
            whole[name] = tensor + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else tensor
    for name, experts in stacks.items():
        whole[name] = torch.stack([experts[number] for number in sorted(experts)])
    found_names = {name: names.get_name(name, try_suffixes=(".weight",)) for name in whole}
    assert None not in found_names.values()
    return {str(found_names[name]): tensor for name, tensor in whole.items()}


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    """What the converters write of a transformers config."""
    facts = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if architecture != "olmoe":
        facts |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if architecture == "gemma2":
        facts["attn_logit_softcapping"] = config.attn_logit_softcapping
        facts["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture.startswith("gemma"):
        facts["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma3":
        facts |= {"rope.freq_base": 50_000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
        facts["rope.freq_base_swa"] = 500.0
    if architecture in ("qwen3moe", "olmoe"):
        facts |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    if architecture == "qwen3moe":
        facts["expert_feed_forward_length"] = config.moe_intermediate_size
    return facts


def write(path: Path, architecture: str, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in facts.items():
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Path]:
    """A family's tiny model: its architecture, its directory, the model in transformers, and the file made of it.

    The metadata do not hold the query's scale, so Gemma's is what the head size says.
    """
    name = str(request.param)
    folder = tmp_path_factory.mktemp(name)
    extra = {"query_pre_attn_scalar": 24} if name == "gemma2" else {"query_pre_attn_scalar": 32}
    theirs = build(name, folder, **(extra if name.startswith("gemma") else {}))
    file = write(folder / "model.gguf", name, tensors_of(folder, name), metadata_of(theirs.config, name))
    return name, folder, theirs, file


def test_logits_equal_those_of_transformers(case: tuple[str, Path, Any, Path]) -> None:
    _, _, theirs, file = case
    ours, _ = load_model(file, dtype="float32", device="cpu")
    tokens = torch.randint(SHAPE["vocab_size"], (150,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
        got = tree_logits(ours, [], TokenTree.chain(tokens[0], tokens[1:]), 1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_file_says_what_the_directory_says(case: tuple[str, Path, Any, Path]) -> None:
    name, folder, _, file = case
    directory, config = HFCheckpoint(folder).config, GGUFCheckpoint(file).config
    assert config.family == directory.family == name
    layers = ["windows", "rope_theta", "rope_local_theta", "rope_scaling", "post_norms", "activation", "qk_norm"]
    mixture = ["qk_norm_whole", "experts", "experts_per_token", "norm_topk"]
    for fact in (*layers, *mixture, "embed_scale", "tied_head", "parameters"):
        assert getattr(config, fact) == getattr(directory, fact), fact
    for fact in ("attention_softcap", "logit_softcap"):
        assert getattr(config, fact) == pytest.approx(getattr(directory, fact)), fact


BARE: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 96,
    "block_count": 12,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "vocab_size": 50,
}


def config_of(architecture: str, **facts: Any) -> Any:
    metadata = {f"{architecture}.{key}": value for key, value in (BARE | facts).items()}
    return config_from_gguf(GGUFHead({"general.architecture": architecture, **metadata}, {}, 0), "x.gguf", ())


def test_what_metadata_leave_out() -> None:
    old = config_of("gemma2")
    assert (old.attention_softcap, old.logit_softcap, old.windows) == (50.0, 30.0, (4096, None) * 6)
    assert (old.query_scale, config_of("gemma2", block_count=46).query_scale) == (None, 24**-0.5)
    new = config_of("gemma3", **{"attention.sliding_window": 7})
    assert (new.windows, new.rope_local_theta, new.logit_softcap) == (((7,) * 5 + (None,)) * 2, 10_000.0, None)
    assert config_of("gemma3").windows == ()
    assert config_of("gemma3", block_count=62).query_scale == 24**-0.5
    pattern = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 3}
    assert config_of("gemma3", **pattern).windows == (7, 7, None) * 4
    assert config_of("gemma2", attn_logit_softcapping=0.0).attention_softcap is None
    experts = {"expert_count": 4, "expert_used_count": 2}
    assert [config_of(name, **experts).norm_topk for name in ("qwen3moe", "olmoe", "llama")] == [True, False, True]
    assert config_of("olmoe", **experts, expert_weights_norm=True).norm_topk
    assert config_of("olmoe", **{"attention.clamp_kqv": 8.0}).qkv_clip == 8.0


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 50.0),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("qwen3", "attention.sliding_window_pattern", 2),
        ("gemma3", "attention.sliding_window_pattern", [True, False]),
        ("qwen3moe", "leading_dense_block_count", 1),
        ("qwen3moe", "expert_shared_count", 1),
        ("gemma3", "embedding_scale", 2.0),
    ],
)
def test_what_is_refused(architecture: str, key: str, value: Any) -> None:
    with refused(UnsupportedModel, "x.gguf", f"{architecture}.{key}"):
        config_of(architecture, **{"attention.sliding_window": 7, key: value})


def test_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    theirs = build("qwen3moe", tmp_path)
    tensors, facts = tensors_of(tmp_path, "qwen3moe"), metadata_of(theirs.config, "qwen3moe")
    last = theirs.config.num_hidden_layers
    extra = {f"blk.{last}.nextn.{part}.weight": torch.ones(3) for part in ("eh_proj", "enorm", "hnorm")}
    extra[f"blk.{last}.attn_q.weight"] = torch.ones(3)
    facts |= {"block_count": last + 1, "nextn_predict_layers": 1}
    checkpoint = GGUFCheckpoint(write(tmp_path / "a.gguf", "qwen3moe", tensors | extra, facts))
    assert (checkpoint.config.layers, checkpoint.config.mtp_layers) == (last, 1)
    assert checkpoint.mtp == tuple(sorted(extra))
    del extra[f"blk.{last}.nextn.eh_proj.weight"]
    with refused(UnsupportedModel, f"blk.{last}.attn_q.weight"):
        GGUFCheckpoint(write(tmp_path / "b.gguf", "qwen3moe", tensors | extra, facts))
    with refused(CorruptFile, "multi-token prediction"):
        config_of("llama", nextn_predict_layers=12)
