"""The shape of a decoder, for every file format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rope scaling: long wavelengths divided by `factor`, short ones kept, the middle interpolated."""

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
    """Everything the decoder needs; one field per fact, no family names in the forward pass."""

    family: str  # "llama", "qwen3", "gemma2" and so on: for messages only
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    context: int  # the longest sequence the model was trained for
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | LinearScaling | None = None
    rope_factors: tuple[float, ...] = ()  # each inverse frequency is divided by its own (head_dim / 2 of them; GGUF)
    rope_local_theta: float | None = None  # base of the layers with a window, unscaled; None: as the others (Gemma 3)
    norm_eps: float = 1e-5
    post_norms: bool = False  # outputs of attention and MLP are normed before they are added (Gemma)
    tied_head: bool = False  # the output head is the embedding table
    embed_scale: float = 1.0  # embeddings are multiplied by it, rounded to the model's dtype (Gemma)
    logit_softcap: float | None = None  # c: logits become c * tanh(logit / c) (Gemma 2)
    qkv_bias: bool = False
    qkv_clip: float | None = None  # elements of q, k and v are clamped to this (OLMoE)
    qk_norm: bool = False  # RMS norm over each head's q and k (Qwen3)
    qk_norm_whole: bool = False  # that norm is over all heads together (OLMoE)
    query_scale: float | None = None  # scores are multiplied by it; None: head_dim ** -0.5
    attention_softcap: float | None = None  # as for logits, of scores before the mask (Gemma 2)
    windows: tuple[int | None, ...] = ()  # sliding window per layer; () means none anywhere
    activation: str = "silu"  # of the MLPs' gates: "silu" or "gelu_tanh"
    experts: int = 0  # 0: a dense MLP
    experts_per_token: int = 0
    expert_size: int = 0  # the intermediate size of one expert; 0: the same as a dense MLP's
    norm_topk: bool = True  # expert weights renormalised over the chosen experts
    dense_layers: tuple[int, ...] = ()  # layers with a dense MLP where the others have experts
    mtp_layers: int = 0  # layers for multi-token prediction that the file declares; the decoder ignores them
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """How many positions (itself included) a query of `layer` may attend to; None: all."""
        return self.windows[layer] if self.windows else None

    def local_rope(self, layer: int) -> bool:
        """Whether `layer` rotates by `rope_local_theta`."""
        return self.rope_local_theta is not None and self.window(layer) is not None

    def mixture(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Number of weights."""
        width, kv = self.hidden_size, self.kv_heads * self.head_dim
        queries = self.heads * self.head_dim
        attention = 2 * width * queries + 2 * width * kv
        bias = queries + 2 * kv if self.qkv_bias else 0
        norms = width * (4 if self.post_norms else 2)
        if self.qk_norm:
            norms += queries + kv if self.qk_norm_whole else 2 * self.head_dim
        dense = 3 * width * self.intermediate_size
        mixture = 3 * width * (self.expert_size or self.intermediate_size) * self.experts + width * self.experts
        mixtures = sum(map(self.mixture, range(self.layers)))
        tables = self.vocab_size * width * (1 if self.tied_head else 2)
        layers = self.layers * (attention + bias + norms) + mixtures * mixture + (self.layers - mixtures) * dense
        return tables + width + layers

    def weights_read(self, rows: int) -> float:
        """Weights that a pass over `rows` rows reads: of an MoE more per row, as if experts were random."""
        width = self.hidden_size
        expert = 3 * width * (self.expert_size or self.intermediate_size)
        mixtures = self.experts * expert * sum(map(self.mixture, range(self.layers)))
        looked_up = 0 if self.tied_head else self.vocab_size * width
        unread = (1 - self.experts_per_token / self.experts) ** rows if self.experts else 0.0
        return self.parameters - looked_up - mixtures * unread

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one token of context needs."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_size
