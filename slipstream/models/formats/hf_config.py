"""Hugging Face `config.json` -> ModelConfig. Unsupported settings are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import CorruptFile
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf_layers import mixture, rope, windows
from slipstream.models.formats.hf_reader import HFReader


@dataclass(frozen=True)
class Mixture:
    """Defaults of a family with experts."""

    experts: int
    per_token: int
    size: int | None = None  # of `moe_intermediate_size`; None: experts are of `intermediate_size`
    norm_topk: bool = False  # of `norm_topk_prob`
    has_dense_layers: bool = False  # `mlp_only_layers` and `decoder_sparse_step` say which


@dataclass(frozen=True)
class Family:
    """What an architecture implies and its config.json does not say, defaults included."""

    name: str
    rope_theta: float = 10_000.0
    rope_local_theta: float | None = None  # layers with a window have another rotation base
    norm_eps: float = 1e-6
    norms_from_one: bool = False  # files hold w for norms that multiply by 1 + w
    post_norms: bool = False
    embeds_scaled: bool = False  # by the square root of the width
    activation: tuple[str, str] = ("hidden_act", "silu")  # the key, and what its absence means
    softcaps: Mapping[str, float | None] = field(default_factory=dict)  # supported keys, with defaults
    qkv_bias: bool = False
    clips_qkv: bool = False  # `clip_qkv` is supported
    qk_norm: bool = False
    qk_norm_whole: bool = False
    query_scalar: float | None = None  # of `query_pre_attn_scalar`; None: scores are scaled by the head size
    head_dim: int | None = None  # None: hidden size / heads
    tied_head: bool = False
    window: int | None = None  # of a config without the key; null in the config means none
    slides: bool = False  # layers have a window: all, unless the next three say otherwise
    asks_to_slide: bool = False  # `use_sliding_window` says whether
    slides_late: bool = False  # `max_window_layers` says from which layer on
    full_every: int = 0  # one in so many layers has no window
    mixture: Mixture | None = None


ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
QWEN3 = Family("qwen3", qk_norm=True, head_dim=128, window=4096, slides=True, asks_to_slide=True, slides_late=True)
GEMMA2 = Family(
    "gemma2",
    norms_from_one=True,
    post_norms=True,
    embeds_scaled=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    softcaps={ATTENTION_CAP: 50.0, LOGIT_CAP: 30.0},
    query_scalar=256.0,
    head_dim=256,
    tied_head=True,
    window=4096,
    slides=True,
    full_every=2,
)
ARCHITECTURES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window=4096, slides=True),
    "Qwen2ForCausalLM": replace(QWEN3, name="qwen2", qkv_bias=True, qk_norm=False, head_dim=None),
    "Qwen3ForCausalLM": QWEN3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        name="gemma3",
        rope_theta=1e6,
        rope_local_theta=1e4,
        softcaps={LOGIT_CAP: None},
        qk_norm=True,
        full_every=6,
    ),
    "MixtralForCausalLM": Family(
        "mixtral", rope_theta=1e6, norm_eps=1e-5, slides=True, mixture=Mixture(8, 2, norm_topk=True)
    ),
    "Qwen3MoeForCausalLM": replace(
        QWEN3,
        name="qwen3moe",
        head_dim=None,
        slides_late=False,
        mixture=Mixture(128, 8, size=768, has_dense_layers=True),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", norm_eps=1e-5, clips_qkv=True, qk_norm=True, qk_norm_whole=True, mixture=Mixture(64, 8)
    ),
}

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # their names here and in ModelConfig
# Options that change the arithmetic, with the values that mean "not used" (absent and null always do).
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    ATTENTION_CAP: (),
    LOGIT_CAP: (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
}
# The number of layers for multi-token prediction, as DeepSeek, GLM and MiMo call it, and as Qwen does.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any], source: str, *, has_head: bool
) -> ModelConfig:
    """The config of the model called `source`.

    `raw` is config.json, `generation` is generation_config.json (empty if there is none), `has_head`: whether the
    weights have an output head, on which some files rely instead of `tie_word_embeddings`.
    """
    reader = HFReader(raw, source)
    family = family_of(raw, source)
    _refuse_unsupported(reader, family)
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    layers, context = reader.count("num_hidden_layers"), reader.count("max_position_embeddings")
    kv_heads = reader.count("num_key_value_heads", heads)
    head_dim = reader.count("head_dim", family.head_dim or hidden // heads)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise CorruptFile(f"{source}: config.json has {heads} heads over {kv_heads} KV heads of size {head_dim}")
    scalar = family.query_scalar
    return ModelConfig(
        family=family.name,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.count("intermediate_size"),
        context=context,
        norm_eps=reader.number("rms_norm_eps", family.norm_eps),
        post_norms=family.post_norms,
        tied_head=bool(raw.get("tie_word_embeddings", family.tied_head)) or not has_head,
        embed_scale=hidden**0.5 if family.embeds_scaled else 1.0,
        logit_softcap=reader.optional(LOGIT_CAP, family.softcaps.get(LOGIT_CAP)),
        qkv_bias=family.qkv_bias,
        qkv_clip=reader.optional("clip_qkv") if family.clips_qkv else None,
        qk_norm=family.qk_norm,
        qk_norm_whole=family.qk_norm_whole,
        query_scale=None if scalar is None else reader.number("query_pre_attn_scalar", scalar) ** -0.5,
        attention_softcap=reader.optional(ATTENTION_CAP, family.softcaps.get(ATTENTION_CAP)),
        windows=windows(reader, family, layers),
        activation=_activation(reader, family),
        mtp_layers=next((reader.count(key) for key in MTP_LAYERS if raw.get(key)), 0),
        bos_id=next(iter(_token_ids(generation, raw, key="bos_token_id")), None),
        eos_ids=tuple(sorted(_token_ids(generation, raw, key="eos_token_id"))),
        **rope(reader, family, context),
        **mixture(reader, family.mixture, layers),
    )


def family_of(raw: Mapping[str, Any], source: str) -> Family:
    """The family that config.json names; UnsupportedModel if it is not supported."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise HFReader(raw, source).refuse(f"has architecture {name!r}", hint=f"supported: {supported}")
    return ARCHITECTURES[name]


def _refuse_unsupported(reader: HFReader, family: Family) -> None:
    quantised = reader.raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise reader.refuse(
            f"is quantised with {method or 'an unnamed method'}", hint="use the unquantised weights or a GGUF file"
        )
    for key, neutral in REFUSED.items():
        value = reader.raw.get(key)
        if value is not None and value not in neutral and key not in family.softcaps:
            raise reader.refuse(f"needs {key} = {value!r}")


def _activation(reader: HFReader, family: Family) -> str:
    key, default = family.activation
    name = reader.raw.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise reader.refuse(f"needs {key} = {name!r}", hint=f"supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _token_ids(*sources: Mapping[str, Any], key: str) -> dict[int, None]:
    """The ids under `key` in all `sources`, each an int or a list of them; in order, without repeats."""
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get(key)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                ids[token] = None
    return ids
