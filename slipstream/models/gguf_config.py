"""GGUF metadata -> ModelConfig. What the metadata asks for and we do not compute is refused by name."""

from __future__ import annotations

from typing import Any

from slipstream.errors import CorruptFile, ShapeMismatch, UnsupportedModel
from slipstream.models.config import LinearScaling, ModelConfig
from slipstream.models.gguf_metadata import GGUFHead

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # "llama" is also what Mistral, Mixtral and SmolLM2 call themselves

# Options that change the arithmetic, with the values that mean "not used".
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
}

# We list layers and experts before any tensor can prove their number wrong; a garbled one must not eat the memory.
MOST_LISTED = 10_000


class _Reader:
    """The metadata of one file, read by key without the architecture's prefix; errors name file and key."""

    def __init__(self, head: GGUFHead, source: str) -> None:
        self.metadata = head.metadata
        self.source = source
        split = head.metadata.get("split.count", 0)
        if isinstance(split, int) and split > 1:
            raise UnsupportedModel(f"{source} is one of {split} pieces", hint="join them with gguf-split --merge")
        self.architecture = head.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{source} has architecture {self.architecture!r}", hint=f"supported: {', '.join(ARCHITECTURES)}"
            )

    def number(self, key: str, default: float | None = None) -> float:
        """A number, or one that is the same for every layer."""
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
        for key, neutral in REFUSED.items():
            value = self.metadata.get(f"{self.architecture}.{key}")
            if value is not None and value not in neutral:
                raise UnsupportedModel(f"{self.source} needs {self.architecture}.{key} = {value!r}")

    def token(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        # Converters write 2**32 - 1 for "there is none".
        return value if isinstance(value, int) and 0 <= value < 0xFFFFFFFF else None


def config_from_gguf(head: GGUFHead, source: str, rope_factors: tuple[float, ...]) -> ModelConfig:
    """The config of the file called `source`; `rope_factors` is its `rope_freqs` tensor, if it has one."""
    reader = _Reader(head, source)
    reader.refuse_unsupported()
    hidden, heads = reader.count("embedding_length"), reader.count("attention.head_count")
    layers, kv_heads = reader.count("block_count", most=MOST_LISTED), reader.count("attention.head_count_kv", heads)
    head_dim = reader.count("attention.key_length", hidden // heads)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise CorruptFile(f"{source} has {heads} heads over {kv_heads} KV heads of size {head_dim}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.count(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{source} has a {reader.architecture}.{key} other than its head size {head_dim}")
    experts = reader.count("expert_count", 0, most=MOST_LISTED)
    window = reader.count("attention.sliding_window", 0)
    middle = reader.count("feed_forward_length")
    if experts and reader.count("expert_feed_forward_length", middle) != middle:
        raise UnsupportedModel(f"{source} has an expert_feed_forward_length other than its feed_forward_length")
    if rope_factors and len(rope_factors) != head_dim // 2:
        raise ShapeMismatch(
            f"tensor 'rope_freqs.weight' of {source} has shape ({len(rope_factors)},), expected ({head_dim // 2},)"
        )
    embedding = head.tensors.get("token_embd.weight")
    bos, ends = reader.token("bos"), [reader.token(name) for name in ("eos", "eot", "eom")]
    return ModelConfig(
        family="mixtral" if experts else str(reader.architecture),
        vocab_size=reader.count("vocab_size", embedding.shape[0] if embedding and embedding.shape else None),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=middle,
        context=reader.count("context_length"),
        rope_theta=reader.number("rope.freq_base", 10_000.0),
        rope_scaling=_scaling(reader, rope_factors),
        rope_factors=rope_factors,
        norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in head.tensors,
        qkv_bias="blk.0.attn_q.bias" in head.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in head.tensors,
        windows=(window,) * layers if window else (),
        experts=experts,
        experts_per_token=reader.count("expert_used_count") if experts else 0,
        bos_id=bos,
        eos_ids=tuple(sorted({token for token in ends if token is not None})),
    )


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
