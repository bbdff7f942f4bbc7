"""Notices about a jointly trained model: it is another model, and how far it has drifted."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.drafters.heads.head_checkpoint import Made
from slipstream.train.joint.drift import Drift

FACTS, NOTICE = "joint.json", "README.txt"


def warning(name: str) -> str:
    """Shown before the training."""
    return (
        f"lossy: --joint changes the target. The result is another model, whose answers are not those of {name}; "
        "how far they differ is measured at the end"
    )


@dataclass(frozen=True)
class Moved:
    """A new model and the original."""

    drift: Drift
    original: Made
    tuned: Made
    before: float  # tokens per step of the original with the initial head
    now: float  # tokens per step of the new model with the final head

    def facts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The comparison as fields of JSON."""
        return {
            "lossy": True,
            "original": asdict(self.original),
            "model": asdict(self.tuned),
            "settings": dict(settings),
            "drift": asdict(self.drift),
            "tokens_per_step": {"original": self.before, "model": self.now},
        }


def summary(facts: Mapping[str, Any]) -> str:
    """The facts in one line."""
    drift, steps = facts["drift"], facts["tokens_per_step"]
    return (
        f"lossy: {facts['model']['name']} is another model than {facts['original']['name']}: {drift['kl']:.4f} nats "
        f"away, another first choice at {drift['changed']:.2%} of {drift['positions']:,} held-out positions; tokens "
        f"per step {steps['original']:.2f} before, {steps['model']:.2f} now"
    )


def write_notice(folder: Path, moved: Moved, method: str, provenance: Mapping[str, Any]) -> None:
    """Write the facts and a readable text into the directory of the new model."""
    (folder / FACTS).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    (folder / NOTICE).write_text(_text(moved, method), encoding="utf-8")


def _text(moved: Moved, method: str) -> str:
    drift, original = moved.drift, moved.original
    paragraphs = [
        f"This is NOT {original.name}. It is another model, made from it by joint training with a drafter "
        f"({method}): low-rank updates were merged into its weights so that more drafted tokens are "
        "accepted. Its answers differ from those of the original. Drafting itself changes nothing: this model's "
        "output is the same with and without its drafter.",
        f"How far it has drifted, on {drift.positions:,} positions of held-out answers of the original:",
    ]
    rows = [
        ("mean KL divergence from the original", f"{drift.kl:.6f} nats"),
        ("positions with another first choice", f"{drift.changed:.3%}"),
        ("tokens per step, the original with the initial drafter", f"{moved.before:.3f}"),
        ("tokens per step, this model with its drafter", f"{moved.now:.3f}"),
    ]
    table = "\n".join(f"    {name.ljust(60)}{value}" for name, value in rows)
    ending = [
        "The initial drafter was trained with the original frozen, and for a shorter time: not all of the gain comes "
        "from changing the model.",
        f"Fingerprint of the original: {original.fingerprint}. Of this model: {moved.tuned.fingerprint}. {FACTS} "
        "describes how it was made. The licence of the original applies to this model too.",
    ]
    wrapped = [textwrap.fill(text, 100) for text in paragraphs]
    return "\n\n".join([*wrapped, table, *(textwrap.fill(text, 100) for text in ending)]) + "\n"
