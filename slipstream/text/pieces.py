"""What one vocabulary entry contributes to the text, as bytes.

Two families cover nearly every causal language model. *Byte-level* vocabularies spell each byte as one printable
character; *SentencePiece* ones write a space as U+2581 and a byte without a piece as `<0x0A>`. In both, the text of a
sequence is the UTF-8 decoding of its tokens' concatenated bytes, so it can be decoded token by token. Other decoders
(WordPiece, say) are left to the library.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"  # SentencePiece's visible space
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Style(enum.Enum):
    """How vocabulary entries spell text."""

    BYTE_LEVEL = "byte level"
    SENTENCEPIECE = "sentencepiece"
    OTHER = "other"


@dataclass(frozen=True)
class Decoding:
    """A style, and whether decoding strips the one space that encoding put before a text."""

    style: Style
    strips_space: bool = False


def decoding_of(decoder: Any) -> Decoding:
    """The decoding of a `tokenizers` decoder; OTHER unless it is recognised exactly."""
    if decoder is None:
        return Decoding(Style.OTHER)
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return Decoding(Style.BYTE_LEVEL)
    if state["type"] != "Sequence":
        return Decoding(Style.OTHER)
    steps = state["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return Decoding(Style.OTHER)
    if (steps[0]["pattern"], steps[0]["content"]) != ({"String": SPACE}, " "):
        return Decoding(Style.OTHER)
    if kinds[3:] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
        return Decoding(Style.OTHER)
    return Decoding(Style.SENTENCEPIECE, strips_space=bool(kinds[3:]))


def piece_bytes(token: str, style: Style) -> bytes:
    """The bytes of a vocabulary entry; `style` is one of the two known ones."""
    if style is Style.SENTENCEPIECE:
        byte = _FALLBACK_BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, spelled as plain text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: visible Latin-1 characters are unchanged, the rest follow from U+0100 in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
