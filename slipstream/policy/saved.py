"""What a policy has learnt, between runs: a file in the cache for each model, weights' format and machine.

What is shipped with the package is a start for the shipped drafters: their worth, without costs
(`python -m benchmarks.policy_prior` makes it).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile
from slipstream.folders import cache_directory
from slipstream.policy.auto import AutoPolicy
from slipstream.profiles import Profile

log = logging.getLogger("slipstream")

_FORMAT = 2
SHIPPED = Path(__file__).parent / "shipped"
_WORTH_SAVING_MS = 2000.0  # milliseconds of decoding below which a state is not saved


_COSTS = ("passes", "drafts")  # parts of a state, and of that of rounds, that depend on the machine


def without_costs(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state that depend on the model and the traffic alone."""
    parts = {name: part for name, part in state.items() if name not in _COSTS}
    return parts | ({"rounds": without_costs(state["rounds"])} if "rounds" in state else {})


def directory() -> Path:
    """Where the files are."""
    return cache_directory() / "policy"


class SavedPolicy:
    """The file of one policy. `facts`: whatever costs depend on, such as the machine and the number of threads."""

    def __init__(self, policy: AutoPolicy, fingerprint: str, facts: tuple[object, ...]) -> None:
        self._policy = policy
        self._shipped = SHIPPED / f"{fingerprint}.json"
        self.setup = "-".join(str(fact).replace("/", "_").replace(" ", "_") for fact in facts)
        name = f"{fingerprint}-{self.setup}"
        self._path = directory() / f"{name}.json"

    def restore(self) -> None:
        """Start from the last run, or from what is shipped. A file that cannot be read is ignored."""
        for path in (self._path, self._shipped):
            try:
                state = json.loads(path.read_bytes())
                if state.pop("format") == _FORMAT:
                    self._policy.restore(state)
                    return
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                log.warning("%s is ignored: %s", path, error)

    def start_from(self, profile: Profile) -> None:
        """Start from a profile; costs of another machine or of other settings are not used."""
        state = profile.policy
        if state and profile.setup != self.setup:
            log.warning("the costs in the profile are those of %s, and are not used on %s", profile.setup, self.setup)
            state = without_costs(state)
        try:
            if state:
                self._policy.restore(state)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CorruptFile(f"the profile has no valid priors or costs: {error!r}") from None

    def save(self) -> None:
        """Keep what was learnt, if it is worth it. A folder that cannot be written is no error."""
        if self._policy.decoded_ms < _WORTH_SAVING_MS:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write(self._path, self._policy.state())


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a policy's state, whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    temporary = Path(name)
    try:
        os.close(handle)
        temporary.write_text(json.dumps({"format": _FORMAT, **state}, separators=(",", ":")))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
