"""Trained drafters in the user's own folder: added from elsewhere, listed, removed.

A drafter is stored there under its method and the fingerprint of its target, where it is found when that target is
loaded. Before a drafter is added, all of it is checked: hash, format, method, settings, vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import DESCRIPTION, HASH, WEIGHTS, Trained
from slipstream.drafters.heads.head_drafter import HeadDrafter
from slipstream.drafters.registry import drafter_class, drafter_names, make_options
from slipstream.errors import CorruptFile, ModelNotFound, OptionError
from slipstream.folders import expanded
from slipstream.models.formats import hub

_LARGEST = 4 << 30  # bytes of a file that is downloaded
_SECONDS = 60.0  # timeout without an answer
_PIECE = 1 << 20
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Installed:
    """A trained drafter that is found by its target's fingerprint."""

    name: str  # of its directory
    place: Path
    own: bool  # False: it came with the package
    description: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """One line for a list."""
        described, provenance = self.description, self.description.get("provenance", {})
        return {
            "name": self.name,
            "method": described.get("method"),
            "target": described.get("target", {}).get("name"),
            "fingerprint": described.get("target", {}).get("fingerprint"),
            "tokens_per_step": described.get("figures", {}).get("tokens_per_step"),
            "from": described.get("added", {}).get("from") or ("trained here" if self.own else "the package"),
            "trained_with": provenance.get("slipstream"),
            "place": str(self.place),
        }


def installed() -> list[Installed]:
    """All trained drafters that are found by fingerprint, the user's own first."""
    found = []
    for folder, own in ((head_checkpoint.own_folder(), True), (head_checkpoint.SHIPPED, False)):
        for place in sorted(folder.glob("*/" + DESCRIPTION)):
            name = place.parent.name
            if _FINGERPRINT.fullmatch(name.rpartition("-")[2]) and not name.startswith("."):
                found.append(Installed(name, place.parent, own, head_checkpoint.describe(place.parent)))
    return found


def add(given: str) -> Installed:
    """Add a drafter from a directory, the URL of one, or a hub id."""
    with tempfile.TemporaryDirectory(prefix="slipstream-add-") as folder:
        source, far = _fetched(given, Path(folder))
        description = head_checkpoint.describe(source)
        hashed = _require_hash(source, description, must=far)
        trained = head_checkpoint.load(source)
        _require_sound(source, trained, description)
        place = head_checkpoint.directory(trained.method, trained.target.fingerprint)
        if place.exists():
            raise OptionError(f"{place.name} is there already", hint=f"slipstream drafters remove {place.name}")
        origin, now = given if far else str(source.resolve()), datetime.now(UTC).isoformat(timespec="seconds")
        added = {"from": origin, "sha256": hashed, "at": now}
        ready = Path(folder) / "ready"
        ready.mkdir()
        shutil.copyfile(source / WEIGHTS, ready / WEIGHTS)
        (ready / DESCRIPTION).write_text(json.dumps({**description, "added": added}, indent=2) + "\n")
        try:
            head_checkpoint.put(ready, place)
        except OSError as error:
            raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from error
    return Installed(place.name, place, True, head_checkpoint.describe(place))


def remove(name: str) -> Path:
    """Delete one of the user's own drafters, by the name that the list shows."""
    own = {drafter.name: drafter for drafter in installed() if drafter.own}
    if name not in own:
        raise OptionError(f"no drafter {name!r} of your own", hint=f"there are: {', '.join(own) or 'none'}")
    shutil.rmtree(own[name].place)
    return own[name].place


# -- where from -------------------------------------------------------------------------------------------------------


def _fetched(given: str, folder: Path) -> tuple[Path, bool]:
    """The directory with a drafter's files, and whether they came over a network."""
    if re.match(r"https?://", given):
        place = folder / "fetched"
        place.mkdir()
        for name in (DESCRIPTION, WEIGHTS):
            _download(f"{given.rstrip('/')}/{name}", place / name)
        return place, True
    place = expanded(given)
    if place.is_dir():
        if not (place / DESCRIPTION).exists():
            raise ModelNotFound(
                f"{place} holds no trained drafter of ours: it has no {DESCRIPTION}",
                hint="a head of another project is made one of ours by slipstream import",
            )
        return place, False
    if hub.is_reference(given):
        return hub.fetch(given, [DESCRIPTION, WEIGHTS]), True
    raise ModelNotFound(f"there is no {given!r}", hint="name a directory, the URL of one, or a hub id (owner/name)")


def _download(url: str, file: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer, file.open("wb") as kept:
            for piece in _pieces(answer):
                kept.write(piece)
                if kept.tell() > _LARGEST:
                    raise OptionError(f"{url} is larger than {_LARGEST >> 30} GiB")
    except urllib.error.HTTPError as error:
        raise ModelNotFound(
            f"{url}: {error.code} {error.reason}", hint="name the folder that holds both files"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelNotFound(f"{url} cannot be fetched: {reason}", hint="check the address and the network") from None


def _pieces(answer: Any) -> Iterator[bytes]:
    while piece := answer.read(_PIECE):
        yield piece


# -- what is checked --------------------------------------------------------------------------------------------------


def _require_hash(place: Path, description: dict[str, Any], *, must: bool) -> str:
    """The SHA-256 of the weights; refuse another hash than the description's, or none if there `must` be one."""
    file = place / WEIGHTS
    try:
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CorruptFile(f"{file} cannot be read: {error.strerror or error}", hint=_AGAIN) from None
    wanted = description.get(HASH)
    if wanted is None and must:
        raise CorruptFile(
            f"{place / DESCRIPTION} names no {HASH}, so the download cannot be checked",
            hint="download it yourself and add the directory, if you trust it",
        )
    if wanted not in (None, found):
        raise CorruptFile(f"{file} is not the file that {DESCRIPTION} describes: its SHA-256 is {found}", hint=_AGAIN)
    return found


def _require_sound(place: Path, trained: Trained, description: dict[str, Any]) -> None:
    """Refuse a method, settings, a fingerprint or a vocabulary that cannot be."""
    kind = drafter_class(trained.method) if trained.method in drafter_names() else None
    if kind is None or not issubclass(kind, HeadDrafter):
        raise CorruptFile(f"{place} holds a drafter of kind {trained.method!r}, which is none that is trained")
    make_options(trained.method, kind.settings_type, trained.settings)
    if not _FINGERPRINT.fullmatch(trained.target.fingerprint):
        raise CorruptFile(f"{place}: {trained.target.fingerprint!r} is no fingerprint of a target")
    vocab = trained.vocab
    ascending = len(vocab) > 0 and bool((vocab.diff() > 0).all()) and int(vocab[0]) >= 0
    if not ascending or int(vocab[-1]) >= trained.target.vocab_size or len(vocab) != description.get("draft_tokens"):
        raise CorruptFile(f"{place}: the draft tokens are not tokens of {trained.target.name}", hint=_AGAIN)
    broken = sorted(name for name, weight in trained.weights.items() if not bool(weight.isfinite().all()))
    if broken:
        raise CorruptFile(f"{place}: {broken[0]} is not finite", hint=_AGAIN)
