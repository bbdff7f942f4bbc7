"""Shows speculation: which tokens came from a draft, and the tree of every step."""

from __future__ import annotations

import itertools
import json
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.commands.shared.terminal import coloured, harmless, paint

if TYPE_CHECKING:
    from slipstream.text import Tokenizer
    from slipstream.tree import TokenTree
    from slipstream.types import Delta


class Origins:
    """Splits an answer's text by the origin of its tokens.

    Text can lag behind its tokens (a split character, the start of a stop string) but never differs from their text, so
    the decoded tokens wait in a queue until the answer's own text has caught up.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        from slipstream.text import IncrementalDecoder

        self._decoder = IncrementalDecoder(tokenizer, prompt_ids)
        self._waiting: deque[tuple[str, bool]] = deque()

    def push(self, delta: Delta) -> list[tuple[str, bool]]:
        """The new text in pieces, each with whether it was drafted."""
        for token, origin in zip(delta.token_ids, delta.origins, strict=True):
            self._waiting.append((self._decoder.push([token]), origin is not None))
        if delta.finish_reason is not None:
            self._waiting.append((self._decoder.flush(), False))
        pieces, missing = [], len(delta.text)
        while missing and self._waiting:
            text, drafted = self._waiting.popleft()
            pieces.append((text[:missing], drafted))
            if len(text) > missing:
                self._waiting.appendleft((text[missing:], drafted))
            missing -= len(pieces[-1][0])
        return pieces


def mark_origins(pieces: Sequence[tuple[str, bool]], colour: bool) -> str:
    """Pieces as one text: drafted ones in green, or in brackets without colour; neighbours share a mark."""
    marked = []
    for drafted, group in itertools.groupby(pieces, key=lambda piece: piece[1]):
        text = harmless("".join(text for text, _ in group), sys.stdout)
        marked.append(text if not drafted or not text else paint(text, "draft", True) if colour else f"[{text}]")
    return "".join(marked)


def legend(colour: bool) -> str:
    """What the marks mean."""
    return "tokens in green came from a draft" if colour else "tokens in [brackets] came from a draft"


def draw_tree(tree: TokenTree, tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """One step as lines: the offered tree, the accepted path marked, and the model's own token."""
    fancy, colour = sys.stdout.isatty(), coloured(sys.stdout)
    accepted = tree.walk(tokens)
    tick = "✓" if fancy else "*"

    def word(node: int) -> str:
        text = _quoted(tree.tokens[node], tokenizer)
        return paint(text + tick, "draft", colour) if node in accepted else paint(text, "dim", colour)

    def run(node: int) -> tuple[str, list[int]]:
        """A node with the chain below it on one line, and the children where the chain forks."""
        words = [word(node)]
        while len(children := tree.children(node)) == 1:
            node = children[0]
            words.append(word(node))
        return " ".join(words), children

    def below(children: list[int], indent: str) -> None:
        for child in children:
            last = child == children[-1]
            corner = ("└─ " if last else "├─ ") if fancy else ("`- " if last else "|- ")
            line, forks = run(child)
            lines.append(indent + corner + line)
            below(forks, indent + ("   " if last else "│  " if fancy else "|  "))

    root = _quoted(tree.tokens[0], tokenizer)
    own = paint(" ".join(_quoted(token, tokenizer) for token in tokens[len(accepted) :]), "bold", colour)
    if not tree.drafted:
        return [f"{root} + {own}"]
    count = f"{tree.drafted} drafted, {len(accepted)} accepted"
    lines = [f"{root}  {paint(count, 'dim', colour)}"]
    below(tree.children(0), "  ")
    return [*lines, f"  + {own}"] if own else lines


def _quoted(token: int, tokenizer: Tokenizer) -> str:
    return harmless(json.dumps(tokenizer.token_text(token), ensure_ascii=False), sys.stdout)
