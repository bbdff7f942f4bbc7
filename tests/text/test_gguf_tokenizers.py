"""Tokenizers of GGUF metadata, against the vocabularies they were made of."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.text import Tokenizer, tokenizer_from_gguf
from tests.vocabularies import (
    SPECIALS,
    TEXTS,
    gguf_of_byte_level,
    gguf_of_spm,
    llama_of_transformers,
    spm_pieces,
    train_byte_level,
)


def spm_by_the_book(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's own rule: merge the best-scoring neighbours, the leftmost of equals, until none can be."""
    ids = {piece: index for index, piece in enumerate(pieces) if index >= 259}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [id for symbol in symbols for id in ([ids[symbol]] if symbol in ids else [3 + b for b in symbol.encode()])]


def splitting(name: str) -> tuple[Any, Any]:
    """The pre-tokenizer and normaliser behind a GGUF name, spelled as the models' own tokenizer.json has them."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    def split(expression: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
            ]
        )

    three_digits = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return {
        "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        "olmo": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        "smollm": (digits, None),
        "starcoder": (digits, None),
        "dbrx": (split(three_digits), None),
        "llama-bpe": (split(three_digits), None),
        "qwen2": (split(three_digits.replace("{1,3}", "")), normalizers.NFC()),
        "gpt-4o": (
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            None,
        ),
        "tekken": (
            split(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            None,
        ),
    }[name]


@pytest.mark.parametrize(
    "pre", ["gpt-2", "olmo", "smollm", "starcoder", "dbrx", "llama-bpe", "qwen2", "gpt-4o", "tekken"]
)
def test_gguf_byte_level_equals_its_source(pre: str) -> None:
    source = train_byte_level(*splitting(pre))
    ours = tokenizer_from_gguf(gguf_of_byte_level(source, pre))
    for text in TEXTS:
        ids = source.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.decode(ids) == source.decode(ids)
    assert len(ours) == source.get_vocab_size()
    assert ours.bos_id == 0 and ours.eos_ids == (2,) and ours.special_ids == {0, 1, 2}
    assert (ours.encode("Hi")[0] == 0) == (pre in ("llama-bpe", "tekken"))


def test_gguf_qwen2_equals_the_class_of_transformers() -> None:
    from transformers import Qwen2Tokenizer

    source = train_byte_level(*splitting("qwen2"))
    model = json.loads(source.to_str())["model"]
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": SPECIALS})
    ours = tokenizer_from_gguf(gguf_of_byte_level(source, "qwen2"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_gguf_spm_equals_the_class_of_transformers(spm: Tokenizer) -> None:
    theirs = llama_of_transformers()
    for text in TEXTS:
        # Their Metaspace adds no space in front of one; SentencePiece itself, and their normaliser of old, do.
        if not text.startswith(" ") and text:
            ids = theirs.encode(text)
            assert spm.encode(text) == ids, text
            if "\ufffd" not in theirs.decode(ids):
                assert spm.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*"thequick anbdoxf", " the", "ing", "é", "\n", "👍"]), max_size=25).map("".join))
def test_gguf_spm_equals_the_book(spm: Tokenizer, text: str) -> None:
    pieces, scores, _ = spm_pieces()
    assert spm.encode(text, add_special=False) == (spm_by_the_book(text, pieces, scores) if text else [])
    assert spm.decode(spm.encode(text)) == text


def test_gguf_spm_details() -> None:
    ours = tokenizer_from_gguf(gguf_of_spm())
    assert ours.encode("") == [1]
    assert ours.encode("the<s>the", add_special=False).count(1) == 1
    bare = tokenizer_from_gguf(gguf_of_spm(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.encode("the", add_special=False) != ours.encode("the", add_special=False)
    assert bare.decode(bare.encode(" the")) == " the"
    assert ours.token_text(3 + 0xE2) == "\\xe2" and ours.token_text(3 + 0x0A) == "\n"
    assert ours.decode([3 + 0xF0, 3 + 0x9F, 3 + 0x0A, 3 + 0x41]) == "\ufffd\nA"  # a broken character costs itself only


def test_gguf_user_defined_tokens_are_whole_but_shown() -> None:
    metadata = gguf_of_spm()
    for piece in ("▁▁▁▁", "<tool>"):
        metadata["tokenizer.ggml.tokens"].append(piece)
        metadata["tokenizer.ggml.scores"].append(0.0)
        metadata["tokenizer.ggml.token_type"].append(4)
    metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = tokenizer_from_gguf(metadata)
    ids = ours.encode("the    the<tool>", add_special=False)
    assert ids[-1] == len(ours) - 1 and len(ours) - 2 in ids
    assert ours.decode(ids) == "the    the<tool>"


def test_gguf_end_of_turn_and_padding_rows() -> None:
    metadata = gguf_of_byte_level(train_byte_level(), "gpt-2")
    fingerprint, size = tokenizer_from_gguf(metadata).fingerprint(), len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size}]", f"[PAD{size + 1}]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    metadata |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    ours = tokenizer_from_gguf(metadata)
    assert ours.eos_ids == (0, 2)
    assert len(ours) == size and ours.fingerprint() == fingerprint and ours.token(size) is None


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"tokenizer.ggml.pre": "martian"}, UnsupportedModel, "martian.*smollm"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "t5"),
        ({"tokenizer.ggml.model": None}, CorruptFile, r"tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.tokens": None}, CorruptFile, "tokens"),
        ({"tokenizer.ggml.tokens": []}, CorruptFile, "empty"),
        ({"tokenizer.ggml.token_type": [1, 2]}, CorruptFile, "token_type"),
        ({"tokenizer.ggml.merges": None}, CorruptFile, "merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, CorruptFile, "pair"),
        ({"tokenizer.ggml.merges": ["qqq zzz"]}, CorruptFile, "merges"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, CorruptFile, "eos_token_id"),
    ],
)
def test_gguf_bad_metadata(change: dict[str, Any], error: type[Exception], word: str) -> None:
    metadata = gguf_of_byte_level(train_byte_level(), "gpt-2") | change
    with pytest.raises(error, match=word):
        tokenizer_from_gguf(metadata)
