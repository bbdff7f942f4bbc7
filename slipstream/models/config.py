"""The shape of a decoder, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rope scaling: long wavelengths slowed by `factor`, short ones kept, the middle blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know; one field per fact, no family names in the forward pass."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "mixtral": for messages only
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    context: int  # the longest sequence the model was made for
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | LinearScaling | None = None
    rope_factors: tuple[float, ...] = ()  # each inverse frequency is divided by its own (head_dim / 2 of them; GGUF)
    norm_eps: float = 1e-5
    tied_head: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head's q and k (Qwen3)
    windows: tuple[int | None, ...] = ()  # sliding window per layer; () means none anywhere
    experts: int = 0  # 0: a dense MLP
    experts_per_token: int = 0
    norm_topk: bool = True  # expert weights renormalised over the chosen experts
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """How many positions (itself included) a query of `layer` may look back over; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        width, kv = self.hidden_size, self.kv_heads * self.head_dim
        attention = 2 * width * self.heads * self.head_dim + 2 * width * kv
        mlp = 3 * width * self.intermediate_size * max(1, self.experts) + width * self.experts
        bias = self.heads * self.head_dim + 2 * kv if self.qkv_bias else 0
        norms = 2 * width + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.vocab_size * width * (1 if self.tied_head else 2)
        return tables + width + self.layers * (attention + mlp + bias + norms)

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one token of context needs."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_size
