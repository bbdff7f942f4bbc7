"""Plain decoding in bursts: several steps of a whole batch on the device, without the host.

Where nothing is drafted, a step asks the host for nothing that it could not know before: where K/V go, what noise the
next choice reads, which pages a sequence may fill. So a burst lays that out once, runs its steps one after the other
(on a GPU as replays of a captured graph), and copies all tokens to the host in one go. The host then gives each
sequence its tokens up to the one that ends it, and what was computed behind an end is dropped.

Steps of a burst choose what single steps choose. A batch is filled up to one of a few sizes by repeating its first
sequence, whose twins write the same K/V to the same slots.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from slipstream import noise
from slipstream.attention import Tiles
from slipstream.cache import PAGE_SIZE, LayerStore, PagedCache
from slipstream.choices import choose_rows
from slipstream.drafters.registry import AnyDrafter
from slipstream.engine.endings import emit_run
from slipstream.engine.scheduler import Work
from slipstream.graphs import Graphs, bucket
from slipstream.models.decoder import Decoder
from slipstream.models.model import Model
from slipstream.sequence import TARGET, Sequence
from slipstream.verify import Match, Verifier

STEPS = 16  # of a burst at most: tokens reach a stream, and prompts their turn, that much later


def make_burst(model: Model, cache: PagedCache, drafter: AnyDrafter, verifier: Verifier) -> Burst | None:
    """Bursts, where such an engine can run them: nothing is drafted, and a pass can be captured."""
    if isinstance(model, Decoder) and model.captures and drafter.blind and isinstance(verifier, Match):
        return Burst(model, cache)
    return None


class Lanes:
    """The buffers of a burst, one lane per sequence. Each step reads them, and moves them on to the next."""

    def __init__(self, size: int, model: Decoder) -> None:
        config, device = model.config, model.device
        pages = -(-config.context // PAGE_SIZE)
        self.tiles = Tiles.lone(size, pages, config.heads // config.kv_heads, device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)  # the roots: not in the cache yet
        self.last = torch.zeros(size, dtype=torch.int32, device=device)  # the last slot that a lane may write
        self.stems = torch.zeros(2, size, dtype=torch.int64, device=device)  # of the samplers
        self.temperatures = torch.zeros(size, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(STEPS, size, dtype=torch.int64, device=device)  # by step and lane
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def fill(self, sequences: list[Sequence], steps: int) -> None:
        """Set the lanes up for the next `steps` tokens of the sequences, whose slots are reserved."""
        size = len(self.tokens)
        lanes = sequences + sequences[:1] * (size - len(sequences))
        slots = np.array([s.cached for s in lanes], dtype=np.int32)
        rooms = np.array([min(steps, s.remaining) for s in lanes], dtype=np.int32)
        width = max(len(s.table.pages) for s in sequences)
        tables = np.zeros((size, width), dtype=np.int32)
        for table, sequence in zip(tables, lanes, strict=True):
            pages = sequence.table.pages
            table[: len(pages)] = pages
        self.tiles.slots.copy_(torch.from_numpy(slots))
        self.tiles.tables[:, :width].copy_(torch.from_numpy(tables))
        self.tokens.copy_(torch.tensor([s.tokens[-1] for s in lanes]))
        self.last.copy_(torch.from_numpy(slots + rooms - 1))
        self.stems.copy_(noise.halves([s.sampler.stem for s in lanes]))
        self.temperatures.copy_(torch.tensor([s.params.temperature for s in lanes]))
        self.step.zero_()

    def advance(self, chosen: torch.Tensor) -> None:
        """Take the chosen tokens [lanes] as the next roots.

        A lane that is full stays where it is, token and slot: its end is near, and its last row must stay what it is.
        """
        self.chosen.index_copy_(0, self.step, chosen[None])
        self.step += 1
        slots = self.tiles.slots
        self.tokens.copy_(torch.where(slots < self.last, chosen, self.tokens))
        slots.copy_(torch.minimum(slots + 1, self.last))


class _LaneRows:
    """The rows of one step: every lane's root."""

    def __init__(self, lanes: Lanes, highest: int) -> None:
        self.positions = lanes.tiles.slots.long()
        self.highest = highest
        self._pages = lanes.tiles.tables.gather(1, (self.positions // PAGE_SIZE)[:, None])[:, 0].long()
        self._offsets = self.positions % PAGE_SIZE

    def write(self, layer: LayerStore, kv: torch.Tensor) -> None:
        """Put k and v [2, kv heads, rows, size] into one layer."""
        layer.both[:, self._pages, :, self._offsets] = kv.permute(2, 0, 1, 3)


class Burst:
    """Runs bursts over one model and cache."""

    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self._lanes: dict[int, Lanes] = {}
        self.graphs = Graphs(model.device)

    @staticmethod
    def ready(work: list[Work]) -> list[Sequence]:
        """The sequences of a step that a burst may take: all that decode, if it may take all of them, or none.

        Prompts go their own way, up to the first token. If only some of those that decode could be taken, the others
        would wait for a whole burst between two tokens.
        """
        sequences = []
        for item in work:
            sequence = item.sequence
            if sequence.first_token_at is None:
                continue
            plain = sequence.sampler.simple and sequence.params.logprobs is None and sequence.stops is None
            if not plain or len(item.pending) > 1:
                return []
            sequences.append(sequence)
        return sequences

    def reserve(self, sequences: list[Sequence]) -> int:
        """Reserve slots for as many steps as a burst may have; returns how many, 0 if the cache has no room for one.

        Nobody is set aside for a burst: that is for a single step to do, when it must.
        """
        steps = min(STEPS, max(s.remaining for s in sequences))
        while steps:
            rows = [s.cached + min(steps, s.remaining) for s in sequences]
            pages = (-(-n // PAGE_SIZE) - len(s.table.pages) for n, s in zip(rows, sequences, strict=True))
            if sum(max(0, missing) for missing in pages) <= self._cache.available:
                for sequence, count in zip(sequences, rows, strict=True):
                    self._cache.reserve(sequence.table, count)
                return steps
            steps //= 2
        return 0

    def run(self, sequences: list[Sequence], steps: int) -> tuple[list[int], float]:
        """Give each sequence its next tokens, `steps` or up to its end, and commit their K/V.

        Returns how many each took, and the milliseconds that the device worked.
        """
        began = time.perf_counter()
        chosen = self._choose(sequences, steps)
        device_ms = 1000 * (time.perf_counter() - began)
        counts = []
        for sequence, tokens in zip(sequences, chosen.T.tolist(), strict=True):
            start = sequence.cached
            count = emit_run(sequence, tokens)
            # A step writes the row of the token that it reads: of the tokens given out, all but the last are rows now.
            self._cache.commit(sequence.table, TARGET, start, range(start, start + count))
            counts.append(count)
        return counts, device_ms

    def _choose(self, sequences: list[Sequence], steps: int) -> npt.NDArray[np.int64]:
        """The tokens of the next steps, [steps, sequences]."""
        size = bucket(len(sequences))
        if size not in self._lanes:
            self._lanes[size] = Lanes(size, self._model)
        lanes = self._lanes[size]
        lanes.fill(sequences, steps)
        sampled = not all(s.params.greedy for s in sequences)
        for _ in range(steps):
            self.graphs.run((size, sampled), lambda: self._step(lanes, sampled))
        tokens: npt.NDArray[np.int64] = lanes.chosen[:steps, : len(sequences)].cpu().numpy()
        return tokens

    def _step(self, lanes: Lanes, sampled: bool) -> None:
        """One step of all lanes. It takes everything from the lanes, and leaves everything there."""
        model = self._model
        rows = _LaneRows(lanes, model.config.context - 1)
        x = model.embed(lanes.tokens)
        model.run_(x, rows, model.attention_over(lanes.tiles), self._cache.layers(TARGET), range(model.config.layers))
        logits = model.head(x)
        lanes.advance(choose_rows(logits, lanes.stems, rows.positions + 1, lanes.temperatures, sampled=sampled))
