"""What everybody is told of a model that a joint training made: that it is another one, and how far it has moved."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.drafters.trained import Made
from slipstream.train.drift import Drift

FACTS, NOTICE = "joint.json", "README.txt"


def warning(name: str) -> str:
    """What is said before anything is done."""
    return (
        f"lossy: --joint changes the target. What it makes is another model, whose answers are not those of {name}; "
        "how far they are from them is measured in the end"
    )


@dataclass(frozen=True)
class Moved:
    """A new model beside the original."""

    drift: Drift
    original: Made
    tuned: Made
    before: float  # tokens per step of the original with the head that the joint training began with
    now: float  # of the new model with the head that it ended with

    def facts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As numbers."""
        return {
            "lossy": True,
            "original": asdict(self.original),
            "model": asdict(self.tuned),
            "settings": dict(settings),
            "drift": asdict(self.drift),
            "tokens_per_step": {"original": self.before, "model": self.now},
        }


def summary(facts: Mapping[str, Any]) -> str:
    """The facts in one line, for whoever looks on."""
    drift, steps = facts["drift"], facts["tokens_per_step"]
    return (
        f"lossy: {facts['model']['name']} is another model than {facts['original']['name']}: {drift['kl']:.4f} nats "
        f"away, another first choice at {drift['changed']:.2%} of {drift['positions']:,} held-out positions; tokens "
        f"per step {steps['original']:.2f} before, {steps['model']:.2f} now"
    )


def write_notice(folder: Path, moved: Moved, method: str, provenance: Mapping[str, Any]) -> None:
    """Put the facts and a text for people into the directory of the new model."""
    (folder / FACTS).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    (folder / NOTICE).write_text(_text(moved, method), encoding="utf-8")


def _text(moved: Moved, method: str) -> str:
    drift, original = moved.drift, moved.original
    paragraphs = [
        f"This is NOT {original.name}. It is another model, made of it by a joint training with a drafter "
        f"({method}): low-rank updates were merged into its weights so that more of what the drafter guesses is "
        "accepted. Its answers differ from those of the original. Drafting itself changes nothing: with and without "
        "its drafter this model says the same.",
        f"How far it has moved, on {drift.positions:,} positions of held-out answers of the original:",
    ]
    rows = [
        ("mean KL divergence from the original", f"{drift.kl:.6f} nats"),
        ("positions with another first choice", f"{drift.changed:.3%}"),
        ("tokens per step, the original with the drafter as it began", f"{moved.before:.3f}"),
        ("tokens per step, this model with its drafter", f"{moved.now:.3f}"),
    ]
    table = "\n".join(f"    {name.ljust(60)}{value}" for name, value in rows)
    ending = [
        "The drafter as it began had learnt with the original standing still, and for a shorter time: not all that was "
        "gained comes from moving the model.",
        f"Fingerprint of the original: {original.fingerprint}. Of this model: {moved.tuned.fingerprint}. {FACTS} says "
        "how it was made. The licence of the original holds for this model, too.",
    ]
    wrapped = [textwrap.fill(text, 100) for text in paragraphs]
    return "\n\n".join([*wrapped, table, *(textwrap.fill(text, 100) for text in ending)]) + "\n"
