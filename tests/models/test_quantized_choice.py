"""`quantize`: what `auto` takes, what is refused, and what the command line says about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream import LLM
from slipstream.errors import NotEnoughMemory, OptionError
from slipstream.models import load
from slipstream.models.formats.resolve import open_model
from slipstream.models.layers import quantized
from slipstream.models.load import choose_quantize, load_model, require_memory, weight_bytes
from tests.checkpoints import refused
from tests.gguf_files import Q, write_dense
from tests.invoking import invoke
from tests.models.foreign import foreign_directory


def chosen(path: Path, quantize: str = "auto", dtype: torch.dtype = torch.float32, device: str = "cpu") -> str:
    return choose_quantize(quantize, open_model(path), dtype, device)


def test_auto_keeps_large_quantised_files_in_8_bits(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = (write_dense(tmp_path / kind.name, kind=kind).close() for kind in (Q.Q4_0, Q.F16))
    assert chosen(small) == "none"  # float32 is faster for a few rows, and fits
    monkeypatch.setattr(load, "_LARGE", weight_bytes(open_model(small).config, torch.float32))
    assert chosen(small) == "int8"
    assert load_model(small, dtype="auto", device="cpu")[0].quantize == "int8"  # type: ignore[attr-defined]
    monkeypatch.setattr(load, "_LARGE", load._LARGE + 1)
    assert chosen(small) == "none"
    monkeypatch.setattr(load, "_LARGE", 0)
    assert chosen(small) == "int8"
    assert chosen(plain) == chosen(llama) == chosen(foreign_directory("gpt2")) == "none"  # these are not quantised
    assert chosen(small, dtype=torch.bfloat16) == chosen(small, device="cuda") == "none"
    assert chosen(small, "none") == "none" and chosen(llama, "int4") == "int4"
    monkeypatch.setattr(load, "int8_levels", lambda: 0)
    assert chosen(small) == "none"


def test_what_cannot_be_honoured_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(OptionError, "quantize", "'int3'", "auto, int4, int8, none"):
        chosen(llama, "int3")
    with refused(OptionError, "quantize='int8'", "CPU only", "cuda:1"):
        chosen(llama, "int8", torch.bfloat16, "cuda:1")
    with refused(OptionError, "quantize='int4'", "float32", "bfloat16"):
        LLM(llama, dtype="bfloat16", device="cpu", quantize="int4")
    with refused(OptionError, "quantize='int8'", "transformers"):
        LLM(foreign_directory("gpt2"), device="cpu", quantize="int8")
    monkeypatch.setattr(load, "int8_levels", lambda: 0)
    with refused(OptionError, "quantize='int8'", "this CPU"):
        LLM(llama, device="cpu", quantize="int8")


def test_the_memory_that_is_asked_for_is_that_of_the_mode(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_model(llama).config
    small = quantized.quantized_bytes(config, "int8")
    monkeypatch.setattr(load, "available_bytes", lambda device: small)
    require_memory("tiny", config, torch.float32, "cpu", "int8")
    require_memory("tiny", config, torch.float32, "cpu", "int4")
    with pytest.raises(NotEnoughMemory, match="in float32 and"):
        require_memory("tiny", config, torch.float32, "cpu")
    monkeypatch.setattr(load, "available_bytes", lambda device: small - 1)
    with pytest.raises(NotEnoughMemory, match="in int8 and"):
        load_model(llama, dtype="float32", device="cpu", quantize="int8")


def test_an_8b_file_stays_far_from_its_size_in_float32() -> None:
    """Llama 3 8B: 32 GB in float32."""
    from slipstream.models.config import ModelConfig

    config = ModelConfig("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, 8192)
    sizes = {mode: weight_bytes(config, torch.float32, mode) / 1e9 for mode in quantized.MODES}
    assert 32 < sizes["none"] < 33 and 8 < sizes["int8"] < 8.1 and 5.3 < sizes["int4"] < 5.5


def test_command_line(tiny: str) -> None:
    found = json.loads(invoke("check", "-m", tiny, "--quantize", "int8", "--json").stdout)
    config = open_model(tiny).config
    assert found["quantize"] == "int8"
    assert found["memory_bytes"]["weights"] == weight_bytes(config, torch.float32, "int8")
    assert "float32 on cpu, weights in int4" in invoke("check", "-m", tiny, "--quantize", "int4").stdout
    assert json.loads(invoke("check", "-m", tiny, "--json").stdout)["quantize"] == "none"
    for mode in ("int8", "int4"):
        done = invoke("run", "-m", tiny, "--quantize", mode, "--json", "--max-tokens", "5", "add")
        answer = json.loads(done.stdout)
        assert answer["quantize"] == mode and answer["exact"] and len(answer["token_ids"]) > 0
    for verb in (["run", "hello"], ["check"]):
        wrong = invoke(*verb, "-m", tiny, "--quantize", "int5")
        assert wrong.exit_code == 2 and "unknown quantize 'int5'" in wrong.stderr
