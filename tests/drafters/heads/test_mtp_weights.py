"""Checkpoints that bring weights for multi-token prediction: they are listed, and the model is what it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.models.formats.hf import HFCheckpoint
from tests.checkpoints import refused
from tests.models.test_families import SHAPE, build
from tests.models.test_gemma import logits, rewrite

LAYERS = SHAPE["num_hidden_layers"]
PARTS = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")
# Names as the published models have them, for one layer of prediction.
STYLES: dict[str, tuple[list[str], Mapping[str, int]]] = {
    "deepseek": (
        [
            f"model.layers.{LAYERS}.{part}"
            for part in (
                *PARTS,
                "eh_proj.weight",
                "enorm.weight",
                "hnorm.weight",
                "embed_tokens.weight",
                "shared_head.norm.weight",
                "shared_head.head.weight",
            )
        ],
        {"num_nextn_predict_layers": 1},
    ),
    "qwen": (
        [
            *(f"mtp.layers.0.{part}" for part in PARTS),
            *(f"mtp.{part}.weight" for part in ("fc", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")),
        ],
        {"mtp_num_hidden_layers": 1},
    ),
    "mimo": (
        [f"model.mtp_layers.0.{part}" for part in (*PARTS, "input_proj.weight", "token_layernorm.weight")],
        {"num_nextn_predict_layers": 1},
    ),
}


def add(folder: Path, names: list[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.full((3, 5), 7.0) for name in names}, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
@pytest.mark.parametrize("style", STYLES)
def test_they_are_listed_and_left_alone(style: str, family: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    before = logits(tmp_path)
    assert (HFCheckpoint(tmp_path).mtp, HFCheckpoint(tmp_path).config.mtp_layers) == ((), 0)
    names, facts = STYLES[style]
    add(tmp_path, names)
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.mtp == tuple(sorted(names))
    parameters = checkpoint.config.parameters
    checkpoint = HFCheckpoint(rewrite(tmp_path, **facts))
    assert (checkpoint.config.mtp_layers, checkpoint.config.layers) == (1, LAYERS)
    assert checkpoint.config.parameters == parameters  # what the decoder loads
    assert torch.equal(logits(tmp_path), before)


def test_several_layers(tmp_path: Path) -> None:
    build("llama2", tmp_path)
    names = [f"model.layers.{layer}.{part}" for layer in (LAYERS, LAYERS + 1) for part in ("eh_proj.weight", *PARTS)]
    add(tmp_path, names)
    checkpoint = HFCheckpoint(rewrite(tmp_path, num_nextn_predict_layers=2))
    assert (checkpoint.mtp, checkpoint.config.mtp_layers) == (tuple(sorted(names)), 2)


def test_weights_that_were_left_out_are_no_error(tmp_path: Path) -> None:
    build("llama2", tmp_path)
    checkpoint = HFCheckpoint(rewrite(tmp_path, num_nextn_predict_layers=1))
    assert (checkpoint.mtp, checkpoint.config.mtp_layers) == ((), 1)
    assert HFCheckpoint(rewrite(tmp_path, num_nextn_predict_layers=0)).config.mtp_layers == 0
    with refused(CorruptFile, "num_nextn_predict_layers"):
        HFCheckpoint(rewrite(tmp_path, num_nextn_predict_layers="one"))


@pytest.mark.parametrize(
    "name",
    [
        f"model.layers.{LAYERS}.self_attn.q_proj.weight",  # a layer too many, of no known kind
        f"model.layers.{LAYERS - 1}.eh_proj.weight",  # in a layer of the model itself
        "model.layers.x.eh_proj.weight",
        "medusa_head.0.weight",
        "mtp_head.weight",
    ],
)
def test_other_tensors_are_refused_as_before(name: str, tmp_path: Path) -> None:
    build("llama2", tmp_path)
    add(tmp_path, [name])
    with refused(UnsupportedModel, repr(name), "llama"):
        HFCheckpoint(tmp_path)
