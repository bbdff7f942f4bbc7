"""Incremental decoding: the pieces of a stream, put together, are the text decoded whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.text import IncrementalDecoder, Tokenizer
from tests.vocabularies import CORPUS, TEXTS


@pytest.fixture(scope="module")
def plain_metaspace() -> Tokenizer:
    """A decoder of neither known style, so that the general path is taken."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], show_progress=False)
    )
    return Tokenizer(backend, bos_id=1)


def stream(tokenizer: Tokenizer, prompt: list[int], answer: list[int], chunks: random.Random) -> list[str]:
    decoder, out = IncrementalDecoder(tokenizer, prompt), []
    while answer:
        size = chunks.randint(1, 3)
        out.append(decoder.push(answer[:size]))
        answer = answer[size:]
    return [*out, decoder.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 620), max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", ["byte_level", "spm"])
def test_stream_equals_whole(
    name: str, byte_level: Tokenizer, spm: Tokenizer, ids: list[int], cut: int, chunks: random.Random
) -> None:
    tokenizer = {"byte_level": byte_level, "spm": spm}[name]
    prompt, answer = ids[:cut], ids[cut:]
    pieces = stream(tokenizer, prompt, answer, chunks)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    certain = IncrementalDecoder(tokenizer).push(prompt)  # without a character that the answer completes
    assert "".join(pieces) == whole[len(certain) :]
    assert whole.startswith(before.rstrip("\ufffd"))
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 310), max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_stream_of_another_decoder_equals_whole(
    plain_metaspace: Tokenizer, ids: list[int], cut: int, chunks: random.Random
) -> None:
    prompt, answer = ids[:cut], ids[cut:]
    whole = plain_metaspace.decode(ids)
    assert "".join(stream(plain_metaspace, prompt, answer, chunks)) == whole[len(plain_metaspace.decode(prompt)) :]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_real_text_has_no_broken_characters(byte_level: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, spm):
        ids = tokenizer.encode(text, add_special=False)
        decoder = IncrementalDecoder(tokenizer, [])
        pieces = [decoder.push([id]) for id in ids]
        assert "".join(pieces) == tokenizer.decode(ids) and decoder.flush() == ""
        assert text.count("\ufffd") == "".join(pieces).count("\ufffd")


def test_stream_leading_space_depends_on_the_prompt(spm: Tokenizer) -> None:
    (the,) = spm.encode("the", add_special=False)
    assert IncrementalDecoder(spm, [1]).push([the]) == "the"
    assert IncrementalDecoder(spm, [1, the]).push([the]) == " the"
    decoder = IncrementalDecoder(spm, [])
    assert [decoder.push([the]), decoder.push([the])] == ["the", " the"]


def test_stream_newline_byte_tokens_come_at_once(spm: Tokenizer) -> None:
    assert IncrementalDecoder(spm, [300]).push([3 + 0x0A]) == "\n"


def test_stream_special_tokens(byte_level: Tokenizer) -> None:
    assert IncrementalDecoder(byte_level, []).push([1, 2]) == ""
    assert IncrementalDecoder(byte_level, [], skip_special=False).push([1]) == "<|im_start|>"
