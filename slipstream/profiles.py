"""Profiles: what `slipstream tune` recommends for one model, as a TOML file that `LLM(profile=...)` reads.

A profile has the setting with its limits, and for the policy priors (what drafts are worth) and costs (of passes and
drafts, where they were measured).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, OptionError
from slipstream.folders import expanded

FORMAT, VERSION = "slipstream-profile", 1


@dataclass(frozen=True)
class Profile:
    """The recommended drafter, the model that it was found for, and what the policy learnt meanwhile."""

    speculate: str
    model: str
    fingerprint: str
    setup: str = ""  # what its costs were measured on
    policy: Mapping[str, Any] = field(default_factory=dict)  # as `AutoPolicy.state` gives it; empty: nothing

    def require_model(self, fingerprint: str, name: str) -> None:
        """Refuse a profile of another model."""
        if fingerprint != self.fingerprint:
            raise OptionError(f"the profile was made for {self.model}, not for {name}", hint="slipstream tune -m MODEL")


def read_profile(path: str | Path) -> Profile:
    """A profile from its file."""
    place = expanded(str(path))
    try:
        data = tomllib.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"profile {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"profile {str(path)!r} is not TOML: {error}") from None
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise CorruptFile(f"{str(path)!r} is not a profile of `slipstream tune`")
    found = [data.get(name) for name in ("speculate", "model", "fingerprint")]
    if not all(isinstance(value, str) and value for value in found):
        raise CorruptFile(f"profile {str(path)!r} lacks speculate, model or fingerprint")
    policy, setup = data.get("policy", {}), data.get("setup", "")
    if not isinstance(policy, dict) or not isinstance(setup, str):
        raise CorruptFile(f"profile {str(path)!r}: policy or setup has a wrong type")
    speculate, model, fingerprint = map(str, found)
    return Profile(speculate, model, fingerprint, setup, policy)
