"""The loader: one line for what is no model, and an import that costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slipstream.errors import CorruptFile, ModelNotFound
from slipstream.models import builtin
from slipstream.models.loader import open_checkpoint
from tests.checkpoints import refused


def test_what_is_no_model(llama: Path, small_gguf: Path, tmp_path: Path) -> None:
    with refused(ModelNotFound, "'nothing'", builtin.DEFAULT_MODEL):
        open_checkpoint("nothing")
    for path in (tmp_path / "a" / "b", "./a/b", "~/no such thing/b"):
        with refused(ModelNotFound, str(path)):
            open_checkpoint(path)
    with refused(ModelNotFound, "its directory", str(llama)):
        open_checkpoint(llama / "model.safetensors")
    with refused(ModelNotFound, "small.gguf"):
        open_checkpoint(small_gguf.parent)
    note = tmp_path / "note.txt"
    note.write_text("not a model")
    with refused(CorruptFile, "note.txt", "not a GGUF file"):
        open_checkpoint(note)


def test_importing_the_loader_is_cheap() -> None:
    script = (
        "import sys, slipstream.models.loader, slipstream.models.memory\n"
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
