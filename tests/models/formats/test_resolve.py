"""Finding a checkpoint: one line for what is not a model, and a cheap import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import CorruptFile, ModelNotFound, UnsupportedModel
from slipstream.models.formats import builtin
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.text import Tokenizer
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
        "import sys, slipstream.models.formats.resolve, slipstream.models.memory\n"
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.real_model
def test_a_built_in_model_runs_without_transformers_and_gguf() -> None:
    script = (
        "import sys; sys.modules.update(transformers=None, gguf=None)\n"
        "from slipstream import LLM, SamplingParams\n"
        "with LLM() as llm: print(llm.generate('1, 2, 3, 4,', SamplingParams(temperature=0, max_tokens=8))[0].text)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith(" 5, 6"), done.stderr


def test_a_tokenizer_of_an_older_format_needs_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(UnsupportedModel, "transformers package", "pip install 'slipstream[hf]'"):
        Tokenizer.from_directory(tmp_path)
