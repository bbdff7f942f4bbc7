"""Where files that can be had again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$SLIPSTREAM_CACHE`, else `slipstream` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "slipstream"
