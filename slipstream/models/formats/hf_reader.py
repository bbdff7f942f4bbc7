"""Reads one config.json by key; errors name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CorruptFile, UnsupportedModel

LARGEST = 2**48
# These counts become lists before any weight can disprove them; a corrupt one must not exhaust the memory.
LISTED, MOST_LISTED = ("num_hidden_layers", "num_local_experts", "num_experts"), 10_000


class HFReader:
    """The config.json of the model called `source`."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def number(self, key: str, default: float | None = None, within: Mapping[str, Any] | None = None) -> float:
        """A positive number under `key` of config.json, or of a dictionary in it."""
        value = (self.raw if within is None else within).get(key)
        value = default if value is None else value
        if value is None:
            raise CorruptFile(f"{self.source}: config.json lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise self.nonsense(key, value)
        return value

    def count(self, key: str, default: int | None = None, within: Mapping[str, Any] | None = None) -> int:
        """A positive integer, found as by `number`."""
        value = self.number(key, default, within)
        if value != int(value) or (key in LISTED and value > MOST_LISTED):
            raise self.nonsense(key, value)
        return int(value)

    def optional(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None for null; the default if absent."""
        return None if self.raw.get(key, default) is None else self.number(key, default)

    def nonsense(self, key: str, value: object) -> CorruptFile:
        """The error for an impossible value."""
        return CorruptFile(f"{self.source}: config.json has {key} = {value!r}")

    def refuse(self, what: str, hint: str | None = None) -> UnsupportedModel:
        """The error for an unsupported setting."""
        return UnsupportedModel(f"{self.source} {what}", hint=hint)
