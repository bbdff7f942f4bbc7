"""Toy vocabularies of every kind, texts that are hard to tokenize, and chats."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

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


def llama_of_transformers() -> Any:
    """The toy SentencePiece vocabulary in transformers' own class, its merges recovered by their rule."""
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    pieces, scores, types = spm_pieces()
    vocab = {piece: index for index, piece in enumerate(pieces)}
    special = {piece for piece, kind in zip(pieces, types, strict=True) if kind != 1}
    merges = generate_merges(vocab, dict(zip(pieces, scores, strict=True)), skip_tokens=special)
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, legacy=True)


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
