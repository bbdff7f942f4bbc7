"""A separate draft model grows trees on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slipstream.drafters.device.tree_loop import Passes, TreeDraft, TreeLoop

if TYPE_CHECKING:
    from slipstream.attention import Tiles
    from slipstream.drafters.draft_model import DraftModelDrafter
    from slipstream.gpu.forest import Followed
    from slipstream.gpu.lanes import LaneRows, Lanes
    from slipstream.models.decoder import Decoder


class ModelLoop(TreeLoop):
    """All layers of another decoder, over pages of its own store."""

    def __init__(self, drafter: DraftModelDrafter, draft: TreeDraft, lanes: Lanes) -> None:
        super().__init__(drafter, draft, lanes)
        self._model: Decoder = drafter.decoder
        self._data = drafter.layers
        config = self._model.config
        # Padding rows of the vocabulary have no tokens.
        self.ids = torch.arange(min(config.vocab_size, drafter.target.config.vocab_size), device=lanes.device)
        self._passes = Passes(lanes, draft.widths, config, lanes.depth + 1)

    def begin(self) -> torch.Tensor:
        hidden = self._run(self.lanes.last_tokens.flatten(), *self._passes.fresh(self.first_fresh))
        return self._judged(self.last_fresh(hidden))

    def follow(self, level: int, nodes: Followed) -> torch.Tensor:
        return self._judged(self._run(nodes.tokens.flatten(), *self._passes.level(level, nodes)))

    def _run(self, tokens: torch.Tensor, rows: LaneRows, tiles: Tiles) -> torch.Tensor:
        model = self._model
        x = model.embed(tokens)
        model.run_(x, rows, model.attention_over(tiles), self._data, range(model.config.layers))
        return x

    def _judged(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.head(hidden)[:, : len(self.ids)]

    def observe(self, path: torch.Tensor, accepted: torch.Tensor, taps: dict[int, torch.Tensor]) -> None:
        """Nothing to keep: the model reads tokens only."""
