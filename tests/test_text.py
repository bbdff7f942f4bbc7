"""Tokenizers, chat templates, incremental decoding and stop strings, on toy vocabularies made here."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFile, ModelNotFound, OptionError, PromptError, UnsupportedModel
from slipstream.text import IncrementalDecoder, StopStrings, Tokenizer, tokenizer_from_gguf

ROOT = Path(__file__).parent.parent
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; they'll be friends.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))  # 357",
    "In 1984 there were 42 cats; in 2024 there are 1234567 of them.",
    "Größe, naïve café, Москва, 東京, 你好世界, مرحبا, שלום, नमस्ते, 👍🏽👨‍👩‍👧 ok?",
    '{"name": "Ada", "tags": ["x", "y"], "n": -3.5e7, "nested": {"a": null}}',
    "HELLO World! It'S we'RE I'm ... --- /usr/local/bin\r\n\r\n\ttabbed  two   three    four",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "\n\n\n",
    "\n \n\t x\r\ny",
    "a\u00a0b\u2003c\u3000d",
    "٣٤٥ ١ Ⅷ ½ x²y³ 10,000.50",
    "e\u0301 vs é, ﬁ, Å Å",
    "🙂🙃 🏳️‍🌈 🇫🇷",
    "zażółć gęślą jaźń ĞğİıŞş ὀδός ქართული ไทย 한국어",
    "DON'T don'T 'S 's 'ſ it'll'd",
    "HTTPServer camelCase iPhone XMLHttpRequest2 a/b//c\n/",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|> spaced <|im_end|>",
    "<|im_start|><|im_end|><|unknown|><|im_start",
    "x" * 300,
    " " * 70 + "y",
    "\x00\x01\x7f\ufffd\uffff",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What's 12 + 345?\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<b> & 'c'"},
        {"role": "user", "content": " 東京"},
    ],
]


def train_byte_level(pre_tokenizer: Any = None, normalizer: Any = None) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIALS, initial_alphabet=sorted(alphabet), show_progress=False
        ),
    )
    return backend


def gguf_of_byte_level(backend: Any, pre: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


@functools.cache
def spm_pieces() -> tuple[list[str], list[float], list[int]]:
    """A toy SentencePiece vocabulary: pieces, scores, types."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=300, special_tokens=[], show_progress=False))
    vocab = backend.get_vocab()
    learned = sorted(vocab, key=vocab.__getitem__)
    merged = [token for token in learned if len(token) > 1]
    letters = [token for token in learned if len(token) == 1]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters))
    return pieces, scores, types


def gguf_of_spm(**changes: Any) -> dict[str, Any]:
    pieces, scores, types = spm_pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces],
        "tokenizer.ggml.scores": [*scores],
        "tokenizer.ggml.token_type": [*types],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    } | changes


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


def llama_of_transformers() -> Any:
    """The toy SentencePiece vocabulary in transformers' own class, its merges recovered by their rule."""
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    pieces, scores, types = spm_pieces()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    special = {piece for piece, kind in zip(pieces, types, strict=True) if kind != 1}
    merges = generate_merges(vocab, dict(zip(pieces, scores, strict=True)), skip_tokens=special)
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, legacy=True)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return tokenizer_from_gguf(gguf_of_byte_level(train_byte_level(), "gpt-2"))


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return tokenizer_from_gguf(gguf_of_spm())


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


def save_directory(backend: Any, path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False},
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0, "bos_token_id": 1}))
    return path


# --- a directory, against transformers ---------------------------------------------------------------------------


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


# --- GGUF ----------------------------------------------------------------------------------------------------------


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


# --- the tokenizer itself ------------------------------------------------------------------------------------------


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


# --- chat templates ------------------------------------------------------------------------------------------------


def with_template(template: Any, tmp_path: Path, **config: Any) -> Tokenizer:
    return Tokenizer.from_directory(save_directory(train_byte_level(), tmp_path, chat_template=template, **config))


RICH = """{%- if messages[0].role == 'tool' %}{{ raise_exception('no tools, please') }}{% endif -%}
{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- generation %}{% set body = m.content | trim %}<{{ m.role }}>{{ body }}{{ eos_token }}{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{{ {'html': '<b>&"é"'} | tojson }}{{ [1, {'a': none}] | tojson(indent=2) }}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{{ strftime_now('%Y') | length }}{{ mood | default('calm') }}{{ tools is none }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize("chat", [*CHATS, [{"role": "skip", "content": "x"}, *CHATS[2], *CHATS[1]]])
def test_template_dialect_equals_transformers(tmp_path: Path, chat: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    ours, theirs = with_template(RICH, tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    for options in ({}, {"mood": "glad"}, {"add_generation_prompt": True}):
        expected = theirs.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": False, **options})
        assert ours.render_chat(chat, **{"add_generation_prompt": False, **options}) == expected


def test_template_sources(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    assert with_template(named, tmp_path).render_chat(CHATS[0]) == "default"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_directory(tmp_path).render_chat(CHATS[0]) == "from jinja"


def test_no_template(tmp_path: Path) -> None:
    ours = with_template(None, tmp_path)
    assert not ours.has_chat_template
    with pytest.raises(OptionError, match="generate"):
        ours.encode_chat(CHATS[0])


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("Hi", "list"),
        ({"role": "user", "content": "Hi"}, "list"),
        (None, "list"),
        ([], "empty"),
        (["Hi"], r"messages\[0\]"),
        ([{"content": "Hi"}], "role"),
        ([{"role": "user"}], "content"),
        ([CHATS[0][0], {"role": "user", "content": 3}], r"messages\[1\].*int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text"),
        ([{"role": "tool", "content": "Hi"}], "no tools, please"),
    ],
)
def test_bad_messages(tmp_path: Path, messages: Any, word: str) -> None:
    with pytest.raises(OptionError, match=word) as caught:
        with_template(RICH, tmp_path).render_chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.__class__.__mro__ }}", "{{ messages[0].x.y }}"])
def test_templates_that_fail(tmp_path: Path, template: str) -> None:
    with pytest.raises(OptionError, match="chat template"):
        with_template(template, tmp_path).render_chat(CHATS[0])


def test_a_template_that_does_not_parse(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="chat template"):
        with_template("{% for %}", tmp_path).render_chat(CHATS[0])


def test_text_parts_are_joined(byte_level: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert byte_level.render_chat(parts) == byte_level.render_chat([{"role": "user", "content": "a\nb"}])


# --- incremental decoding ------------------------------------------------------------------------------------------


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


# --- stop strings --------------------------------------------------------------------------------------------------


def stop_by_the_book(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_stops_equal_the_book_however_cut(chunks: list[str], stops: list[str]) -> None:
    stopper, shown, found = StopStrings(stops), "", None
    text = ""
    for chunk in chunks:
        safe, found = stopper.push(chunk)
        shown, text = shown + safe, text + chunk
        assert (found is not None) == any(stop in text for stop in stops)  # known with the piece that completes it
        if found is not None:
            break
    assert (shown + stopper.flush(), found) == stop_by_the_book(text, stops)


def test_stops_hold_back_only_what_may_matter() -> None:
    stopper = StopStrings(["<end>", "\n\n"])
    assert stopper.push("abc<") == ("abc", None)
    assert stopper.push("en") == ("", None)
    assert stopper.push("x\n") == ("<enx", None)
    assert stopper.push("\nmore") == ("", "\n\n")
    assert stopper.push("again") == ("", "\n\n") and stopper.flush() == ""
    stopper = StopStrings(["<end>"])
    assert stopper.push("a<e") == ("a", None) and stopper.flush() == "<e"
    assert StopStrings([]).push("abc") == ("abc", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_bad_stops(stops: list[Any]) -> None:
    with pytest.raises(OptionError, match="stop string"):
        StopStrings(stops)
