"""Does a draft speak the target's language? Token by token."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import DraftMismatch
from slipstream.text import Tokenizer


@dataclass(frozen=True)
class VocabularyComparison:
    """The result: how many ids were compared and the first one that means something else."""

    compared: int
    draft_size: int
    target_size: int
    difference: tuple[int, str | None, str | None] | None  # (id, draft's token, target's token)

    @property
    def same(self) -> bool:
        """Whether the tokenizers agree on every id. Rows that only pad a model's matrices are no difference."""
        return self.difference is None

    def describe(self) -> str:
        """One line for people."""
        sizes = "" if self.draft_size == self.target_size else f" (sizes {self.draft_size} and {self.target_size})"
        if self.difference is None:
            return f"same vocabulary: {self.compared} tokens compared{sizes}"
        token, draft, target = self.difference
        if draft is None and target is None:
            return f"the draft has {self.draft_size} tokens, the target {self.target_size}, and no tokenizer tells more"
        return f"another vocabulary: token {token} is {draft!r} in the draft and {target!r} in the target{sizes}"

    def require_same(self, draft: str) -> None:
        """Refuse a draft that does not fit."""
        if not self.same:
            raise DraftMismatch(f"draft {draft} does not fit the target: {self.describe()}", hint=self.cure)

    @property
    def cure(self) -> str | None:
        """Who would take such a draft, if the tokenizers are there to translate between."""
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
