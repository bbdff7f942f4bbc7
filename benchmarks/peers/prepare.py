"""Writes the default model in the formats that peers read, and turns the demo's prompts into token ids.

    python -m benchmarks.peers.prepare FOLDER

Prints one JSON object: the common part of every task. Existing files are kept.
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
from slipstream.models.formats.builtin import DEFAULT_MODEL, fetch
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.train.joint.merged_model import MergedCheckpoint, write_model


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
    """`folder`, filled by `make` unless it exists; it appears complete or not at all."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return str(folder)


if __name__ == "__main__":
    main()
