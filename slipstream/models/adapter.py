"""The adapter: any other causal language model of transformers, unmodified, with the same guarantees.

K and V are in our pages. A transformers `Cache` of our own writes the new rows of one segment there and returns all
rows of its sequence; a 4-D mask says what each row sees, and `position_ids` its position, so that siblings of a tree
share a position. Segments run one after the other, so that requests of a batch cannot affect each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from slipstream.attention import Segment
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache
from slipstream.errors import CorruptFile, OptionError, ShapeMismatch
from slipstream.models.adapter_check import require_tree_support
from slipstream.models.fingerprint import Fingerprint
from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint, AdapterConfig
from slipstream.models.formats.hf_layers import FULL, SLIDING
from slipstream.models.model import Model, PassOutput


class Recorder(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache that records only the shapes of what each layer writes."""

    def __init__(self, past: int = 0, keys: int | None = None) -> None:
        self.layers: list[Any] = []  # where transformers' own caches keep their rows
        self.seen: dict[int, tuple[torch.Size, torch.Size]] = {}
        self._past = past
        self._keys = keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new rows of one layer, [1, kv heads, rows, width] each; returns all rows of K and V."""
        self.seen[layer_idx] = key_states.shape, value_states.shape
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that existed before this pass."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a row attends to, and the slot of the first."""
        return (query_length if self._keys is None else self._keys), 0


class SegmentCache(Recorder):
    """Reads and writes the pages of one segment.

    Returns all rows of the pages, including unwritten ones: the mask hides them. So the number of keys changes only
    every PAGE_SIZE tokens.
    """

    def __init__(self, layers: list[LayerStore], segment: Segment, config: AdapterConfig, device: str) -> None:
        pages = segment.table.pages[: -(-(segment.first_slot + segment.rows) // PAGE_SIZE)]
        super().__init__(segment.first_slot, len(pages) * PAGE_SIZE)
        self._data = layers
        self._widths = config.key_width, config.value_width
        self._pages = torch.tensor(pages, device=device)
        slots = torch.from_numpy(segment.slots).to(device)
        self._new_pages = self._pages[slots // PAGE_SIZE]
        self._new_slots = slots % PAGE_SIZE

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in Recorder."""
        super().update(key_states, value_states, layer_idx)
        layer, (key_width, value_width) = self._data[layer_idx], self._widths
        return self._swap(layer.keys, key_states, key_width), self._swap(layer.values, value_states, value_width)

    def _swap(self, data: torch.Tensor, states: torch.Tensor, width: int) -> torch.Tensor:
        """Write new rows [1, kv heads, rows, width] into K or V; all rows of the pages, [1, kv heads, keys, width]."""
        data[self._new_pages, :, self._new_slots, :width] = states[0].transpose(0, 1)
        rows = data.transpose(0, 1).index_select(1, self._pages)
        return rows.flatten(1, 2)[None, :, :, :width]


class Adapter(Model):
    """A model of transformers. Its layers cannot be run, tapped or skipped separately."""

    layered = False

    def __init__(self, checkpoint: AdapterCheckpoint, dtype: torch.dtype, device: str) -> None:
        self.config: AdapterConfig = checkpoint.config
        self.name = checkpoint.name
        self.dtype = dtype
        self.device = device
        self._model = self._load(checkpoint)
        marks = Fingerprint(self.config)
        for name, weight in self._model.named_parameters():
            marks.add(name, weight)
        self.fingerprint = str(marks)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        # One mask serves layers of one kind; models with two kinds take one per kind, by name.
        kinds = [SLIDING if window else FULL for window in self.config.windows] or [FULL]
        self._windows = {kind: self.config.windows[kinds.index(kind)] if kind == SLIDING else None for kind in kinds}
        require_tree_support(self, self._model, checkpoint)

    def _load(self, checkpoint: AdapterCheckpoint) -> Any:
        with checkpoint.asking("transformers cannot load"):
            model, report = AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=self.config.attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below
                dtype=self.dtype,
            )
            for tensor, *shapes in sorted(report["mismatched_keys"]):
                found, expected = map(tuple, shapes)
                raise ShapeMismatch(f"tensor {tensor!r} of {self.name} has shape {found}, expected {expected}")
            for tensor in sorted(report["missing_keys"]):
                raise CorruptFile(f"{self.name} lacks tensor {tensor!r}")
            for tensor in sorted(report["unexpected_keys"]):
                raise checkpoint.refuse(f"does not use tensor {tensor!r}")
            return model.requires_grad_(False).to(self.device).eval()

    def forward(
        self,
        cache: PagedCache,
        store: str,
        segments: Sequence[Segment],
        *,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        if layers is not None:
            self._refuse("a pass over some of its layers")
        if taps:
            self._refuse("the hidden states of its layers")
        data = cache.layers(store)
        logits = torch.cat([self._run(data, segment) for segment in segments])
        return PassOutput(logits, logits.new_zeros(0, self.config.hidden_size), {})

    def _run(self, data: list[LayerStore], segment: Segment) -> torch.Tensor:
        """One segment; logits of the requested rows, [rows, vocab]."""
        pages = SegmentCache(data, segment, self.config, self.device)
        masks = {kind: self._mask(segment, window) for kind, window in self._windows.items()}
        wanted = segment.rows - segment.logits_from
        # There is no way to ask for no logits: 0 means all.
        keep = {"logits_to_keep": max(1, wanted)} if self._keeps_logits else {}
        output = self._model(
            input_ids=torch.tensor([segment.tokens], device=self.device),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=torch.from_numpy(segment.positions).to(self.device)[None],
            past_key_values=pages,
            use_cache=True,
            **keep,
        )
        rows: torch.Tensor = output.logits[0]
        return rows[len(rows) - wanted :, : self.config.vocab_size]

    def _mask(self, segment: Segment, window: int | None) -> torch.Tensor:
        """The mask added to the scores, [1, 1, rows, keys]: 0 for visible keys, the lowest number for the rest."""
        hidden = torch.from_numpy(~visible_keys(segment, window)).to(self.device)
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(hidden, torch.finfo(self.dtype).min)[None, None]

    def _refuse(self, what: str) -> NoReturn:
        raise OptionError(
            f"{self.name} runs through transformers, which does not give {what}",
            hint="use a drafter that reads no hidden states",
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._model.get_input_embeddings()(tokens)
        return rows

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        self._refuse("its final norm")

    @property
    def norm_weight(self) -> torch.Tensor:
        self._refuse("its final norm")

    def head_rows(self, vocab: torch.Tensor) -> torch.Tensor:
        self._refuse("its output head")

    def head(self, hidden: torch.Tensor, vocab: torch.Tensor | None = None) -> torch.Tensor:
        self._refuse("its output head")


def visible_keys(segment: Segment, window: int | None) -> npt.NDArray[np.bool_]:
    """Which keys each new row sees, [rows, keys]; keys are all rows of the pages that the segment reaches into."""
    committed, end = segment.committed, segment.first_slot + segment.rows
    keys = -(-end // PAGE_SIZE) * PAGE_SIZE
    visible = np.zeros((segment.rows, keys), dtype=np.bool_)
    visible[:, :committed] = True
    visible[:, committed:end] = segment.visible
    if window is not None:
        positions = np.arange(keys)
        positions[committed:end] = segment.open_positions
        visible &= segment.positions[:, None] - positions < window
    return visible
