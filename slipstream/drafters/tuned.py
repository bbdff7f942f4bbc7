"""Findings of `slipstream tune`, saved by method and target fingerprint.

One JSON file per finding: those of the package are next to this module, the user's own in the cache, where a newer one
replaces an older one. The user's own takes precedence.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile
from slipstream.folders import cache_directory

_SHIPPED = Path(__file__).parent / "findings"


def path(method: str, fingerprint: str) -> Path:
    """Path of the user's own finding."""
    return cache_directory() / "tuned" / f"{method}-{fingerprint}.json"


def find(method: str, fingerprint: str) -> dict[str, Any] | None:
    """The finding for this target, if there is one."""
    for file in (path(method, fingerprint), _SHIPPED / f"{method}-{fingerprint}.json"):
        if file.exists():
            return _read(file)
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{file} cannot be read: {error}", hint="delete it and tune again") from None
    if not isinstance(found, dict):
        raise CorruptFile(f"{file} holds no finding", hint="delete it and tune again")
    return found


def save(file: Path, finding: dict[str, Any]) -> None:
    """Write a finding atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        partial.write_text(json.dumps(finding, indent=2) + "\n")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
