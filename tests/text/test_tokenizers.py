"""The tokenizer itself: fingerprints, single tokens, invalid text, and a light import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import PromptError
from slipstream.text import Tokenizer
from tests.vocabularies import save_directory, train_byte_level

ROOT = Path(__file__).parents[2]


def test_fingerprint_tells_vocabularies_apart(tmp_path: Path, byte_level: Tokenizer, spm: Tokenizer) -> None:
    directory = Tokenizer.from_directory(save_directory(train_byte_level(), tmp_path))
    assert byte_level.fingerprint() == directory.fingerprint() != spm.fingerprint()


def test_single_tokens(byte_level: Tokenizer) -> None:
    the = byte_level.encode(" the")
    assert [byte_level.token_text(id) for id in the] == [" the"] and byte_level.token(the[0]) == "Ġthe"
    assert byte_level.token(10**9) is None and byte_level.token(-1) is None
    assert byte_level.token_text(10**9) == "<id 1000000000>"
    assert byte_level.token_text(1) == "<|im_start|>"
    assert "\\x" in byte_level.token_text(byte_level.encode("\u2603")[0])
    assert byte_level.decode([10**9, -1, *the]) == " the"


def test_bad_text_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(PromptError, match="surrogate"):
        byte_level.encode("a\ud800b")
    with pytest.raises(PromptError, match="bytes"):
        byte_level.encode(b"abc")  # type: ignore[arg-type]


def test_importing_is_light() -> None:
    code = "import slipstream.text, sys; print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
