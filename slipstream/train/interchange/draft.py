"""A distilled draft as a standalone model: a Hugging Face directory for anything that reads Llama models.

What it shares with the target is written out: the embedding, the tokenizer, and the output rows of the whole
vocabulary, of which our draft reads a part. So it can also verify guesses, as a level of a cascade.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.drafters.draft_model_distilled import DistilledDrafter, DistilledHead
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.drafters.heads.head_drafter import frame_of, restored
from slipstream.drafters.heads.head_layer import HeadLayer
from slipstream.drafters.interchange.foreign import Foreign
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf import LAYERS, PARTS, TABLES
from slipstream.models.formats.hf_render import rendered_config
from slipstream.models.layers.rope import pairs_apart
from slipstream.models.view import TargetView

METHOD = DistilledDrafter.name


def exported(trained: Trained, target: TargetView, place: Path) -> Foreign:
    """The draft at `place`, with the target's tokenizer if it has one."""
    everything = torch.arange(target.config.vocab_size, device=target.device)
    head = restored(DistilledDrafter, trained, frame_of(target, everything), place)
    assert isinstance(head, DistilledHead)
    embedding, rows = target.embed(everything).float().cpu(), head.frame.rows.float().cpu()
    weights = {TABLES["embed"]: embedding, TABLES["norm"]: head.stack.norm}
    tied = torch.equal(embedding, rows)
    if not tied:
        weights[TABLES["head"]] = rows
    for index, (norm, layer) in enumerate(zip(head.stack.norms, head.stack.layers, strict=True)):
        assert isinstance(layer, HeadLayer)
        weights[f"{LAYERS}{index}.{PARTS['attn_norm']}"] = norm
        weights |= {f"{LAYERS}{index}.{PARTS[part]}": weight for part, weight in _parts(layer)}
    shape = _shape(head, tied)
    if target.tokenizer is not None:  # end tokens that only the tokenizer's files name count too
        shape = replace(shape, eos_ids=tuple(dict.fromkeys((*shape.eos_ids, *target.tokenizer.eos_ids))))
    config, family = rendered_config(shape, trained.target.name)
    assert not family.norms_from_one, "a plain model is written as a plain family"
    config["torch_dtype"] = "float32"
    return Foreign(METHOD, config, weights, target.tokenizer)


def _shape(head: DistilledHead, tied: bool) -> ModelConfig:
    """The draft's config, without what its target has beyond plain Llama layers."""
    config, layer = head.frame.config, head.stack.layers[0]
    assert isinstance(layer, HeadLayer)
    return ModelConfig(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=len(head.stack.layers),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=layer.down.weight.shape[1],
        context=config.context,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        rope_factors=config.rope_factors,
        norm_eps=config.norm_eps,
        tied_head=tied,
        bos_id=config.bos_id,
        eos_ids=config.eos_ids,
    )


def _parts(layer: HeadLayer) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of a layer by name."""
    config = layer.config
    keys = config.kv_heads * config.head_dim
    q, k, v = layer.qkv.weight.split([config.heads * config.head_dim, keys, keys])
    gate, up = layer.gate_up.weight.chunk(2)
    yield from {"q": pairs_apart(q, config.head_dim), "k": pairs_apart(k, config.head_dim), "v": v}.items()
    yield from {"o": layer.out.weight, "mlp_norm": layer.mlp_norm, "gate": gate, "up": up}.items()
    yield "down", layer.down.weight
