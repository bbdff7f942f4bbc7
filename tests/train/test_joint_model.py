"""A tuned target computes what the decoder computes of the merged weights, and is written as a model that loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slipstream.errors import OptionError, UnsupportedModel
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.formats.gguf_file import GGUFCheckpoint
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.formats.hf_render import rendered_config, save_tokenizer
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.shapes import weight_names
from slipstream.text import Tokenizer, tokenizer_from_gguf
from slipstream.train.joint import merged_model
from slipstream.train.joint.merged_model import MergedCheckpoint, require_writable, write_model
from slipstream.train.joint.model import TUNED, TunedModel, updates_of
from slipstream.train.teacher import Teacher
from tests.gguf_files import Q, write_dense
from tests.models.formats.test_gguf_families import metadata_of, tensors_of, write
from tests.models.test_families import SHAPE, build
from tests.vocabularies import CHATS, TEMPLATE, TEXTS, gguf_of_byte_level, gguf_of_spm, train_byte_level

DENSE = [
    *("llama2", "llama3", "smollm2", "mistral", "qwen2", "qwen2-window", "qwen3"),
    *("gemma2", "gemma2-untied", "gemma3", "gemma3-untied"),
]


def tuned_model(source: Any, size: float, layers: int = 0) -> TunedModel:
    """With updates that are not nothing."""
    torch.manual_seed(1)
    model = TunedModel(source, torch.float32, "cpu", rank=3, layers=layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("leave"):
                weight.copy_(4 * size * torch.randn_like(weight))
    return model


def merged(source: Any, model: TunedModel) -> MergedCheckpoint:
    return MergedCheckpoint(source, updates_of(model.state_dict()), torch.float32)


def reading(model: Decoder, tokens: torch.Tensor, taps: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Hidden states of the decoder's dense pass, and its logits at every row."""
    lesson = Teacher(model).lesson(tokens, torch.ones(len(tokens), dtype=torch.int64), torch.tensor([0]), taps)
    states = [lesson.taps[layer].flatten(0, 1) for layer in taps]
    return *states, model.head(states[-1])


@pytest.mark.parametrize("name", DENSE)
def test_a_merged_model_computes_what_the_tuned_one_did(name: str, tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    build(name, tmp_path / "original")
    source = open_checkpoint(tmp_path / "original")
    model = tuned_model(source, size=0.05)
    (tmp_path / "made").mkdir()
    write_model(merged(source, model), tmp_path / "made")
    made = Decoder(HFCheckpoint(tmp_path / "made"), torch.float32, "cpu")
    tokens = torch.randint(SHAPE["vocab_size"], (2, 90), generator=torch.Generator().manual_seed(2))
    first, last = 0, source.config.layers - 1
    with torch.no_grad():
        hidden, taps = model.read(tokens, (first, last))
        ours = (taps[first].flatten(0, 1), hidden.flatten(0, 1), model.logits(hidden.flatten(0, 1)))
        theirs = reading(made, tokens, (first, last))
        before = reading(Decoder(source, torch.float32, "cpu"), tokens, (first, last))
    for one, other, original in zip(ours, theirs, before, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
        assert (other - original).abs().max() > 1e-2, "updates that show"


def test_without_updates_nothing_changes_and_with_them_only_what_was_tuned(tmp_path: Path) -> None:
    build("gemma2", tmp_path)
    source = open_checkpoint(tmp_path)
    (tmp_path / "same").mkdir()
    write_model(merged(source, tuned_model(source, size=0.0)), tmp_path / "same")
    original, same = (load_file(place / "model.safetensors") for place in (tmp_path, tmp_path / "same"))
    assert original.keys() == same.keys() and all(torch.equal(original[name], same[name]) for name in original)

    model = tuned_model(source, size=0.05, layers=1)
    last = source.config.layers - 1
    assert set(updates_of(model.state_dict())) == {f"layers.{last}.{part}" for part in TUNED}
    joined = merged(source, model)
    changed = {n for n in weight_names(source.config) if not torch.equal(source.weight(n), joined.weight(n))}
    assert changed == {f"layers.{last}.{part}" for part in TUNED}


def test_gradients_reach_every_update_and_nothing_else(tmp_path: Path) -> None:
    build("qwen2", tmp_path)
    model = tuned_model(open_checkpoint(tmp_path), size=0.05)
    hidden, _ = model.read(torch.tensor([[5, 6, 7, 8]]), ())
    model.logits(hidden[0]).logsumexp(-1).sum().backward()
    assert len(list(model.parameters())) == 2 * len(TUNED) * model.config.layers
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_many_tensors_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama2", tmp_path)
    (tmp_path / "LICENSE").write_text("be kind")
    source = open_checkpoint(tmp_path)
    monkeypatch.setattr(merged_model, "_SHARD", 100_000)
    made = tmp_path / "made"
    made.mkdir()
    model = tuned_model(source, size=0.05)
    write_model(merged(source, model), made)
    assert len(list(made.glob("*.safetensors"))) > 2 and (made / "LICENSE").read_text() == "be kind"
    found, wanted = HFCheckpoint(made), merged(source, model)
    assert all(torch.equal(found.weight(name), wanted.weight(name)) for name in weight_names(found.config))


# -- models of another format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_a_family_with_words_of_its_own_is_written_from_a_gguf_file(architecture: str, tmp_path: Path) -> None:
    scalar = {"gemma2": 24, "gemma3": 32}[architecture]
    theirs = build(architecture, tmp_path, query_pre_attn_scalar=scalar)
    facts = metadata_of(theirs.config, architecture)
    file = write(tmp_path / "model.gguf", architecture, tensors_of(tmp_path, architecture), facts)
    source = GGUFCheckpoint(file)
    made = tmp_path / "made"
    made.mkdir()
    write_model(merged(source, tuned_model(source, size=0.0)), made)
    tokens = torch.randint(SHAPE["vocab_size"], (1, 60), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = reading(Decoder(HFCheckpoint(made), torch.float32, "cpu"), tokens, (source.config.layers - 1,))[-1]
        expected = type(theirs).from_pretrained(made)(tokens).logits[0]
        same = theirs(tokens).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(expected, same, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [Q.F16, Q.Q4_0])
@pytest.mark.parametrize("head", [True, False])
def test_a_gguf_file_becomes_a_directory(kind: Q, head: bool, tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 3}
    source = open_checkpoint(write_dense(tmp_path / "small.gguf", kind=kind, head=head, **ends).close())
    model = tuned_model(source, size=0.05)
    made = tmp_path / "made"
    made.mkdir()
    write_model(merged(source, model), made)
    found, wanted = HFCheckpoint(made), merged(source, model)
    assert all(torch.equal(found.weight(name), wanted.weight(name)) for name in weight_names(found.config))
    assert found.config == source.config and found.config.eos_ids == (2, 3) and found.config.tied_head != head
    tokens = torch.tensor([[5, 6, 7, 8, 30, 2]])
    with torch.no_grad():
        ours = reading(Decoder(found, torch.float32, "cpu"), tokens, (0,))[-1]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(tokens).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_tokenizer_of_a_gguf_file_is_written_and_read_back(kind: str, template: str | None, tmp_path: Path) -> None:
    words = gguf_of_spm() if kind == "sentencepiece" else gguf_of_byte_level(train_byte_level(), "gpt-2")
    tokenizer = tokenizer_from_gguf(words | ({"tokenizer.chat_template": template} if template else {}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": list(tokenizer.eos_ids)}))
    save_tokenizer(tokenizer, tmp_path)
    copy = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert copy.encode(text) == tokenizer.encode(text), text
        assert copy.decode(copy.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    if template:
        assert [copy.encode_chat(chat) for chat in CHATS] == [tokenizer.encode_chat(chat) for chat in CHATS]


@pytest.mark.real_model
def test_the_default_model_can_be_written(smollm2_path: Path) -> None:
    require_writable(open_checkpoint(smollm2_path))


def test_what_cannot_be_written_or_tuned_is_refused_by_name(tmp_path: Path) -> None:
    scaled = ModelConfig("llama", 64, 32, 2, 4, 2, 8, 48, 128, rope_factors=(1.0, 2.0, 3.0, 4.0))
    with pytest.raises(UnsupportedModel, match="rotation is given as bare factors"):
        rendered_config(scaled, "x.gguf")
    build("mixtral", tmp_path)
    source = open_checkpoint(tmp_path)
    require_writable(source)
    with pytest.raises(OptionError, match="has experts, but only dense layers can be tuned"):
        TunedModel(source, torch.float32, "cpu", rank=2)
