"""The config and the tokenizer of a model as Hugging Face files, for one of another format or made here.

There is no table of what each family supports: a config is written as one family after the other and read back, and the
first that reads back as the same model is used. What no family can express is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, UnsupportedModel
from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig
from slipstream.models.formats.hf_config import (
    ACTIVATIONS,
    ARCHITECTURES,
    ATTENTION_CAP,
    LOGIT_CAP,
    Family,
    config_from_hf,
)
from slipstream.models.formats.hf_layers import FULL, SLIDING
from slipstream.text import Tokenizer

_SAMPLE = "Why is the sky blue? 1,234 Grüße\n\n    return x + 1"  # to be tokenized alike by a tokenizer and its copy
_MODEL_TYPES = {"gemma3": "gemma3_text"}  # where it is not the family's name


def rendered_config(config: ModelConfig, source: str) -> tuple[dict[str, Any], Family]:
    """A config.json equivalent to `config`, and its family."""
    for architecture, family in ARCHITECTURES.items():
        raw = _written(config, architecture, family)
        try:
            found = config_from_hf(raw, {}, source, has_head=not config.tied_head)
        except ModelError:
            continue
        if _essence(found) == _essence(config):
            return raw, family
    raise UnsupportedModel(
        f"{source} has layers that no config.json we know can describe",
        hint="take the model as a Hugging Face directory",
    )


def rendered_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The rope scaling as in a config.json."""
    scaling = config.rope_scaling
    if config.rope_factors:
        raise UnsupportedModel(
            "the model's rotation is given as bare factors, which a config.json cannot express",
            hint="take the model as a Hugging Face directory",
        )
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return None


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer as Hugging Face files, and check that it reads back the same."""
    from tokenizers import processors

    backend = type(tokenizer._backend).from_str(tokenizer._backend.to_str())
    if tokenizer._add_bos and tokenizer.bos_id is not None:
        bos = tokenizer.token(tokenizer.bos_id)
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.bos_id)]
        )
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    chat = tokenizer._chat
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat is not None:
        described |= {**chat.special_tokens, "chat_template": chat.source}
    elif tokenizer.bos_id is not None:
        described["bos_token"] = tokenizer.token(tokenizer.bos_id)
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    copy = Tokenizer.from_directory(folder)
    if _ways(copy) != _ways(tokenizer):
        raise UnsupportedModel(
            "the tokenizer of this model cannot be written as files of Hugging Face",
            hint="take the model as a Hugging Face directory",
        )


def _ways(tokenizer: Tokenizer) -> tuple[object, ...]:
    """What must agree between a tokenizer and its copy; end ids are also in the config."""
    cut = tokenizer.encode(_SAMPLE), tokenizer.encode(_SAMPLE, add_special=False)
    facts = tokenizer.fingerprint(), tokenizer.bos_id, frozenset(tokenizer.eos_ids), tokenizer.special_ids
    return *facts, tokenizer.has_chat_template, *cut


def _essence(config: ModelConfig) -> ModelConfig:
    """A config without fields that only messages use, and with explicit defaults."""
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    return replace(config, family="", query_scale=round(scale, 12), mtp_layers=0)


def _written(config: ModelConfig, architecture: str, family: Family) -> dict[str, Any]:
    """A config as a config.json of this family, as far as it can express it."""
    activation, _ = family.activation
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    windows = {window for window in config.windows if window is not None}
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    raw: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES.get(family.name, family.name),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        activation: names[config.activation],
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }
    if (scaling := rendered_scaling(config)) is not None:
        raw["rope_scaling"] = scaling
    if family.rope_local_theta is not None:
        raw["rope_local_base_freq"] = config.rope_local_theta
    if family.query_scalar is not None:
        raw["query_pre_attn_scalar"] = round(scale**-2)
    caps = {ATTENTION_CAP: config.attention_softcap, LOGIT_CAP: config.logit_softcap}
    raw |= {key: cap for key, cap in caps.items() if key in family.softcaps}
    if family.slides:
        raw |= {"sliding_window": min(windows, default=None), "use_sliding_window": bool(windows)}
        kinds = [FULL if window is None else SLIDING for window in config.windows]
        raw |= {"layer_types": kinds} if windows else {}
    return raw
