"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import OptionError


@dataclass(frozen=True)
class ServerConfig:
    """Names, limits and keys of a server. The engine has its own arguments."""

    model: str  # as the user named it
    served_names: tuple[str, ...] = ()  # under which requests may name it; the first is shown
    api_keys: tuple[str, ...] = ()  # none: everybody may ask
    cors_origins: tuple[str, ...] = ()  # web pages of these origins may ask
    max_body_bytes: int = 16 * 2**20
    request_timeout: float | None = None  # seconds, from arrival to the last token
    shutdown_timeout: float = 30.0  # seconds that running requests get after SIGTERM
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    access_log: bool = True
    playground: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the one model."""
        return self.served_names or (self.model,)


def read_keys(path: str | Path | None) -> list[str]:
    """The keys in a file; blank lines and lines that start with # do not count."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {path}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise OptionError(f"--api-key-file {path} has no keys")
    return keys
