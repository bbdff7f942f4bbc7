"""Random numbers as a stateless function of their purpose.

The default verifier needs noise that depends on (seed, choice, position, token) and on nothing else: not on the step,
the batch slot or the drafter. So there is no generator to advance, only a hash. The mixing is that of the well-known
32-bit finalisers (xor-shift, multiply), done on 64-bit integers so that it gives the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9

# Purposes: streams with different names never share a number.
MATCH, DRAFT, ACCEPT, RESIDUAL, SHADOW = 1, 2, 3, 4, 5


def _mix(x: int) -> int:
    """A bijection of 32 bits in which every input bit affects every output bit."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


_START = 0x85A308D3_243F6A88


def key(*parts: int, start: int = _START) -> int:
    """Fold integers (seed, choice, position, purpose, ...) into one 32-bit pair, packed in 64 bits.

    A key may be folded on: key(a, b) is key(b, start=key(a)).
    """
    low, high = start & _MASK, start >> 32
    for part in parts:
        for word in (part & _MASK, (part >> 32) & _MASK):
            low = _mix((low ^ word) + GOLDEN & _MASK)
            high = _mix((high + word + low) & _MASK)
    return high << 32 | low


def uniform(k: int) -> float:
    """One number in (0, 1), never 0 and never 1, with 52 bits."""
    high, low = _mix((k >> 32) ^ 0xB5297A4D), _mix((k & _MASK) ^ 0x68E31DA4)
    return ((high << 20 | low >> 12) + 0.5) / float(1 << 52)


@lru_cache(maxsize=4)
def _all_ids(size: int, device: str) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64, device=device)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def gumbel(k: int, ids: torch.Tensor | int, device: str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise, one number per token id, float64. `ids` may be the size of the whole vocabulary.

    The noise of a token id does not depend on which other ids are requested, so a reduced vocabulary, or the few tokens
    that survive top-p, get the same noise as the whole.
    """
    tokens = _all_ids(ids, device) if isinstance(ids, int) else ids
    return _gumbel(tokens, k & _MASK, k >> 32)


def _gumbel(tokens: torch.Tensor, low: int | torch.Tensor, high: int | torch.Tensor) -> torch.Tensor:
    bits = _mix_tensor(tokens ^ low)
    bits = _mix_tensor((bits + high) & _MASK)
    unit = (bits.double() + 0.5) / 4294967296.0
    return -torch.log(-torch.log(unit))


# -- many keys at once: their two halves are rows of an int64 tensor [2, keys] ---------------------------------------


def halves(keys: Sequence[int]) -> torch.Tensor:
    """Keys as the functions below take them, [2, keys]: low halves, high halves."""
    return torch.tensor([[k & _MASK for k in keys], [k >> 32 for k in keys]], dtype=torch.int64)


def fold(keys: torch.Tensor, part: torch.Tensor | int) -> torch.Tensor:
    """Each key with one more non-negative integer folded in, as `key` does; part is int64 [keys], or one for all."""
    low, high = keys
    for word in (part & _MASK, part >> 32):
        low = _mix_tensor((low ^ word) + GOLDEN & _MASK)
        high = _mix_tensor((high + word + low) & _MASK)
    return torch.stack([low, high])


def gumbel_rows(keys: torch.Tensor, size: int) -> torch.Tensor:
    """The Gumbel noise of each key for a whole vocabulary, float64 [keys, size]."""
    return gumbel_of(_all_ids(size, str(keys.device)), keys)


def gumbel_of(ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The Gumbel noise of each key for the tokens `ids` [tokens] alone, float64 [keys, tokens]."""
    low, high = keys[:, :, None]
    return _gumbel(ids, low, high)
