"""Small corpora of token ids, written as the real builder writes them."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from slipstream.drafters.retrieval.corpus import HEADER, Header, fingerprint
from slipstream.drafters.retrieval.corpus_build import SHARD_TOKENS, CorpusWriter
from slipstream.text import Tokenizer
from tests.tiny import tiny_directory


def write_corpus(
    folder: Path,
    documents: Iterable[Sequence[int]],
    vocabulary: int = 97,
    shard_tokens: int = SHARD_TOKENS,
    tokenizer: Tokenizer | None = None,
) -> Header:
    """A corpus of ids."""
    meaning = fingerprint(tokenizer, vocabulary)
    with CorpusWriter(folder, tokenizer=meaning, vocabulary=vocabulary, shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
        return writer.finish()


def contents(folder: Path) -> list[list[list[int]]]:
    """Every shard's documents, read as the format says and not by our reader."""
    header = json.loads((folder / HEADER).read_text())
    shards = []
    for number, count in enumerate(header["shards"]):
        ids = np.fromfile(folder / f"tokens-{number:05d}.bin", f">u{header['token_bytes']}").tolist()
        separator = 256 ** header["token_bytes"] - 1
        assert len(ids) == count and ids[-1] == separator
        ends = [place for place, token in enumerate(ids) if token == separator]
        shards.append([ids[start + 1 : end] for start, end in zip([-1, *ends], ends, strict=False)])
    return shards


@functools.cache
def tiny_corpus() -> str:
    """Random texts for the tiny models with characters, half of them repetitive, in several shards."""
    chooser = random.Random(11)
    documents = []
    for number in range(40):
        base = [chooser.randrange(97) for _ in range(chooser.choice([1, 5, 30, 200]))]
        documents.append(base * (4 if number % 2 else 1))
    folder = Path(tempfile.mkdtemp(prefix="slipstream-corpus-")) / "corpus"
    tokenizer = Tokenizer.from_directory(tiny_directory(characters=True))
    write_corpus(folder, documents, shard_tokens=1000, tokenizer=tokenizer)
    return str(folder)
