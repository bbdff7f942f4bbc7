"""Where files that can be downloaded or made again are cached, and paths as users write them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, OptionError


def expanded(given: str | Path) -> Path:
    """A path with its `~` replaced; OptionError for what cannot be a path (an unknown user, a name too long)."""
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


@dataclass(frozen=True)
class HeaderFile:
    """The JSON file that describes a directory which one of our commands makes."""

    name: str
    kind: str  # what the directory is
    format: str
    version: int
    make: str  # the command
    remake: str  # what to do where the file is of no use

    def read(self, directory: Path) -> dict[str, Any]:
        """What the file says; one that is missing, cannot be read, or is of another format or version is refused."""
        path = directory / self.name
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            what = f"has no {self.name}" if directory.is_dir() else "is no directory"
            raise OptionError(f"no {self.kind}: {str(directory)!r} {what}", hint=f"make one: {self.make}") from None
        except (OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise CorruptFile(f"{str(path)!r} cannot be read: {reason}", hint=self.remake) from None
        if not isinstance(content, dict) or content.get("format") != self.format:
            raise CorruptFile(f"{str(path)!r} does not describe a {self.kind}", hint=self.remake)
        if content.get("version") != self.version:
            found = f"version {content.get('version')!r} of the format"
            raise CorruptFile(f"{str(path)!r} is {found}, and version {self.version} is read here", hint=self.remake)
        return content
