"""Where files that can be had again are kept, and paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import OptionError


def expanded(given: str | Path) -> Path:
    """A path as a user wrote it, its `~` replaced; OptionError for what can be none (no such user, a name too long)."""
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{str(given)!r} cannot be a path here: {reason}") from None
    return path


def cache_directory() -> Path:
    """`$SLIPSTREAM_CACHE`, else `slipstream` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return expanded(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "slipstream"
