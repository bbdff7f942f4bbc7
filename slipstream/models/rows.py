"""The rows of a pass as layers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slipstream.attention import Segment
from slipstream.cache import PAGE_SIZE, LayerStore


class PlacedRows(Protocol):
    """The rows of a pass as the layers see them: their positions, and where their K/V go."""

    positions: torch.Tensor  # int64 [rows]
    highest: int  # no position is above it
    places: tuple[torch.Tensor, torch.Tensor] | None  # where K/V go: pages and offsets in them, if both are on a GPU

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Write k and v [2, kv heads, rows, size] to one layer."""
        ...


class Rows:
    """The rows of a pass, flattened: tokens, positions, where K/V go, which logits are needed."""

    def __init__(self, segments: Sequence[Segment], device: str) -> None:
        positions = _joined([s.positions for s in segments])
        self.highest = int(positions.max())
        self.tokens = tokens_of(segments, device)
        self.positions = torch.from_numpy(positions).to(device)
        # Rows of one sequence in one page, as in every step of a single sequence, are written by a plain copy.
        first = segments[0]
        page, self._first = divmod(first.first_slot, PAGE_SIZE)
        on_cpu = device == "cpu"
        single = on_cpu and len(segments) == 1 and self._first + first.rows <= PAGE_SIZE
        self._one_page = first.table.pages[page] if single else None
        self.places: tuple[torch.Tensor, torch.Tensor] | None = None
        if not single:
            slots = _joined([s.slots for s in segments])
            pages = _joined([np.asarray(s.table.pages)[s.slots // PAGE_SIZE] for s in segments])
            self._pages = torch.from_numpy(pages).to(device)
            self._slots = torch.from_numpy(slots % PAGE_SIZE).to(device)
            self.places = None if on_cpu else (self._pages, self._slots)
        self.wanted = wanted_rows(segments, device)

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Write k and v [2, kv heads, rows, size] to one layer."""
        if self._one_page is not None:
            layer.rows(self._one_page, self._first, kv.shape[2]).copy_(kv)
        else:
            layer.both[:, self._pages, :, self._slots] = kv.permute(2, 0, 1, 3)


def tokens_of(segments: Sequence[Segment], device: str) -> torch.Tensor:
    """Token ids of the rows, [rows]."""
    tokens = np.array([token for s in segments for token in s.tokens], np.int64)  # faster than a tensor of a list
    return torch.from_numpy(tokens).to(device)


def wanted_rows(segments: Sequence[Segment], device: str) -> torch.Tensor | None:
    """Indices of the rows whose logits are needed; None: all."""
    if not any(s.logits_from for s in segments):
        return None
    wanted = _joined([np.arange(s.rows) >= s.logits_from for s in segments])
    return torch.from_numpy(np.flatnonzero(wanted)).to(device)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
