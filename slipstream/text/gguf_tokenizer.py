"""Builds a tokenizer from the metadata of a GGUF file.

The file has the vocabulary and, for byte-level BPE, the merges and the *name* of the pre-tokenizer rule; the rules
themselves are below. An unknown name is refused: with the wrong rule a model still answers, but worse, and unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import CorruptFile, UnsupportedModel
from slipstream.text.chat import one_line
from slipstream.text.pieces import SPACE
from slipstream.text.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # of tokenizer.ggml.token_type; 1 is a normal token

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}{_PUNCTUATION}{_REST}"
_ONE_DIGIT = rf"{_WORDS}|\p{{N}}{_PUNCTUATION}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"  # words that end where capitals begin
_LOWER_WORD, _UPPER_WORD = (rf"[^\r\n\p{{L}}\p{{N}}]?{case}" for case in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_PUNCTUATION_AND_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED = rf"{_LOWER_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_PUNCTUATION_AND_SLASHES}{_REST}"
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}{_PUNCTUATION_AND_SLASHES}{_REST}"


@dataclass(frozen=True)
class _Rule:
    """How a byte-level vocabulary splits text before merging; `split=None` is GPT-2's own expression."""

    split: str | None = None
    single_digits: bool = False  # every digit apart, before anything else
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word in the vocabulary is taken whole, whatever the merges say
    add_bos: bool = False  # if the file does not say


_GPT2 = _Rule()
_DIGITS = _Rule(single_digits=True)
_LLAMA3 = _Rule(_THREE_DIGITS, whole_words=True, add_bos=True)
_CL100K = _Rule(_THREE_DIGITS)
_QWEN2 = _Rule(_ONE_DIGIT, compose=True)
_O200K = _Rule(_CASED)
_RULES = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "qwen2": _QWEN2,
    "gpt-4o": _O200K,
    "tekken": _Rule(_TEKKEN, whole_words=True, add_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.*` keys describe, given as plain Python values.

    CorruptFile if they are missing or contradict each other, UnsupportedModel for an unknown kind.
    """
    vocabulary = _Vocabulary(metadata)
    kind = vocabulary.required("tokenizer.ggml.model")
    if kind == "gpt2":
        name = str(metadata.get("tokenizer.ggml.pre", "default"))
        rule = _RULES.get(name)
        if rule is None:
            raise UnsupportedModel(
                f"GGUF pre-tokenizer {name!r} is not known", hint=f"known: {', '.join(sorted(_RULES))}"
            )
        backend, add_bos = _byte_level(vocabulary, rule), rule.add_bos
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary, bool(metadata.get("tokenizer.ggml.add_space_prefix", True))), True
    else:
        raise UnsupportedModel(f"GGUF tokenizer model {kind!r} is not known", hint="known: gpt2, llama")
    vocabulary.declare_added(backend)

    named = {
        "bos_token": vocabulary.id("bos"),
        "eos_token": vocabulary.id("eos"),
        "unk_token": vocabulary.id("unknown"),
        "pad_token": vocabulary.id("padding"),
    }
    endings = [vocabulary.id(name) for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=named["bos_token"],
        eos_ids=[id for id in endings if id is not None],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: vocabulary.tokens[id] for name, id in named.items() if id is not None},
    )


class _Vocabulary:
    """The token list of a file with the type and score of each, checked for their lengths."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = [str(token) for token in self.required("tokenizer.ggml.tokens")]
        if not self.tokens:
            raise CorruptFile("the GGUF vocabulary is empty")
        self.types = [int(type) for type in self._per_token("tokenizer.ggml.token_type", 1)]
        self.by_token: dict[str, int] = {}
        for id, token in enumerate(self.tokens):
            if self.types[id] == _UNUSED and token == f"[PAD{id}]":
                continue  # padding of the vocabulary up to the model's rows
            self.by_token.setdefault(token, id)

    def required(self, key: str) -> Any:
        """The value of a required key."""
        value = self._metadata.get(key)
        if value is None:
            raise CorruptFile(f"the GGUF file has no {key}")
        return value

    def id(self, role: str) -> int | None:
        """The id declared for a role (bos, eos, ...), or None; an id outside the vocabulary is refused."""
        key = f"tokenizer.ggml.{role}_token_id"
        id = self._metadata.get(key)
        if id is not None and not 0 <= int(id) < len(self.tokens):
            raise CorruptFile(f"{key}={id} is outside the GGUF vocabulary of {len(self.tokens)} tokens")
        return None if id is None else int(id)

    def scores(self) -> list[float]:
        """The score of each token."""
        self.required("tokenizer.ggml.scores")
        return [float(score) for score in self._per_token("tokenizer.ggml.scores", 0.0)]

    def respell(self, old: str, new: str) -> None:
        """Spell a token another way, unless that spelling exists."""
        if new not in self.by_token:
            id = self.by_token.pop(old)
            self.by_token[new], self.tokens[id] = id, new

    def declare_added(self, backend: Any) -> None:
        """Control tokens are matched whole and skipped in decoded text, user-defined ones only matched whole."""
        from tokenizers import AddedToken

        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=self.types[id] != _USER_DEFINED)
                for token, id in self.by_token.items()
                if token and self.types[id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ]
        )

    def _per_token(self, key: str, default: float) -> list[Any]:
        values = self._metadata.get(key)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise CorruptFile(f"the GGUF file has {len(values)} entries in {key} for {len(self.tokens)} tokens")
        return list(values)


def _byte_level(vocabulary: _Vocabulary, rule: _Rule) -> Any:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    merges = []
    for merge in vocabulary.required("tokenizer.ggml.merges"):
        left, space, right = str(merge).partition(" ")
        if not (left and space and right):
            raise CorruptFile(f"the GGUF file has a merge that is not a pair: {merge!r}")
        merges.append((left, right))
    backend = _bpe(vocabulary, merges, ignore_merges=rule.whole_words)
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.split is not None:
        cuts.append(pre_tokenizers.Split(Regex(rule.split), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, space_prefix: bool) -> Any:
    """SentencePiece merges the pair whose union scores best; as BPE, each split of each piece is a merge of that rank.

    If one piece has several splits, the longer left part comes first, as in the converters of Hugging Face.
    """
    from tokenizers import decoders, normalizers

    for id, token in enumerate(vocabulary.tokens):
        if vocabulary.types[id] == _USER_DEFINED and SPACE in token:
            vocabulary.respell(token, token.replace(SPACE, " "))  # it is matched in the text as written
    scores, types, ids = vocabulary.scores(), vocabulary.types, vocabulary.by_token
    mergeable = {token: id for token, id in ids.items() if types[id] not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
    ranked = []
    for token, id in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[id], id, -cut, left, right))
    ranked.sort()
    unknown = vocabulary.id("unknown")
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    backend = _bpe(
        vocabulary,
        [(left, right) for *_, left, right in ranked],
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    # A text, and each part of it after a special token, gets a leading space, as in training.
    prefix = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    fallback = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*fallback, *strip])
    return backend


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    try:
        return Backend(BPE(vocab=vocabulary.by_token, merges=merges, **options))
    except Exception as error:  # the library raises bare exceptions: a merge of tokens that do not exist
        raise CorruptFile(f"the GGUF merges do not fit the vocabulary: {one_line(error)}") from error
