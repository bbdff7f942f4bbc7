"""Puts the default model on disk in the forms that peers read, and turns the demo's prompts into token ids.

    python -m benchmarks.peers.prepare FOLDER

Prints one JSON: what is the same in every task. Forms that are there already are kept.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.drafters import draft_model_directory
from benchmarks.peers.protocol import Paths
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.models.builtin import DEFAULT_MODEL, fetch
from slipstream.models.loader import open_checkpoint
from slipstream.train.merged_model import MergedCheckpoint, write_model


def main() -> None:
    folder = Path(sys.argv[1])
    checkpoint = open_checkpoint(DEFAULT_MODEL)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    merged = MergedCheckpoint(checkpoint, {}, torch.float32)
    paths = Paths(
        gguf=str(fetch(DEFAULT_MODEL)),
        directory=_made(folder / "float32", lambda place: write_model(merged, place)),
        draft=_made(folder / "draft", draft_model_directory),
        scratch=str(folder),
    )
    prompts = {p.kind: tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in PROMPTS}
    stop_ids = sorted({*checkpoint.config.eos_ids, *tokenizer.eos_ids})
    print(json.dumps({"paths": asdict(paths), "prompts": prompts, "stop_ids": stop_ids}))


def _made(folder: Path, make: Callable[[Path], object]) -> str:
    """`folder`, filled by `make` unless it is there; it appears whole or not at all."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return str(folder)


if __name__ == "__main__":
    main()
