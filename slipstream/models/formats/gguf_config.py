"""GGUF metadata -> ModelConfig. Unsupported settings are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import CorruptFile, ShapeMismatch, UnsupportedModel
from slipstream.models.config import LinearScaling, ModelConfig
from slipstream.models.formats.gguf_metadata import GGUFHead

ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Architecture:
    """What an architecture implies and its metadata does not say."""

    post_norms: bool = False
    embeds_scaled: bool = False  # by the square root of the width
    activation: str = "silu"
    softcaps: Mapping[str, float] = field(default_factory=dict)  # supported keys, with defaults; 0: none
    qk_norm_whole: bool = False
    norm_topk: bool = True
    window: int = 0  # if the metadata has none
    full_every: int = 0  # one in so many layers has no window
    rope_local_theta: float | None = None  # of layers with a window
    # The metadata does not say what scales the queries: the head size, except in the one model with this many layers:
    # the hidden size divided by the heads.
    wide_layers: int = 0


GEMMA2 = Architecture(
    post_norms=True,
    embeds_scaled=True,
    activation="gelu_tanh",
    softcaps={ATTENTION_CAP: 50.0, LOGIT_CAP: 30.0},
    window=4096,
    full_every=2,
    wide_layers=46,
)
ARCHITECTURES = {
    "llama": Architecture(),  # also what Mistral, Mixtral and SmolLM2 call themselves
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(),
    "olmoe": Architecture(qk_norm_whole=True, norm_topk=False),
    "gemma2": GEMMA2,
    "gemma3": replace(
        GEMMA2, softcaps={LOGIT_CAP: 0.0}, window=0, full_every=6, rope_local_theta=10_000.0, wide_layers=62
    ),
}

# Options that change the arithmetic, with the values that mean "not used".
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    PATTERN: (),
    ATTENTION_CAP: (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    LOGIT_CAP: (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}

# Layers and experts are listed before any tensor can disprove their number; a corrupt one must not exhaust the memory.
MOST_LISTED = 10_000


class _Reader:
    """The metadata of one file, read by key without the architecture's prefix; errors name file and key."""

    def __init__(self, head: GGUFHead, source: str) -> None:
        self.metadata = head.metadata
        self.source = source
        split = head.metadata.get("split.count", 0)
        if isinstance(split, int) and split > 1:
            raise UnsupportedModel(f"{source} is one of {split} pieces", hint="join them with gguf-split --merge")
        name = head.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UnsupportedModel(f"{source} has architecture {name!r}", hint=f"supported: {', '.join(ARCHITECTURES)}")
        self.architecture, self.known = name, ARCHITECTURES[name]

    def number(self, key: str, default: float | None = None) -> float:
        """A number, or a list whose elements are all that number."""
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UnsupportedModel(f"{self.source} has a {key} that differs from layer to layer")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float):
            problem = "lacks metadata" if value is None else f"holds {value!r} as"
            raise CorruptFile(f"{self.source} {problem} {key}")
        if not 0 <= value < float("inf"):
            raise CorruptFile(f"{self.source} holds {value!r} as {key}")
        return value

    def count(self, key: str, default: int | None = None, most: int = 2**48) -> int:
        """A whole number of at least one (or the default)."""
        value = self.number(key, default)
        if value != default and not (1 <= value <= most and value == int(value)):
            raise CorruptFile(f"{self.source} holds {value!r} as {self.architecture}.{key}")
        return int(value)

    def refuse_unsupported(self) -> None:
        honoured = {*self.known.softcaps, *([PATTERN] if self.known.full_every else [])}
        for key, neutral in REFUSED.items():
            value = self.metadata.get(f"{self.architecture}.{key}")
            if value is not None and value not in neutral and key not in honoured:
                raise UnsupportedModel(f"{self.source} needs {self.architecture}.{key} = {value!r}")

    def softcap(self, key: str) -> float | None:
        """A soft cap, if the architecture has it and it is not 0."""
        return self.number(key, self.known.softcaps[key]) or None if key in self.known.softcaps else None

    def token(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        # Converters write 2**32 - 1 for "none".
        return value if isinstance(value, int) and 0 <= value < 0xFFFFFFFF else None


def config_from_gguf(head: GGUFHead, source: str, rope_factors: tuple[float, ...]) -> ModelConfig:
    """The config of the file called `source`; `rope_factors` is its `rope_freqs` tensor, if it has one."""
    reader = _Reader(head, source)
    reader.refuse_unsupported()
    known = reader.known
    hidden, heads = reader.count("embedding_length"), reader.count("attention.head_count")
    kv_heads = reader.count("attention.head_count_kv", heads)
    mtp_layers = reader.count("nextn_predict_layers", 0)
    layers = reader.count("block_count", most=MOST_LISTED) - mtp_layers  # which counts both
    if layers < 1:
        raise CorruptFile(f"{source} has {mtp_layers} layers for multi-token prediction and none besides")
    head_dim = reader.count("attention.key_length", hidden // heads)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise CorruptFile(f"{source} has {heads} heads over {kv_heads} KV heads of size {head_dim}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.count(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{source} has a {reader.architecture}.{key} other than its head size {head_dim}")
    experts = reader.count("expert_count", 0, most=MOST_LISTED)
    if rope_factors and len(rope_factors) != head_dim // 2:
        raise ShapeMismatch(
            f"tensor 'rope_freqs.weight' of {source} has shape ({len(rope_factors)},), expected ({head_dim // 2},)"
        )
    embedding = head.tensors.get("token_embd.weight")
    bos, ends = reader.token("bos"), [reader.token(name) for name in ("eos", "eot", "eom")]
    return ModelConfig(
        family="mixtral" if experts and reader.architecture == "llama" else reader.architecture,
        vocab_size=reader.count("vocab_size", embedding.shape[0] if embedding and embedding.shape else None),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.count("feed_forward_length"),
        context=reader.count("context_length"),
        rope_theta=reader.number("rope.freq_base", 10_000.0),
        rope_scaling=_scaling(reader, rope_factors),
        rope_factors=rope_factors,
        rope_local_theta=_local_theta(reader),
        norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        post_norms=known.post_norms,
        tied_head="output.weight" not in head.tensors,
        embed_scale=hidden**0.5 if known.embeds_scaled else 1.0,
        logit_softcap=reader.softcap(LOGIT_CAP),
        qkv_bias="blk.0.attn_q.bias" in head.tensors,
        qkv_clip=reader.number("attention.clamp_kqv", 0.0) or None,
        qk_norm="blk.0.attn_q_norm.weight" in head.tensors,
        qk_norm_whole=known.qk_norm_whole,
        query_scale=(hidden / heads) ** -0.5 if layers == known.wide_layers else None,
        attention_softcap=reader.softcap(ATTENTION_CAP),
        windows=_windows(reader, layers),
        activation=known.activation,
        experts=experts,
        experts_per_token=reader.count("expert_used_count") if experts else 0,
        expert_size=reader.count("expert_feed_forward_length", 0) if experts else 0,
        norm_topk=bool(reader.metadata.get(f"{reader.architecture}.expert_weights_norm", known.norm_topk)),
        mtp_layers=mtp_layers,
        bos_id=bos,
        eos_ids=tuple(sorted({token for token in ends if token is not None})),
    )


def _windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if no layer has one."""
    window = reader.count("attention.sliding_window", reader.known.window)
    if not window:
        return ()
    if not reader.known.full_every:
        return (window,) * layers
    every = reader.count(PATTERN, reader.known.full_every)
    return tuple(window if (layer + 1) % every else None for layer in range(layers))


def _local_theta(reader: _Reader) -> float | None:
    theta = reader.known.rope_local_theta
    return None if theta is None else reader.number("rope.freq_base_swa", theta)


def _scaling(reader: _Reader, rope_factors: tuple[float, ...]) -> LinearScaling | None:
    kind = reader.metadata.get(f"{reader.architecture}.rope.scaling.type", "linear")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel(f"{reader.source} uses rope scaling {kind!r}", hint="supported: none, linear")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if factor in (0.0, 1.0):
        return None
    if rope_factors:
        raise UnsupportedModel(f"{reader.source} scales its rope twice: by {factor} and by a tensor")
    return LinearScaling(factor)
