"""Results of real runs on a tiny model, for tests of the report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.models.decoder import Decoder
from tests.invoking import invoke

PHRASE = "(the quick brown fox jumps over the lazy dog )+"  # what an answer repeats if its prompt says so


def measured(model: str, folder: Path, *options: str, tokens: int, minutes: float, **asked: object) -> dict[str, Any]:
    """The results of `slipstream bench` on eight prompts of two categories; `asked`: more fields of their lines."""
    file = folder / "mine.jsonl"
    lines = [
        {"model": "m", "prompt": f"The quick <b>brown</b> {n}", "category": kind, **asked}
        for kind in ("a", "b & c")
        for n in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    done = invoke("bench", "-m", model, "--prompts", str(file), "--tokens", str(tokens), "--minutes", str(minutes),
                  "-o", str(folder), *options)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").exists()
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def decided(model: str, folder: Path) -> dict[str, Any]:
    """A run of `auto` on answers that repeat a phrase, where passes take long: it drafts, and is right."""
    forward: Callable[..., Any] = Decoder.forward

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return forward(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", slowly)
        regex = {"structured_outputs": {"regex": PHRASE}}
        return measured(model, folder, "--speculate", "auto", tokens=100, minutes=0.1, **regex)


SWEEPS = ("--speculate", "suffix", "--speculate", "ngram", "--batch", "1,2", "--context", "100,200",
          "--temperature", "0,0.9", "--nodes", "2,8", "--price", "1/h")  # fmt: skip


def unlooped(results: dict[str, Any]) -> dict[str, Any]:
    """A tiny random model loops on every prompt: its figures as if it did not."""
    found: dict[str, Any] = json.loads(json.dumps(results))
    for condition in found["conditions"]:
        for each in condition["figures"].values():
            if each["all"] is None:
                each["all"], each["looping"] = each["looping"], None
    return found
