"""Where the weights of a small model are in a big one, and what surrounds them.

The small model's hidden state is the first part of the big one's; zeros follow, and at the very end a few *signals*
that no weight of the small model reads. Weights that read zeros, or write what is never read, are random: GEMMs with
zeros could be suspected of being cheaper.
"""

from __future__ import annotations

import math
from zlib import crc32

import torch

from benchmarks.bodies.shapes import SIGNALS
from slipstream.models.config import ModelConfig

SPREAD = 0.02  # standard deviation of random weights
_QUIET = 1024  # the signals add at most 1 / _QUIET of its eps to a norm


class Placing:
    """Makes weights of the big model, on `device` in `dtype`, from those of the small one."""

    def __init__(self, small: ModelConfig, big: ModelConfig, device: str, dtype: torch.dtype, seed: int) -> None:
        self.small = small
        self.big = big
        self.device = device
        self.dtype = dtype
        self._seed = seed
        self.narrow, self.wide = small.hidden_size, big.hidden_size
        # An RMS norm takes its mean over more dimensions, so its output is larger by the inverse of this.
        self.root = math.sqrt(self.narrow / self.wide)
        loudest = math.sqrt(small.norm_eps * self.narrow / (_QUIET * SIGNALS))
        self.signal = 2.0 ** math.floor(math.log2(loudest))  # a power of two is exact in every dtype

    def ready(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight on the device, in the requested dtype."""
        return weight.to(self.device, self.dtype)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def noise(self, name: str, *shape: int) -> torch.Tensor:
        """Random numbers on the device, deterministic by name."""
        generator = torch.Generator(self.device).manual_seed(crc32(f"{self._seed} {name}".encode()))
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(0.0, SPREAD, generator=generator)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight of a norm over n hidden states side by side, [n * narrow] -> [n * wide], float32."""
        widened = torch.ones(len(weight) // self.narrow, self.wide, device=self.device)
        widened[:, : self.narrow] = weight.to(self.device, torch.float32).view(-1, self.narrow) * self.root
        return widened.flatten()

    def padded(self, weight: torch.Tensor) -> torch.Tensor:
        """Hidden states, n side by side, [..., n * narrow] -> [..., n * wide]: zeros after each."""
        states = self.ready(weight).unflatten(-1, (-1, self.narrow))
        return torch.nn.functional.pad(states, (0, self.wide - self.narrow)).flatten(-2)

    def reads(
        self, name: str, weight: torch.Tensor, rows: int, places: torch.Tensor, silent: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A matrix that reads n hidden states side by side, [outputs, n * narrow] -> [rows, n * wide].

        The outputs are at `places`; at `silent` there are zeros, and all others are random.
        """
        widened = self.noise(name, rows, weight.shape[1] // self.narrow, self.wide)
        widened[:, :, self.wide - SIGNALS :] = 0.0
        if silent is not None:
            widened[silent.to(self.device)] = 0.0
        widened[places.to(self.device), :, : self.narrow] = self.ready(weight).unflatten(1, (-1, self.narrow))
        return widened.flatten(1)

    def writes(self, weight: torch.Tensor, columns: int, places: torch.Tensor) -> torch.Tensor:
        """A matrix that adds to a hidden state, [narrow, inputs] -> [wide, columns], reading only `places`."""
        widened = self.zeros(self.wide, columns)
        widened[: self.narrow, places.to(self.device)] = self.ready(weight)
        return widened

    # -- attention, whose heads may have another shape in a drafter's layer; `adjacent` as in `head_places` -----------

    def queries(
        self, name: str, weight: torch.Tensor, small: ModelConfig, big: ModelConfig, *, adjacent: bool = False
    ) -> torch.Tensor:
        """The matrix of q.

        Scores are divided by the root of the head size, which is larger now. Extra dimensions are 0 in q, and so do not
        count, whatever k has there.
        """
        size = big.head_dim
        places = head_places(small, big, keys=False, adjacent=adjacent)[: len(weight)]
        heads = (places // size).unique()
        rows = (heads[:, None] * size + torch.arange(size)).flatten()
        larger = math.sqrt(size / small.head_dim)
        return self.reads(name, weight * larger, big.heads * size, places, rows[~torch.isin(rows, places)])

    def keys(
        self, name: str, weight: torch.Tensor, small: ModelConfig, big: ModelConfig, *, adjacent: bool = False
    ) -> torch.Tensor:
        """The matrix of k or of v."""
        places = head_places(small, big, keys=True, adjacent=adjacent)[: len(weight)]
        return self.reads(name, weight, big.kv_heads * big.head_dim, places)

    def mixed(
        self, weight: torch.Tensor, small: ModelConfig, big: ModelConfig, *, adjacent: bool = False
    ) -> torch.Tensor:
        """The output matrix of attention."""
        places = head_places(small, big, keys=False, adjacent=adjacent)[: weight.shape[1]]
        return self.writes(weight, big.heads * big.head_dim, places)


def head_places(small: ModelConfig, big: ModelConfig, *, keys: bool, adjacent: bool = False) -> torch.Tensor:
    """Where the dimensions of all heads are in the big model's, [heads * head size] (of K and V: `keys`).

    A query head stays with its KV head. Rotated pairs of dimensions keep their frequency: with the base of the rotation
    kept, pair i of a head is pair r * i of one that is r times as large. The two of a pair are half a head apart or, as
    in trained layers, adjacent (`adjacent`).
    """
    size, wide = small.head_dim, big.head_dim
    dimension = torch.arange(size)
    pair, second = (dimension // 2, dimension % 2) if adjacent else (dimension % (size // 2), dimension // (size // 2))
    within = wide // size * pair * (2 if adjacent else 1) + second * (1 if adjacent else wide // 2)
    group, wide_group = small.heads // small.kv_heads, big.heads // big.kv_heads
    head = torch.arange(small.kv_heads if keys else small.heads)
    number = head if keys else head // group * wide_group + head % group
    return (number[:, None] * wide + within).flatten()
