"""Tokenizers of Hugging Face directories, against transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import CorruptFile, ModelNotFound
from slipstream.text import Tokenizer
from tests.vocabularies import CHATS, CORPUS, TEXTS, llama_of_transformers, save_directory, train_byte_level


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_directory_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    directory = save_directory(train_byte_level(), tmp_path, **config)
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(str(directory))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    for chat, more in itertools.product(CHATS, (False, True)):
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=more)
        assert ours.render_chat(chat, add_generation_prompt=more) == rendered
        ids = theirs.apply_chat_template(chat, add_generation_prompt=more)["input_ids"]
        assert ours.encode_chat(chat, add_generation_prompt=more) == ids
    assert len(ours) == len(theirs)
    assert ours.special_ids == {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.bos_id == theirs.bos_token_id and theirs.eos_token_id in ours.eos_ids


def test_directory_with_a_post_processor_adds_bos_once(tmp_path: Path) -> None:
    from tokenizers import processors

    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    ours = Tokenizer.from_directory(save_directory(backend, tmp_path))
    assert ours.encode("Hi")[0] == 1 and ours.encode("Hi", add_special=False)[0] != 1
    assert ours.encode_chat(CHATS[0]).count(1) == 2  # one a turn, none added


def test_directory_eos_from_every_file(tmp_path: Path) -> None:
    directory = save_directory(train_byte_level(), tmp_path)
    assert Tokenizer.from_directory(directory).eos_ids == (0, 2)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert Tokenizer.from_directory(directory).eos_ids == (5, 2, 0)
    assert Tokenizer.from_directory(directory).bos_id == 1


def test_directory_ignores_truncation_and_padding(tmp_path: Path) -> None:
    backend = train_byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    ours = Tokenizer.from_directory(save_directory(backend, tmp_path))
    assert ours.decode(ours.encode(CORPUS[0])) == CORPUS[0]


def test_directory_added_tokens_of_the_config(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    added = {"700": {"content": "<tool>", "special": False}, "701": {"content": "<pad>", "special": True}}
    backend = train_byte_level()
    start = backend.get_vocab_size()
    added = {str(start + i): value for i, value in enumerate(added.values())}
    directory = save_directory(backend, tmp_path, added_tokens_decoder=added, additional_special_tokens=["<extra>"])
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(str(directory))
    text = "a<tool>b<pad>c<extra>d"
    assert ours.encode(text) == theirs.encode(text)
    assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == "a<tool>bcd"
    assert ours.decode(ours.encode(text)) == "a<tool>bcd"
    assert len(ours) == start + 3


def test_directory_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    model = json.loads(train_byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    ours = Tokenizer.from_directory(tmp_path)
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == (theirs.eos_token_id,)  # named by the class alone


def test_directory_of_sentencepiece_style_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = save_directory(llama_of_transformers().backend_tokenizer, tmp_path, bos_token="<s>", eos_token="</s>")
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(str(directory))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.encode("the")[0] == ours.bos_id == 1


@pytest.mark.parametrize("added", [[1], {"x": {"content": "a"}}, {"1": {}}, {"1": 3}, {"1": {"content": 3}}], ids=str)
def test_directory_bad_added_tokens(tmp_path: Path, added: Any) -> None:
    with pytest.raises(CorruptFile, match="added_tokens_decoder"):
        Tokenizer.from_directory(save_directory(train_byte_level(), tmp_path, added_tokens_decoder=added))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("garbage", [b"{", b"\xff\xfe", b"[1]", b""])
def test_directory_garbled_json_names_the_file(tmp_path: Path, name: str, garbage: bytes) -> None:
    save_directory(train_byte_level(), tmp_path)
    (tmp_path / name).write_bytes(garbage)
    with pytest.raises(CorruptFile, match=name) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_directory_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
