"""A model's vocabulary as llguidance reads it: the bytes of every token, and the encoding of a text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from slipstream.errors import OptionError
from slipstream.text import Tokenizer
from slipstream.text.pieces import Style

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_ANCHOR = "\n"  # before a text, so that SentencePiece encoders put their space before this and not before the text


class Vocabulary:
    """What llguidance asks of a tokenizer; it reads these attributes and calls the object.

    Forced bytes are written in the tokens that `encode` would use. Special tokens are never text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        if tokenizer.decoding.style is Style.OTHER:
            raise OptionError(
                "structured_outputs need a tokenizer whose tokens are bytes of the text",
                hint="byte-level and SentencePiece tokenizers are",
            )
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.piece(token) for token in range(vocab_size)]  # rows without an entry have no bytes
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)
        self.eos_token_id = min(end_ids)
        self.bos_token_id = tokenizer.bos_id
        special = tokenizer.special_ids
        self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}
        self._longest = max(map(len, self._ids), default=0)
        self._spelled = lru_cache(maxsize=4096)(self._spell)  # the same few texts are forced again and again

    def __call__(self, whole: bytes) -> list[int]:
        """Tokens that spell exactly these bytes of UTF-8."""
        return self._spelled(whole)

    def _spell(self, whole: bytes) -> list[int]:
        found = self._encoded(whole.decode("utf-8", "replace"))
        text = all(token < len(self.tokens) and token not in self._tokenizer.special_ids for token in found)
        exact = text and b"".join(self.tokens[token] for token in found) == whole
        return found if exact else self._greedy(whole)

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a text that continues another."""
        if self._tokenizer.decoding.style is Style.BYTE_LEVEL:
            return self._tokenizer.encode(text, add_special=False)
        lead = self._tokenizer.encode(_ANCHOR, add_special=False)
        found = self._tokenizer.encode(_ANCHOR + text, add_special=False)
        return found[len(lead) :] if found[: len(lead)] == lead else []

    def _greedy(self, whole: bytes) -> list[int]:
        """The longest tokens first, for a text that the encoder changes; what no token spells is left out."""
        found: list[int] = []
        place = 0
        while place < len(whole):
            lengths = range(min(self._longest, len(whole) - place), 0, -1)
            length = next((n for n in lengths if whole[place : place + n] in self._ids), None)
            if length is None:
                break
            found.append(self._ids[whole[place : place + length]])
            place += length
        return found


def load_vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """llguidance's own form of the vocabulary, with as many tokens as the model has. Takes a fifth of a second."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise OptionError(
            "structured_outputs need llguidance", hint="pip install 'slipstream[serve]', or llguidance itself"
        ) from None
    ends = sorted(end_ids)
    return LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer, vocab_size, ends)), n_vocab=vocab_size, eos_token=ends)
