"""How conversations begin, told by hashes: the same beginning has the same keys in every process.

Texts are compared, not tokens: a router has no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

_BLOCK = 256  # characters: long messages have a key for each


class Prefix(NamedTuple):
    """A beginning: the hash of all its text, and how long that is."""

    key: int
    length: int  # in characters


def prefixes_of(body: bytes) -> list[Prefix]:
    """The beginnings of the conversation or prompt in a request's body, shortest first; none if it has neither."""
    try:
        found = json.loads(body)
    except ValueError:  # the replica refuses it
        return []
    return _chain(_parts(found)) if isinstance(found, dict) else []


def _parts(body: dict[str, Any]) -> list[str]:
    """What a model reads, in its order: tools, instructions, then messages; or a prompt."""
    head = [body[name] for name in ("tools", "instructions") if body.get(name)]
    found: Any = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), [])
    turns = found if isinstance(found, list) and not all(isinstance(turn, int) for turn in found) else [found]
    return [json.dumps(part, separators=(",", ":")) for part in (*head, *turns)]


def _chain(parts: Iterable[str]) -> list[Prefix]:
    """A key after each part, and after each block of a long one; a key depends on all that is before it."""
    found: list[Prefix] = []
    digest, length = hashlib.blake2b(digest_size=8), 0
    for part in parts:
        for start in range(0, len(part), _BLOCK):
            block = part[start : start + _BLOCK]
            digest.update(block.encode())
            length += len(block)
            found.append(Prefix(int.from_bytes(digest.digest()), length))
    return found


class PrefixTable:
    """The beginnings that were read last, as long as they fit into a cache of `capacity` characters."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lengths: OrderedDict[int, int] = OrderedDict()  # of each key's own block; the latest is last
        self._total = 0

    def add(self, prefixes: list[Prefix]) -> None:
        """Add the beginnings of a request. The end of a conversation is evicted first, as with KV cache pages."""
        starts = [0, *(prefix.length for prefix in prefixes)]
        for start, (key, length) in reversed(list(zip(starts, prefixes, strict=False))):
            self._total += length - start - self._lengths.pop(key, 0)
            self._lengths[key] = length - start
        while self._total > self._capacity:
            _, length = self._lengths.popitem(last=False)
            self._total -= length

    def clear(self) -> None:
        """Forget everything."""
        self._lengths.clear()
        self._total = 0

    def packed(self, most: int) -> bytes:
        """The keys that were used last, to be published."""
        return array("Q", list(self._lengths)[-most:]).tobytes()


def unpacked(keys: bytes) -> frozenset[int]:
    """The keys that were published."""
    return frozenset(array("Q", keys))


def longest(prefixes: list[Prefix], *held: Container[int]) -> int:
    """Characters of the longest beginning that is held."""
    for prefix in reversed(prefixes):
        if any(prefix.key in keys for keys in held):
            return prefix.length
    return 0
