"""Translation between two tokenizers: a text in the tokens of one, and guesses in the tokens of the other.

No ids are compared. Tokens are aligned with the bytes that they spell. What cannot be aligned (a token across the start
of the guesses, a tokenizer that changes the text) is not offered.

A token at the end of a text may become another one when the text continues: "wor" becomes "world". A boundary between
two tokens is *settled* when no entry of the vocabulary could cross it, whatever follows. Merging tokenizers build every
token from smaller entries and the others choose among entries, so nothing left of a settled boundary can change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from slipstream.drafters.foreign.vocabulary import compare_vocabularies
from slipstream.errors import DraftMismatch
from slipstream.text import IncrementalDecoder, Tokenizer
from slipstream.text.pieces import Style

_CONTEXT = 128  # characters of context that make the tokens after a place those of the whole text
_FAR = 256  # bytes: so far from the end of a text any boundary counts as settled, even inside a word
_OPEN = 1024  # characters: a longer text is settled anyway (a tokenizer that changes it never settles)
PRIMER = 16  # earlier tokens that decoding needs: more than a split character has

_SAMPLE = """\
The harbour lay still, but nobody in Saint-Malo slept: at 4:35 the first boats would come back with 1,200 kilos of fish.
"How many crates?" asked Zoë. She didn't wait for an answer; she opened her laptop and typed what she typed each night.

def crates(catch: dict[str, float], size: int = 25) -> int:
    total = sum(weight for weight in catch.values() if weight > 0)
    return -(-int(total) // size)  # rounded up

{"boats": ["Étoile", "Mouette"], "kilos": 1200.5, "ready": true}
"""


@dataclass(frozen=True)
class Spelled:
    """The tokens of a text."""

    ids: list[int]
    ends: list[int]  # bytes spelled up to the end of each
    settled: int  # leading tokens that stay, whatever follows the text
    whole: bool  # whether the tokens spell the whole text


class Lexicon:
    """A tokenizer, with the bytes that each of its tokens adds to a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.entries = _entries(tokenizer)  # by id
        self.known = frozenset(filter(None, self.entries))
        self._sorted = sorted(self.known)
        self._longest = max(map(len, self._sorted), default=0)
        special = tokenizer.encode("")
        self.opening = special[:1] if special[:1] == [tokenizer.bos_id] else []  # BOS, if a text begins with one

    def spelled_after(self, before: str, after: str) -> Spelled | None:
        """The tokens of `after` when it follows `before`; None if a token would cross the boundary."""
        before = before.lstrip() or before  # encoders and decoders may treat the first space of a text specially
        text = (before + after).encode()
        ids = self.tokenizer.encode(before + after, add_special=False)
        pieces = [self.entries[id] for id in ids]
        spelled = b"".join(pieces)
        # A space that the encoder prepended is not part of the text.
        lead = max((0, 1), key=lambda lead: (spelled[lead:] == text, agreeing(spelled[lead:], text)))
        text = spelled[:lead] + text
        same = agreeing(spelled, text)
        origin = lead + len(before.encode())
        place = origin if before else 0
        ends = list(accumulate(map(len, pieces), initial=0))
        if same < place or place not in ends:
            return None
        first = ends.index(place)
        right = (n for n in range(len(ids), first, -1) if origin < ends[n] <= same)
        last = next((n for n in right if self._settled(text, ends[n])), first)
        return Spelled(ids[first:], [end - origin for end in ends[first + 1 :]], last - first, whole=spelled == text)

    def cuts(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each token of a text; never empty."""
        spelled = self.spelled_after("", text)
        ends = spelled.ends if spelled is not None and spelled.ids else [0]
        return list(pairwise([0, *ends]))

    def _settled(self, text: bytes, at: int) -> bool:
        """Whether a place is between characters, and no continuation can change anything before it.

        After white space it can: encoders look ahead there, and cut "   x" and "   " in different places.
        """
        if at < len(text) and text[at] & 0xC0 == 0x80:
            return False
        before = text[max(0, at - 4) : at].decode(errors="ignore")
        return len(text) - at > _FAR or not (before[-1:].isspace() or self._crossed(text, at))

    def _crossed(self, text: bytes, at: int) -> bool:
        """Whether an entry could cross a place, as far as the text after it is known."""
        for start in range(max(0, at - self._longest + 1), at):
            if self._goes_on(text[start:at]):
                last = min(len(text), start + self._longest)
                if any(text[start:end] in self.known for end in range(at + 1, last + 1)) or self._goes_on(text[start:]):
                    return True
        return False

    def _goes_on(self, head: bytes) -> bool:
        """Whether an entry is longer than these bytes and starts with them."""
        following = bisect_right(self._sorted, head)
        return following < len(self._sorted) and self._sorted[following].startswith(head)


def _entries(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token adds to a text before it."""
    ids = range(len(tokenizer))
    if tokenizer.decoding.style is not Style.OTHER:
        return [tokenizer.piece(id) for id in ids]
    lead = tokenizer.encode("a", add_special=False)
    length = len(tokenizer.decode(lead, skip_special=False))
    return [tokenizer.decode([*lead, id], skip_special=False)[length:].encode() for id in ids]


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])


@dataclass(frozen=True)
class Reading:
    """How far the target's tokens have been read, and the draft's tokens for them."""

    seen: int = 0  # number of the target's tokens that were read
    fixed: list[int] = field(default_factory=list)  # the draft's tokens that no further text can change
    context: str = ""  # the end of their text
    open: str = ""  # the text after them


class Translator:
    """From the target's tokens to the draft's, and from the draft's text back to the target's tokens."""

    def __init__(self, target: Lexicon, draft: Lexicon) -> None:
        self.target = target
        self.draft = draft

    def read(self, reading: Reading, tokens: Sequence[int]) -> tuple[Reading, list[int]] | None:
        """Read on to the end of the target's `tokens`: the new reading, and all of the draft's tokens.

        None while the last character is incomplete: a draft gets whole characters only.
        """
        seen, fixed = reading.seen, reading.fixed
        opening = len(self.target.opening) if tokens[:1] == self.target.opening else 0
        if not seen:
            seen, fixed = opening, self.draft.opening
        primer = tokens[max(opening, seen - PRIMER) : seen]
        decoder = IncrementalDecoder(self.target.tokenizer, primer, skip_special=False)
        after = reading.open + decoder.push(tokens[seen:])
        if decoder.flush():
            return None
        spelled = self.draft.spelled_after(reading.context, after)
        if spelled is None:  # the draft's tokenizer changes its input
            spelled = Spelled(self.draft.tokenizer.encode(after, add_special=False), [], 0, whole=False)
        count = spelled.settled
        done = after.encode()[: spelled.ends[count - 1]].decode() if count else ""
        if len(after) - len(done) > _OPEN:
            count, done = len(spelled.ids), after
        context = (reading.context + done)[-_CONTEXT:]
        advanced = Reading(len(tokens), fixed + spelled.ids[:count], context, after[len(done) :])
        return advanced, fixed + spelled.ids

    def back(self, reading: Reading, text: str) -> Spelled:
        """The target's tokens of a text that the draft wrote after the reading; none if no token can begin there."""
        spelled = self.target.spelled_after((reading.context + reading.open)[-_CONTEXT:], text)
        return spelled or Spelled([], [], 0, whole=False)

    def twins(self) -> dict[int, int]:
        """Draft's token -> the target's token of the same text."""
        ours, theirs = ({entry: id for id, entry in enumerate(side.entries)} for side in (self.draft, self.target))
        return {id: theirs[entry] for entry, id in ours.items() if entry and entry in theirs}

    def endings(self) -> dict[int, int | None]:
        """The target's token for each end token of the draft: the one of the same name if there is one."""
        draft, target = self.draft.tokenizer, self.target.tokenizer
        namesakes = {target.token(id): id for id in target.eos_ids}
        return {id: namesakes.get(draft.token(id), next(iter(target.eos_ids), None)) for id in draft.eos_ids}


@dataclass(frozen=True)
class Crossing:
    """The cost of drafting in another vocabulary: tokens of a sample text on both sides, and what they share."""

    target_tokens: int
    draft_tokens: int
    common_tokens: int  # tokens of the sample that both tokenizers have
    target_entries: int
    common_entries: int

    @property
    def ratio(self) -> float:
        """Draft tokens per target token."""
        return self.draft_tokens / self.target_tokens

    @property
    def aligned(self) -> bool:
        """Whether most tokens of the draft are tokens of the target."""
        return 2 * self.common_tokens > self.draft_tokens

    def describe(self) -> str:
        """One line for display."""
        share = 100 * self.common_entries / self.target_entries
        return (
            f"{self.ratio:.2f} draft tokens per target token on a sample text; "
            f"{share:.1f}% of the target's tokens are tokens of the draft too"
        )


def measure(translator: Translator) -> Crossing:
    """Count on a short text of prose, code and figures."""
    target, draft = translator.target, translator.draft
    theirs, ours = target.cuts(_SAMPLE), draft.cuts(_SAMPLE)
    return Crossing(
        target_tokens=len(theirs),
        draft_tokens=len(ours),
        common_tokens=len(set(theirs) & set(ours)),
        target_entries=len(target.known),
        common_entries=len(target.known & draft.known),
    )


def make_translator(name: str, draft: Tokenizer | None, target: Tokenizer | None) -> Translator:
    """A translator for draft model `name`; DraftMismatch if there is nothing to translate."""
    if draft is None or target is None:
        whose = f"draft {name}" if draft is None else "the target"
        raise DraftMismatch(f"{whose} has no tokenizer, so its tokens cannot be translated")
    if compare_vocabularies(draft, len(draft), target, len(target)).same:
        raise DraftMismatch(f"draft {name} has the target's own vocabulary", hint="draft_model is the drafter for it")
    return Translator(Lexicon(target), Lexicon(draft))
