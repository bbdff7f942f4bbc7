"""Tokenizers of every kind, and models with them."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.text import Tokenizer
from tests.tiny import tiny_directory

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the other dogs look on. There, there: 2 + 2 = 4, not 1234!",
    "def fox(dog):\n    return dog.jumps(over=True)  # 100%\n\n\nclass Dog:\n    legs = 4\n",
    "Grüße aus Köln, où l'été est là. 東京は晴れ、東京は雨。 naïve café 👍🏽 👍",
]
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(size: int = 400) -> tokenizers.Tokenizer:
    """Merges inside words, as GPT-2 has them; 256 + 1 leaves single bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=_ALPHABET, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Merges over the whole text, a space in front of it, bytes for what is unknown, and a BOS, as Llama 2 has them."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for line in CORPUS for word in line.replace(" ", " ▁").split(" ")]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    plain = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    plain.train_from_iterator(words, trainer)
    learned = json.loads(plain.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    trained.model = models.BPE(learned["vocab"], merges, unk_token="<unk>", byte_fallback=True)
    trained.add_special_tokens(special[:3])
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return trained


def unigram() -> tokenizers.Tokenizer:
    """The likeliest pieces, words begin with a visible space; the decoder is the library's."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False,
        initial_alphabet=[chr(code) for code in range(33, 127)],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """Longest pieces first, lower case only: it changes the text that it is given."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    )
    return backend


def characters(order: int = 0) -> tokenizers.Tokenizer:
    """One token per printable ASCII character, and two special ones; `order` > 0 shuffles their ids."""
    ids = list(range(95))
    if order:
        random.Random(order).shuffle(ids)
    vocabulary = {chr(32 + i): id for i, id in enumerate(ids)} | {"<a>": 95, "<b>": 96}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<a>", "<b>"])
    return backend


KINDS: dict[str, Any] = {
    "byte level": byte_level,
    "bytes": lambda: byte_level(257),
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "characters": characters,
}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """One of KINDS as the package sees it."""
    bos = {"bos_id": 1} if kind == "sentencepiece" else {}
    return Tokenizer(KINDS[kind](), **bos)


def directory(source: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    """A copy of a model's directory with another tokenizer, whose special tokens are named by `settings`."""
    folder = Path(tempfile.mkdtemp(dir=source.parent))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def renumbered(source: Path, order: dict[int, int]) -> Path:
    """A copy of a model's directory in which token `order[i]` is what token i was."""
    folder = Path(tempfile.mkdtemp(dir=source.parent))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.empty_like(weights[name])
        moved[torch.tensor([order[i] for i in range(len(moved))])] = weights[name]
        weights[name] = moved
    save_file(weights, folder / "model.safetensors")
    return folder


@functools.cache
def speaker(kind: str) -> Path:
    """A draft for the tiny target with characters. `self`: the target under other ids; else random, of a kind."""
    if kind == "self":
        backend = characters(order=7)
        order = {id: backend.token_to_id(token) for token, id in characters().get_vocab().items()}
        return directory(renumbered(tiny_directory(0), order), backend)
    backend = KINDS[kind]()
    return directory(tiny_directory(1, vocab_size=backend.get_vocab_size()), backend)


RHYME = "zyxwv utsrq,ponml;kjihg:fedcb!a?"  # every character once, so that each says what comes next


def chunks(size: int) -> tokenizers.Tokenizer:
    """The rhyme in pieces of `size` characters, and their beginnings for texts that end inside a piece."""
    pieces = [RHYME[start : start + size] for start in range(0, len(RHYME), size)]
    merges = [(piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece))]
    entries = [*RHYME, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({entry: id for id, entry in enumerate(entries)}, merges))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    return backend


def taught(backend: tokenizers.Tokenizer, following: dict[str, list[str]], **settings: Any) -> Path:
    """A model in which the last token alone says, with equal chances, which come next."""
    ids = backend.get_vocab()
    folder = directory(tiny_directory(3, vocab_size=len(ids)), backend, **settings)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    head = weights["lm_head.weight"].zero_()
    for token, nexts in following.items():
        embedded = weights["model.embed_tokens.weight"][ids[token]]
        for after in nexts:
            head[ids[after]] += 4 * embedded / embedded.norm()
    save_file(weights, folder / "model.safetensors")
    return folder


@functools.cache
def reciter(size: int, last: str | None = None) -> Path:
    """A model that recites the rhyme over and over in such pieces; `last`: until this piece, and then it ends."""
    backend = chunks(size)
    whole = {RHYME[start : start + size] for start in range(0, len(RHYME), size)}
    following = {}
    for text in backend.get_vocab():
        at = (RHYME.find(text) + len(text)) % len(RHYME)
        following[text] = ["<end>" if text == last else RHYME[at : at + size] if text in whole else RHYME[at]]
    return taught(backend, following, eos_token="<end>")


@functools.cache
def wanderer(order: int) -> Path:
    """A model that writes 中 and 京 as they come, byte by byte; `order` shuffles its ids."""
    alphabet = list(_ALPHABET)
    random.Random(order).shuffle(alphabet)
    backend = tokenizers.Tokenizer(models.BPE({byte: id for id, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    e4, b8, ad, ba, ac = backend.encode("中").tokens + backend.encode("京").tokens[1:]
    return taught(backend, {e4: [b8, ba], b8: [ad], ba: [ac], ad: [e4], ac: [e4]})
