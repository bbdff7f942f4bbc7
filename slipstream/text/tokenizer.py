"""The tokenizer: text to ids and back, for every file format."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.errors import OptionError, PromptError
from slipstream.text.chat import ChatTemplate
from slipstream.text.pieces import Decoding, Style, decoding_of, piece_bytes

_IDS = 1 << 32  # the library counts tokens in 32 bits


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with what its model's files say about BOS, end tokens and chats.

    `bos_id` is None if the model has none; `eos_ids` are all ids that end an answer, in the order declared;
    `special_ids` are those that `decode` skips. `add_bos=None` leaves the special tokens of `encode` to the backend's
    post-processor; True or False is for a backend without one.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # some files have settings of their training run
        backend.no_padding()
        self._backend = backend
        self._add_bos = add_bos if bos_id is not None else None
        self._chat = ChatTemplate(chat_template, special_tokens or {}) if chat_template else None
        self.decoding: Decoding = decoding_of(backend.decoder)
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}  # cache of decoded tokens

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory. Raises ModelNotFound or CorruptFile."""
        from slipstream.text.directory import tokenizer_from_directory

        return tokenizer_from_directory(path)

    def __len__(self) -> int:
        """The highest id + 1, added tokens included; a model may have more rows than that, for padding."""
        return self._size

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text; with `add_special`, BOS first if the model has one.

        Special tokens written in the text become their ids.
        """
        if not isinstance(text, str):
            raise PromptError(f"a text to encode must be a string, not {type(text).__name__}")
        by_backend = add_special and self._add_bos is None
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=by_backend).ids
        except (TypeError, UnicodeEncodeError) as error:  # raised for a string that is not Unicode
            raise PromptError("the text has half a surrogate pair, which no tokenizer can encode") from error
        return [self.bos_id, *ids] if add_special and self._add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of these ids; ids outside the vocabulary are ignored.

        Bytes that are not UTF-8 become U+FFFD, one for each broken character, without affecting their neighbours (the
        `tokenizers` library drops a whole run of SentencePiece byte tokens for one bad byte).
        """
        if self.decoding.style is Style.OTHER:
            return str(self._backend.decode([id for id in ids if id >= 0], skip_special_tokens=skip_special))
        hidden = self.special_ids if skip_special else frozenset()
        text = b"".join(self.piece(id) for id in ids if id not in hidden).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.decoding.strips_space else text

    def piece(self, id: int) -> bytes:
        """The bytes that one token adds to a text; empty outside the vocabulary and for style OTHER."""
        if id not in self._pieces:
            token, style = self.token(id), self.decoding.style
            self._pieces[id] = b"" if token is None or style is Style.OTHER else piece_bytes(token, style)
        return self._pieces[id]

    def token(self, id: int) -> str | None:
        """The raw vocabulary entry, or None if there is none."""
        return self._backend.id_to_token(id) if 0 <= id < _IDS else None

    def token_text(self, id: int) -> str:
        """A token as readable text; bytes that are no complete character show as \\xNN."""
        token = self.token(id)
        if token is None:
            return f"<id {id}>"
        if self.decoding.style is Style.OTHER:
            return str(self._backend.decode([id], skip_special_tokens=False)) or token
        piece = self.piece(id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return piece.decode("utf-8", "backslashreplace")

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, if there is one."""
        return None if self._chat is None else self._chat.source

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for these messages by the model's chat template; `kwargs` are the template's variables."""
        if self._chat is None:
            raise OptionError("this model has no chat template", hint="give a plain prompt to generate instead")
        return self._chat.render(messages, add_generation_prompt, **kwargs)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """The ids of the rendered chat. A template writes its own BOS, so none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **kwargs), add_special=False)

    def fingerprint(self) -> str:
        """A hash of the id-to-token map: equal for tokenizers whose ids mean the same."""
        return self._fingerprint

    @functools.cached_property
    def _size(self) -> int:
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for token, id in sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
            digest.update(f"{id}\0{token}\0".encode())
        return digest.hexdigest()
