"""Hugging Face `config.json` -> ModelConfig. What it asks for and we do not compute is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.models.config import LinearScaling, Llama3Scaling, ModelConfig


@dataclass(frozen=True)
class Family:
    """What an architecture's name says and its config.json does not, defaults included."""

    name: str
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden size / heads
    window: int | None = None  # of a config without the key; null in the config means none
    slides: bool = False  # a window holds for every layer
    slides_late: bool = False  # `use_sliding_window` says whether, `max_window_layers` from which layer on
    experts: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window=4096, slides=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window=4096, slides_late=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, window=4096, slides_late=True),
    "MixtralForCausalLM": Family("mixtral", rope_theta=1e6, norm_eps=1e-5, slides=True, experts=True),
}

# Options that change the arithmetic, with the values that mean "not used" (absent and null always do).
REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

LARGEST = 2**48
# Of these we make a list before any weight can prove the number wrong; a garbled one must not eat the memory.
LISTED, MOST_LISTED = ("num_hidden_layers", "num_local_experts"), 10_000


class _Reader:
    """One config.json, read by key; errors name the file and the key."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def number(self, key: str, default: float | None = None, within: Mapping[str, Any] | None = None) -> float:
        """A positive number under `key` of config.json, or of a dictionary in it."""
        value = (self.raw if within is None else within).get(key)
        value = default if value is None else value
        if value is None:
            raise CorruptFile(f"{self.source}: config.json lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise CorruptFile(f"{self.source}: config.json has {key} = {value!r}")
        return value

    def count(self, key: str, default: int | None = None, within: Mapping[str, Any] | None = None) -> int:
        """The same, whole."""
        value = self.number(key, default, within)
        if value != int(value) or (key in LISTED and value > MOST_LISTED):
            raise CorruptFile(f"{self.source}: config.json has {key} = {value!r}")
        return int(value)

    def refuse(self, what: str, hint: str | None = None) -> UnsupportedModel:
        return UnsupportedModel(f"{self.source} {what}", hint=hint)


def config_from_hf(
    raw: Mapping[str, Any], generation: Mapping[str, Any], source: str, *, has_head: bool
) -> ModelConfig:
    """The config of the model called `source`.

    `raw` is config.json, `generation` is generation_config.json (empty if there is none), `has_head` tells whether the
    weights have an output head of their own: some files rely on that instead of `tie_word_embeddings`.
    """
    reader = _Reader(raw, source)
    family = _family(reader)
    _refuse_unsupported(reader)
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    layers, context = reader.count("num_hidden_layers"), reader.count("max_position_embeddings")
    kv_heads = reader.count("num_key_value_heads", heads)
    head_dim = reader.count("head_dim", family.head_dim or hidden // heads)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise CorruptFile(f"{source}: config.json has {heads} heads over {kv_heads} KV heads of size {head_dim}")
    theta, scaling = _rope(reader, family, context)
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
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=reader.number("rms_norm_eps", family.norm_eps),
        tied_head=bool(raw.get("tie_word_embeddings")) or not has_head,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=_windows(reader, family, layers),
        experts=reader.count("num_local_experts", 8) if family.experts else 0,
        experts_per_token=reader.count("num_experts_per_tok", 2) if family.experts else 0,
        bos_id=next(iter(_token_ids(generation, raw, key="bos_token_id")), None),
        eos_ids=tuple(sorted(_token_ids(generation, raw, key="eos_token_id"))),
    )


def _family(reader: _Reader) -> Family:
    names = reader.raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise reader.refuse(f"has architecture {name!r}", hint=f"supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_unsupported(reader: _Reader) -> None:
    quantised = reader.raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise reader.refuse(
            f"is quantised with {method or 'an unnamed method'}", hint="use the unquantised weights or a GGUF file"
        )
    for key, neutral in REFUSED.items():
        value = reader.raw.get(key)
        if value is not None and value not in neutral:
            raise reader.refuse(f"needs {key} = {value!r}")


def _rope(reader: _Reader, family: Family, context: int) -> tuple[float, Llama3Scaling | LinearScaling | None]:
    """The base and its scaling; transformers 5 keeps both in `rope_parameters`, transformers 4 in two places."""
    rope: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = reader.raw.get(key) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise reader.refuse(f"has {key} that differ by kind of layer")
        rope |= given
        if kind := given.get("rope_type") or given.get("type"):  # the older of the two names
            rope["rope_type"] = kind
    theta = reader.number("rope_theta", reader.number("rope_theta", family.rope_theta), rope)
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise reader.refuse(f"needs partial_rotary_factor = {rope['partial_rotary_factor']!r}")
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(reader.number("factor", None, rope))
    if kind == "llama3":
        original = reader.count("original_max_position_embeddings", context)
        return theta, Llama3Scaling(
            factor=reader.number("factor", None, rope),
            low_freq_factor=reader.number("low_freq_factor", None, rope),
            high_freq_factor=reader.number("high_freq_factor", None, rope),
            original_context=reader.count("original_max_position_embeddings", original, rope),
        )
    raise reader.refuse(f"uses rope scaling {kind!r}", hint="supported: default, linear, llama3")


def _windows(reader: _Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if no layer has one."""
    slides = family.slides or (family.slides_late and bool(reader.raw.get("use_sliding_window")))
    if not slides or reader.raw.get("sliding_window", family.window) is None:
        return ()
    window = reader.count("sliding_window", family.window)
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        first = reader.raw.get("max_window_layers", 28) if family.slides_late else 0
        if not isinstance(first, int):
            raise CorruptFile(f"{reader.source}: config.json has max_window_layers = {first!r}")
        kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CorruptFile(f"{reader.source}: config.json has layer_types that do not name its {layers} layers")
    # The classes whose every layer slides have no notion of another kind of layer, whatever the file says.
    allowed = {"sliding_attention"} if family.slides else {"full_attention", "sliding_attention"}
    if unknown := sorted({str(kind) for kind in kinds} - allowed):
        raise reader.refuse(f"has layer_types with {unknown[0]!r}", hint=f"supported: {', '.join(sorted(allowed))}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _token_ids(*sources: Mapping[str, Any], key: str) -> dict[int, None]:
    """The ids under `key` in all `sources`, each an int or a list of them; in order, without repeats."""
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get(key)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                ids[token] = None
    return ids
