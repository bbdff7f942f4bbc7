"""EAGLE-3 heads in the layouts of SafeAILab (`midlayer.`) and of `speculators` (`layers.0.`).

Both are read and written. Differences besides the names:

* RoPE rotates dimension i of a head with i + head_dim / 2; here rotated pairs are adjacent.
* Layers are tapped before they run: id k of `eagle_aux_hidden_state_layer_ids` is the input of layer k, the output of
  layer k - 1. Only a list inside `eagle_config` counts outputs.
* `d2t` holds differences: draft token i is token i + d2t[i] of the target.
* `input_layernorm` is the embedding's norm. The residual is the hidden state before its norm, unless
  `norm_before_residual`, which is the default of `speculators`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.drafters.eagle3 import Eagle3Drafter, Eagle3Head, Eagle3Settings
from slipstream.drafters.heads.head_checkpoint import Made, Trained
from slipstream.drafters.heads.head_drafter import frame_of, restored, settings_of
from slipstream.drafters.interchange.foreign import Foreign
from slipstream.errors import CorruptFile, DraftMismatch
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf_config import Family
from slipstream.models.formats.hf_layers import rope
from slipstream.models.formats.hf_reader import HFReader
from slipstream.models.formats.hf_render import rendered_scaling
from slipstream.models.layers.rope import inverse_frequencies, pairs_adjacent, pairs_apart
from slipstream.models.view import TargetView

METHOD = Eagle3Drafter.name  # the same name as in speculators
_IDS = "eagle_aux_hidden_state_layer_ids"
_TAPS = 3  # the number that other programs read

# Ours -> theirs; several of theirs are stacked.
_NAMES = {
    "fuse.weight": ("fc.weight",),
    "embed_norm": ("layers.0.input_layernorm.weight",),
    "hidden_norm": ("layers.0.hidden_norm.weight",),
    "layer.qkv.weight": tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
    "layer.out.weight": ("layers.0.self_attn.o_proj.weight",),
    "layer.mlp_norm": ("layers.0.post_attention_layernorm.weight",),
    "layer.gate_up.weight": ("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    "layer.down.weight": ("layers.0.mlp.down_proj.weight",),
    "norm": ("norm.weight",),
}
_TAPS_NORM, _ROWS, _EMBEDDING = "input_norm.weight", "lm_head.weight", "embed_tokens.weight"
_TURNED = _NAMES["layer.qkv.weight"][:2]  # q and k

# Config keys that would change the computation, with the one value that we compute (absent is fine).
_ONLY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "logit_scale": 1.0,
    "fc_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def recognises(foreign: Foreign) -> bool:
    """Whether this is a head of this kind."""
    return any(name.removeprefix("model.") == "fc.weight" for name in foreign.weights)


# -- theirs to ours ---------------------------------------------------------------------------------------------------


def imported(foreign: Foreign, target: TargetView, made: Made) -> Trained:
    """The head as a checkpoint for `target`: the same numbers in our order. What cannot be represented is refused."""
    foreign = replace(foreign, weights={_plain(name): weight for name, weight in foreign.weights.items()})
    config = target.config
    dtype = foreign.dtype
    weights = dict(foreign.weights)
    vocab = _vocabulary(foreign, weights.pop("d2t", None), weights.pop("t2d", None), config.vocab_size)
    embedding = weights.pop(_EMBEDDING, None)
    settings = _settings(foreign, config, len(vocab))
    shape = settings.shaped(config)
    foreign = replace(foreign, weights=weights)
    foreign.require(_shapes(settings, shape, len(vocab)))
    if embedding is not None:
        _require_same_embedding(foreign, embedding, target)
    for name in _TURNED:
        weights[name] = pairs_adjacent(weights[name], shape.head_dim)
    ours = {name: torch.cat([weights[part] for part in theirs]) for name, theirs in _NAMES.items()}
    order = vocab.argsort()
    if settings.own_rows:
        ours["rows"] = weights[_ROWS][order]
    if settings.norm_taps:
        ours["taps_norm"] = weights[_TAPS_NORM]
    provenance = {"imported": foreign.name, "dtype": dtype}
    return Trained(METHOD, settings_of(settings), made, vocab[order], ours, provenance)


def _plain(name: str) -> str:
    """A weight's name in the layout of `speculators`."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _vocabulary(foreign: Foreign, offsets: torch.Tensor | None, mask: torch.Tensor | None, size: int) -> torch.Tensor:
    """The target's ids of the draft tokens, in the order of the head's rows."""
    if offsets is None:
        return torch.arange(size)
    vocab = torch.arange(len(offsets)) + offsets.long()
    if len(vocab) == 0 or int(vocab.min()) < 0 or int(vocab.max()) >= size:
        raise DraftMismatch(f"{foreign.name}: d2t names tokens outside the target's {size:,}")
    if len(vocab.unique()) != len(vocab):
        raise CorruptFile(f"{foreign.name}: d2t names a token twice")
    if mask is not None and (len(mask) != size or not torch.equal(mask.nonzero()[:, 0], vocab.sort().values)):
        raise CorruptFile(f"{foreign.name}: d2t and t2d do not name the same tokens")
    return vocab


def _settings(foreign: Foreign, target: ModelConfig, tokens: int) -> Eagle3Settings:
    config = foreign.config
    nested = "transformer_layer_config" in config
    reader = HFReader(config["transformer_layer_config"] if nested else config, foreign.name)
    if not isinstance(reader.raw, dict):
        raise reader.nonsense("transformer_layer_config", reader.raw)
    said = reader.raw | config | (config.get("eagle_config") or {})
    for key, value in _ONLY.items():
        if said.get(key) not in (None, value):
            raise foreign.refuse(f"has {key} = {said[key]!r}")
    for key, ours in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        theirs = reader.count(key)
        if theirs != ours:
            raise DraftMismatch(f"{foreign.name} has {key} {theirs:,}, but this target has {ours:,}")
    if config.get("target_hidden_size") not in (None, target.hidden_size):
        raise DraftMismatch(f"{foreign.name} reads hidden states of width {config['target_hidden_size']}")
    if config.get("draft_vocab_size") not in (None, tokens):
        raise CorruptFile(f"{foreign.name} has draft_vocab_size {config['draft_vocab_size']}, but {tokens} tokens")
    heads = reader.count("num_attention_heads")
    return Eagle3Settings(
        vocabulary=tokens,
        mlp=reader.count("intermediate_size"),
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", heads),
        head_dim=reader.count("head_dim", target.hidden_size // heads),
        rope_theta=_theta(foreign, reader, target),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        taps=_taps(foreign, target.layers),
        own_rows=_ROWS in foreign.weights,
        norm_taps=bool(said.get("norm_before_fc", False)),
        norm_residual=bool(said.get("norm_before_residual", nested)),
    )


def _theta(foreign: Foreign, reader: HFReader, target: ModelConfig) -> float:
    """The RoPE base of the head; 0 if it rotates as the target does, scaling included."""
    head_dim = reader.count("head_dim", target.hidden_size // reader.count("num_attention_heads"))
    fields = rope(reader, Family("eagle"), reader.count("max_position_embeddings", target.context))
    own = replace(target, head_dim=head_dim, rope_factors=(), **fields)
    if own.rope_scaling is None:
        return own.rope_theta
    if target.head_dim == head_dim and torch.allclose(inverse_frequencies(own), inverse_frequencies(target)):
        return 0.0
    raise foreign.refuse("scales RoPE differently from the target")


def _taps(foreign: Foreign, layers: int) -> tuple[int, ...]:
    """The layers whose outputs are read, in our count."""
    written = (foreign.config.get("eagle_config") or {}).get(_IDS)
    ids = foreign.config.get(_IDS) or ([i + 1 for i in written] if written else [2, layers // 2, layers - 3])
    if not all(1 <= i <= layers for i in ids):
        raise DraftMismatch(f"{foreign.name} reads layers {list(ids)} of its target, but this one has {layers}")
    return tuple(i - 1 for i in ids)


def _require_same_embedding(foreign: Foreign, embedding: torch.Tensor, target: TargetView) -> None:
    """Refuse a head with embeddings of its own: here it shares the target's. (Their scale does not matter: a norm
    follows. Those of a quantized target differ a little.)
    """
    config = target.config
    ids = torch.arange(config.vocab_size, device=target.device)
    ours = target.embed(ids).float().cpu() / config.embed_scale
    if embedding.shape != ours.shape or (embedding.float() - ours).norm() > 0.02 * ours.norm():
        raise foreign.refuse("has embeddings that differ from the target's")


# -- ours to theirs ---------------------------------------------------------------------------------------------------


def exported(trained: Trained, target: TargetView, place: Path) -> Foreign:
    """The head in the layout of `speculators`, which vLLM reads too. Rows shared with the target are written out."""
    head = restored(Eagle3Drafter, trained, frame_of(target, trained.vocab.to(target.device)), place)
    assert isinstance(head, Eagle3Head)
    shape, dtype = head.frame.config, trained.provenance.get("dtype", "float32")
    for name in ("norm_each", "feed_normed"):
        if getattr(head.settings, name):
            raise DraftMismatch(f"the head was trained with {name}=true, which this layout has no words for")
    if len(head.taps) != _TAPS:
        raise DraftMismatch(f"the head reads {len(head.taps)} layers of its target; other programs read {_TAPS}")
    ours = {**head.state_dict(), "rows": head.output}
    sizes = _shapes(head.settings, shape, len(trained.vocab))
    weights: dict[str, torch.Tensor] = {}
    for name, theirs in _NAMES.items():
        parts = ours[name].split([sizes[part][0] for part in theirs])
        weights.update(zip(theirs, parts, strict=True))
    for name in _TURNED:
        weights[name] = pairs_apart(weights[name], shape.head_dim)
    weights[_ROWS] = ours["rows"]
    if head.settings.norm_taps:
        weights[_TAPS_NORM] = ours["taps_norm"]
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    weights["d2t"] = trained.vocab - torch.arange(len(trained.vocab))
    weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill_(0, trained.vocab, True)
    return Foreign(METHOD, _config(head, trained, dtype), weights)


def _config(head: Eagle3Head, trained: Trained, dtype: str) -> dict[str, Any]:
    shape, settings = head.frame.config, head.settings
    proposal = {"proposal_type": "greedy", "speculative_tokens": settings.unroll}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": METHOD,
        "speculators_config": {
            "algorithm": METHOD,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": trained.target.name, "architectures": []},
        },
        "draft_vocab_size": len(trained.vocab),
        _IDS: [tap + 1 for tap in head.taps],
        "norm_before_residual": settings.norm_residual,
        "norm_before_fc": settings.norm_taps,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.context,
            "rope_theta": shape.rope_theta,
            "rope_scaling": rendered_scaling(shape),
        },
    }


def exported_flat(trained: Trained, target: TargetView, place: Path) -> Foreign:
    """The head in SafeAILab's layout, which SGLang reads, and vLLM too.

    The two do not count layers alike: SGLang takes the list inside `eagle_config`, vLLM the one beside it.
    """
    foreign = exported(trained, target, place)
    nested = dict(foreign.config)
    for name in ("norm_before_residual", "norm_before_fc"):
        if nested[name]:
            raise DraftMismatch(f"the head has {name}, which this layout has no words for", hint="try speculators")
    config = {
        **nested["transformer_layer_config"],
        "architectures": ["LlamaForCausalLMEagle3"],
        **{key: nested[key] for key in ("draft_vocab_size", _IDS, "tie_word_embeddings", "torch_dtype")},
        "eagle_config": {_IDS: [i - 1 for i in nested[_IDS]], "use_aux_hidden_state": True},
    }
    weights = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: weight
        for name, weight in foreign.weights.items()
    }
    return Foreign(METHOD, config, weights)


# -- both -------------------------------------------------------------------------------------------------------------


def _shapes(settings: Eagle3Settings, shape: ModelConfig, tokens: int) -> dict[str, tuple[int, ...]]:
    """The weights of a head by name, with their expected shapes."""
    width, mlp, tapped = shape.hidden_size, shape.intermediate_size, len(settings.taps or range(_TAPS))
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_width = [name for names in _NAMES.values() for name in names if "norm" in name]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(of_width, (width,))
    shapes["fc.weight"] = (width, tapped * width)
    for name, rows in zip(_NAMES["layer.qkv.weight"], (queries, keys, keys), strict=True):
        shapes[name] = (rows, 2 * width)
    shapes |= dict.fromkeys(_NAMES["layer.gate_up.weight"], (mlp, width))
    shapes[_NAMES["layer.out.weight"][0]] = (width, queries)
    shapes[_NAMES["layer.down.weight"][0]] = (width, mlp)
    if settings.norm_taps:
        shapes[_TAPS_NORM] = (tapped * width,)
    if settings.own_rows:
        shapes[_ROWS] = (tokens, width)
    return shapes
