"""A stack of layers and the output rows after it, for training and for drafting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from slipstream.cache import LayerStore
from slipstream.drafters.heads.head import Frame, Head
from slipstream.drafters.heads.head_layer import HeadLayer, PagedHeadLayer
from slipstream.drafters.heads.head_rows import HeadRows
from slipstream.models.layers.linear import make_draft_linear
from slipstream.models.layers.norm import RowNorms


class LayerStack(nn.Module):
    """Layers of the target's width, with a norm before each and one after the last."""

    def __init__(self, frame: Frame, layers: int, mlp: int) -> None:
        super().__init__()
        config = frame.config
        self.eps = config.norm_eps
        self.norms = nn.ParameterList(torch.ones(config.hidden_size) for _ in range(layers))
        self.layers = nn.ModuleList(HeadLayer(config, config.hidden_size, mlp or None) for _ in range(layers))
        self.norm = nn.Parameter(frame.norm.detach().clone().float().cpu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Whole texts [batch, length, width] -> what the output rows read, with causal attention."""
        positions = torch.arange(x.shape[1], device=x.device)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(self._normed(x, norm), x, positions)
        return self._normed(x, self.norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)


class StackHead(Head):
    """A head that is only a stack of layers."""

    def __init__(self, frame: Frame, layers: int, mlp: int) -> None:
        super().__init__(frame)
        self.stack = LayerStack(frame, layers, mlp)


class PagedStack:
    """A `LayerStack` over the rows of a pass, with one layer of a store per layer."""

    def __init__(self, head: StackHead, dtype: torch.dtype, device: str) -> None:
        def ready(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype)

        stack = head.stack
        self._norms = [RowNorms(ready(norm), eps=stack.eps) for norm in stack.norms]
        self._layers = [PagedHeadLayer(layer, dtype, device) for layer in stack.layers if isinstance(layer, HeadLayer)]
        self._norm = RowNorms(ready(stack.norm), eps=stack.eps)
        self._output = make_draft_linear(ready(head.frame.rows))

    def __len__(self) -> int:
        return len(self._layers)

    def __call__(self, x: torch.Tensor, rows: HeadRows, stores: Sequence[LayerStore]) -> torch.Tensor:
        """[rows, width] -> logits [rows that request them, draft tokens]; x is unchanged."""
        return self.judge(rows.wanted(self.run(x, rows, stores)))

    def run(self, x: torch.Tensor, rows: HeadRows, stores: Sequence[LayerStore]) -> torch.Tensor:
        """The layers' output, [rows, width]."""
        for norm, layer, store in zip(self._norms, self._layers, stores, strict=True):
            x = layer(norm(x), x, rows, store)
        return x

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        """The layers' output [rows, width] -> logits [rows, draft tokens]."""
        return self._output(self._norm(x))
