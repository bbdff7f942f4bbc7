"""What runs through transformers, what is refused and why, and that the check at load finds every fault it is for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.attention import Segment
from slipstream.commands.check.verb import check
from slipstream.commands.shared.options import ModelSetup
from slipstream.errors import CorruptFile, NotEnoughMemory, ShapeMismatch, SlipstreamError, UnsupportedModel
from slipstream.models import adapter, load
from slipstream.models.adapter import Adapter
from slipstream.models.decoder import Decoder
from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint
from slipstream.models.formats.resolve import open_model
from slipstream.models.load import load_model
from tests.models.foreign import foreign_directory, foreign_model, save
from tests.tiny import _character_tokenizer, tiny_directory


def loaded(path: Path) -> Any:
    return load_model(path, dtype="float32", device="cpu")[0]


def changed(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a model directory with other settings in config.json."""
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refused(error: type[SlipstreamError], path: Path, *words: str) -> None:
    with pytest.raises(error) as raised:
        loaded(path)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in (str(path), *words)), message


# -- which models -----------------------------------------------------------------------------------------------------


def test_what_we_compute_ourselves_never_goes_through_transformers() -> None:
    assert isinstance(loaded(tiny_directory()), Decoder)
    assert isinstance(loaded(foreign_directory("gpt2")), Adapter)


def test_a_native_architecture_with_a_feature_that_we_lack_goes_through_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    llama = foreign_model("LlamaForCausalLM", intermediate_size=64, rope_parameters=rope)
    path = save(llama)
    with caplog.at_level(logging.WARNING, "slipstream"):
        ours = LLM(path, speculate=None)
    assert isinstance(ours.model, Adapter)
    assert "yarn" in caplog.text and "through transformers" in caplog.text
    prompt = [5, 3, 8] * 30
    (output,) = ours.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    with torch.no_grad():
        assert output.token_ids == [int(llama(torch.tensor([prompt])).logits[0, -1].argmax())]


def test_a_damaged_config_of_a_native_architecture_stays_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="num_attention_heads"):
        loaded(changed(tiny_directory(), tmp_path, num_attention_heads=0))


LOCAL = {"attention_types": [[["global", "local"], 1]], "num_heads": 4, "num_layers": 2, "window_size": 32}
CHUNKS = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "moe_layers": [],
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaForCausalLM", {"state_size": 4}, "recurrent state"),
    ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 64}, "recurrent state"),
    (
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3, "lru_width": 32, "intermediate_size": 64},
        "which",
    ),
    ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}, "causal"),
    ("Llama4ForCausalLM", CHUNKS, "chunked_attention"),
    ("BloomForCausalLM", {"n_head": 4}, "4-D mask"),  # positions come from a 2-D mask
    ("RobertaForCausalLM", {"intermediate_size": 32, "pad_token_id": 1}, "4-D masks"),  # sees what comes after
    ("GPTNeoForCausalLM", LOCAL, "4-D masks"),  # a window that counts slots
    ("GPT2LMHeadModel", {"max_position_embeddings": 8}, "context of 8"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_cannot_be_run_is_refused_by_name(name: str, settings: dict[str, Any], reason: str) -> None:
    refused(UnsupportedModel, save(foreign_model(name, **settings)), name, reason)


def test_code_that_comes_with_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('this ran')")
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "model_type": "own"}
    path = changed(foreign_directory("gpt2"), tmp_path, architectures=["OwnForCausalLM"], **own)
    refused(UnsupportedModel, path, "OwnForCausalLM", "never run")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM"),
        ({"architectures": None}, "none"),
        ({"model_type": "nothing"}, "GPT2LMHeadModel"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
        ({"n_layer": "many"}, "GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
    ids=str,
)
def test_configs_that_no_runner_supports(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    refused(UnsupportedModel, changed(foreign_directory("gpt2"), tmp_path, **settings), word)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    weight = "transformer.h.1.mlp.c_fc.weight"

    def damaged(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        with_tensors(changed(foreign_directory("gpt2"), folder), change)
        return folder

    refused(CorruptFile, damaged("lost", lambda tensors: tensors.pop(weight)), weight, "lacks")
    refused(ShapeMismatch, damaged("cut", lambda tensors: tensors.update({weight: torch.zeros(32, 7)})), weight, "7")
    refused(UnsupportedModel, damaged("more", lambda tensors: tensors.update(extra=torch.zeros(3))), "extra")
    eighth = torch.zeros(32, 128).to(torch.float8_e4m3fn)
    refused(UnsupportedModel, damaged("f8", lambda tensors: tensors.update({weight: eighth})), weight, "F8")
    cut = damaged("short", lambda tensors: None)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    refused(CorruptFile, cut, "model.safetensors")
    file.rename(cut / "pytorch_model.bin")
    refused(UnsupportedModel, cut, "pickled")


def test_too_little_memory_is_reported_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(adapter.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(NotEnoughMemory, match="weights in float32"):
        loaded(foreign_directory("gpt2"))


def test_the_shape_is_known_without_the_weights() -> None:
    falcon, deepseek = open_model(foreign_directory("falcon")), open_model(foreign_directory("deepseek"))
    assert isinstance(falcon, AdapterCheckpoint) and isinstance(deepseek, AdapterCheckpoint)
    assert (falcon.config.layers, falcon.config.kv_heads, falcon.config.head_dim) == (2, 1, 8)
    assert deepseek.config.key_width != deepseek.config.value_width  # latents or heads, as the version has it
    assert deepseek.config.head_dim == max(deepseek.config.key_width, deepseek.config.value_width)
    for checkpoint in (falcon, deepseek):
        model = loaded(checkpoint.path)
        assert checkpoint.config.parameters == sum(p.numel() for p in model._model.parameters())


def test_rotations_that_change_with_the_length_end_the_context_where_they_would() -> None:
    factors = [1.0, 1.5, 2.0, 3.0]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1], "rope_theta": 1e4}
    settings = {"intermediate_size": 64, "original_max_position_embeddings": 64}
    path = save(foreign_model("Phi3ForCausalLM", rope_parameters=rope, **settings))
    assert loaded(path).config.context == 64


def test_check_says_what_it_can_tell_and_what_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    setup = ModelSetup(model=str(foreign_directory("falcon")), device="cpu")
    assert check(setup) == 0
    text = capsys.readouterr().out
    assert "4 heads (1 K/V)" in text and "not native" in text and "is known after loading" in text
    assert check(setup, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"]["native"] is False
    assert found["memory_bytes"]["weights"] == 4 * found["architecture"]["parameters"]
    assert check(ModelSetup(model=str(tiny_directory())), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["architecture"]["native"] is True


def test_without_transformers_the_reason_is_the_architecture() -> None:
    path = foreign_directory("gpt2")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from slipstream.errors import UnsupportedModel\n"
        "from slipstream.models.formats.resolve import open_model\n"
        f"try: open_model({str(path)!r})\n"
        "except UnsupportedModel as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has architecture 'GPT2LMHeadModel'" in result.stdout, result.stderr
    assert "pip install 'slipstream[hf]'" in result.stdout and result.stdout.count("\n") == 1


# -- the check at load ------------------------------------------------------------------------------------------------


def every_earlier_slot(honest: Any) -> Any:
    def visible(segment: Segment, window: int | None) -> Any:
        right = honest(segment, window)
        return np.tri(*right.shape, k=segment.first_slot, dtype=np.bool_)

    return visible


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "siblings are seen": ("gpt2", every_earlier_slot),
    "siblings are seen, rotary": ("phi", every_earlier_slot),
    "no window": ("phi3", lambda honest: lambda segment, window: honest(segment, None)),
    "a window one row too wide": ("phi3", lambda honest: lambda segment, window: honest(segment, window + 1)),
    "a window one row too narrow": ("phi3", lambda honest: lambda segment, window: honest(segment, window - 1)),
    "a window in all layers": ("cohere2", lambda honest: lambda segment, window: honest(segment, 40)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_a_mask_that_is_not_honoured(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plant = FAULTS[fault]
    monkeypatch.setattr(adapter, "visible_keys", plant(adapter.visible_keys))
    refused(UnsupportedModel, foreign_directory(kind), "4-D masks")


@pytest.mark.parametrize("kind", ["gpt2", "opt", "phi", "gpt_neox"])
def test_the_check_finds_positions_that_are_not_honoured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "positions", property(lambda segment: segment.slots))
    refused(UnsupportedModel, foreign_directory(kind))


def test_the_check_finds_keys_and_values_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = adapter.SegmentCache.update

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any) -> Any:
        return honest(self, keys, values.roll(1, 2), layer)

    monkeypatch.setattr(adapter.SegmentCache, "update", update)
    refused(UnsupportedModel, foreign_directory("gpt_neox"), "4-D masks")


# -- text -------------------------------------------------------------------------------------------------------------


def test_text_in_and_text_out_and_an_end_that_generation_config_names(tmp_path: Path) -> None:
    path = changed(foreign_directory("gpt2"), tmp_path)
    _character_tokenizer().save(str(path / "tokenizer.json"))
    llm = LLM(path, speculate="suffix:min_confidence=0")
    (output,) = llm.generate("hello hello hello", SamplingParams(temperature=0, max_tokens=20))
    assert len(output.outputs[0].text) > 0 and len(output.token_ids) == 20
    end = output.token_ids[3]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (again,) = LLM(path, speculate=None).generate("hello hello hello", SamplingParams(temperature=0, max_tokens=20))
    assert again.finish_reason == "stop"
    assert again.token_ids == output.token_ids[: output.token_ids.index(end) + 1]
