"""Compares the vocabularies of a draft and a target, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import DraftMismatch
from slipstream.text import Tokenizer


@dataclass(frozen=True)
class VocabularyComparison:
    """How many ids were compared, and the first one that differs."""

    compared: int
    draft_size: int
    target_size: int
    difference: tuple[int, str | None, str | None] | None  # (id, draft's token, target's token)

    @property
    def same(self) -> bool:
        """Whether the tokenizers agree on every id. Padding rows of a model's matrices are no difference."""
        return self.difference is None

    def describe(self) -> str:
        """One line for display."""
        sizes = "" if self.draft_size == self.target_size else f" (sizes {self.draft_size} and {self.target_size})"
        if self.difference is None:
            return f"same vocabulary: {self.compared} tokens compared{sizes}"
        token, draft, target = self.difference
        if draft is None and target is None:
            return f"the draft has {self.draft_size} tokens, the target {self.target_size}; no tokenizer to compare"
        return f"another vocabulary: token {token} is {draft!r} in the draft and {target!r} in the target{sizes}"

    def require_same(self, draft: str) -> None:
        """Refuse a draft with another vocabulary."""
        if not self.same:
            raise DraftMismatch(f"draft {draft} does not fit the target: {self.describe()}", hint=self.cure)

    @property
    def cure(self) -> str | None:
        """A drafter that accepts such a draft, if both have tokenizers."""
        translatable = self.difference is not None and self.difference[1:] != (None, None)
        return "foreign_draft takes drafts of another vocabulary, under the verifier `match`" if translatable else None


def compare_vocabularies(
    draft: Tokenizer | None, draft_size: int, target: Tokenizer | None, target_size: int
) -> VocabularyComparison:
    """Compare two token maps. Without tokenizers only the sizes can be compared, and they must then be equal."""
    if draft is None or target is None:
        sizes = None if draft_size == target_size else (min(draft_size, target_size), None, None)
        return VocabularyComparison(0, draft_size, target_size, sizes)
    longest = max(len(draft), len(target))
    for token in range(longest):
        ours, theirs = draft.token(token), target.token(token)
        if ours != theirs:
            return VocabularyComparison(token, len(draft), len(target), (token, ours, theirs))
    return VocabularyComparison(longest, len(draft), len(target), None)
