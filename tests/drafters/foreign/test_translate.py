"""Between two tokenizers: what is offered spells the draft's text, and no further text can change it."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.drafters.foreign.translate import Lexicon, Reading, Translator, make_translator, measure
from slipstream.errors import DraftMismatch
from slipstream.text import Tokenizer
from tests.text.test_text_real import texts
from tests.tongues import CORPUS, KINDS, tokenizer

LOSSLESS = ["byte level", "bytes", "sentencepiece"]
WORDS = st.sampled_from([word for line in CORPUS for word in line.split(" ")])
PHRASES = st.lists(WORDS | st.sampled_from(["\n", "  ", "1234", "the", "<|end|>"]) | st.text(max_size=3)).map(" ".join)
TEXTS = PHRASES | st.text(alphabet="aeht 0.\n", max_size=40) | st.text(max_size=30)


@functools.cache
def lexicon(kind: str) -> Lexicon:
    return Lexicon(tokenizer(kind))


def check_offer(side: Lexicon, text: str, start: int, stop: int) -> int:
    """`text[start:stop]` was written after `text[:start]`, and the rest follows. How many tokens are offered."""
    past = side.tokenizer.encode(text[:start], add_special=False)
    spelled = side.spelled_after(text[:start][-128:], text[start:stop])
    if spelled is None:
        return 0
    offered = spelled.ids[: spelled.settled]
    said = side.tokenizer.decode(past, skip_special=False)
    says = side.tokenizer.decode(past + offered, skip_special=False)
    if said == text[:start] and said.strip():  # decoders take off the first space of a text
        assert says.startswith(said) and text[start:stop].startswith(says[len(said) :])
    whole = side.tokenizer.encode(text, add_special=False)
    if whole[: len(past)] == past:
        assert whole[len(past) :][: len(offered)] == offered
    return len(offered)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, places=st.tuples(st.integers(0, 200), st.integers(0, 200)))
@example(text="the world of words", places=(3, 7))
@example(text="Köln 東京東京 👍🏽", places=(2, 12))
@settings(max_examples=100, deadline=None)
def test_what_is_offered_spells_the_text_and_stays(kind: str, text: str, places: tuple[int, int]) -> None:
    start, stop = sorted(min(place, len(text)) for place in places)
    check_offer(lexicon(kind), text, start, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_enough_is_offered_to_be_of_use(kind: str) -> None:
    text = "the quick brown fox jumps over the lazy dog and the other dogs look on"
    words = text.split(" ")
    for first in range(1, 8):
        before, after = " ".join(words[:first]), " " + " ".join(words[first : first + 5])
        spelled = lexicon(kind).spelled_after(before, after)
        assert spelled is not None and spelled.whole
        # All but the last word, whose end is not in sight.
        assert spelled.ends[spelled.settled - 1] >= len(after) - len(words[first + 4]) - 1


def read_on(translator: Translator, tokens: list[int], stops: list[int]) -> tuple[Reading, list[int]]:
    """Read tokens in pieces; what was fixed once stays."""
    reading, ids = Reading(), translator.draft.opening
    for stop in sorted({min(stop, len(tokens)) for stop in stops} | {len(tokens)}):
        read = translator.read(reading, tokens[:stop])
        if read is not None:
            assert read[0].fixed[: len(reading.fixed)] == reading.fixed == read[1][: len(reading.fixed)]
            reading, ids = read
            assert reading.seen == stop
    return reading, ids


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", ["byte level", "sentencepiece", "characters"])
@given(text=TEXTS, stops=st.lists(st.integers(1, 60), max_size=6))
@example(text="Köln 東京東京 👍🏽", stops=list(range(1, 40)))
@example(text="The    <|end|>", stops=[8])
@example(text="   The", stops=[4])
@settings(max_examples=25, deadline=None)
def test_a_text_read_in_pieces_is_the_text_read_at_once(target: str, draft: str, text: str, stops: list[int]) -> None:
    translator = Translator(lexicon(target), lexicon(draft))
    tokens = translator.target.tokenizer.encode(text)
    said = translator.target.tokenizer.decode(tokens[len(translator.target.opening) :], skip_special=False)
    reading, ids = read_on(translator, tokens, stops)
    assert len(reading.open) <= 256
    if draft in LOSSLESS:
        assert ids == translator.draft.opening + translator.draft.tokenizer.encode(said, add_special=False)
    assert ids[: len(reading.fixed)] == reading.fixed


def test_half_a_character_is_not_read() -> None:
    translator = Translator(lexicon("bytes"), lexicon("byte level"))
    tokens = translator.target.tokenizer.encode("ab 👍")
    whole = [translator.read(Reading(), tokens[:count]) is not None for count in range(1, len(tokens) + 1)]
    assert whole[-1] and not all(whole)
    for count, complete in enumerate(whole, start=1):
        said = translator.target.tokenizer.decode(tokens[:count])
        assert complete == (not said.endswith("\ufffd"))


def test_a_long_text_costs_what_its_end_costs() -> None:
    """Only the end of the text is read again, also where nothing is ever settled."""
    for text, draft in (("word " * 4000, "byte level"), ("0" * 9000, "byte level"), ("A\n\tB " * 2000, "wordpiece")):
        translator = Translator(lexicon("bytes"), lexicon(draft))
        tokens = translator.target.tokenizer.encode(text)
        reading, _ = read_on(translator, tokens, list(range(8000, 9000, 9)))
        assert len(reading.context) <= 128 and len(reading.open) <= 1024


def test_each_side_has_its_own_beginning() -> None:
    said = "the fox"
    for target, draft in (("sentencepiece", "byte level"), ("byte level", "sentencepiece")):
        translator = Translator(lexicon(target), lexicon(draft))
        _, ids = read_on(translator, translator.target.tokenizer.encode(said), [])
        assert ids == translator.draft.tokenizer.encode(said)
    assert lexicon("sentencepiece").opening == [1] and lexicon("byte level").opening == []


def test_what_the_draft_wrote_goes_back_after_what_was_read() -> None:
    translator = Translator(lexicon("byte level"), lexicon("characters"))
    text = "There, there: the other dogs look on. "
    tokens = translator.target.tokenizer.encode(text * 3)
    reading, _ = read_on(translator, tokens[:20], [])
    written = (text * 3)[len(translator.target.tokenizer.decode(tokens[:20])) :][:30]
    spelled = translator.back(reading, written)
    assert spelled.settled >= 5 and tokens[20:][: spelled.settled] == spelled.ids[: spelled.settled]
    # A place inside a word of the past: the target would have taken another token there.
    reading, _ = read_on(translator, translator.target.tokenizer.encode("over the laz"), [])
    assert translator.back(reading, "y dog").ids == []


def test_endings_and_twins() -> None:
    target, draft = tokenizer("byte level"), tokenizer("characters")
    translator = Translator(lexicon("byte level"), lexicon("characters"))
    twins = translator.twins()
    assert len(twins) == 95 and all(draft.token_text(d) == target.token_text(t) for d, t in twins.items())
    assert translator.endings() == {}
    ending = {"bytes": [0], "byte level": [0], "characters": [95]}
    sides = {kind: Lexicon(Tokenizer(KINDS[kind](), eos_ids=ids)) for kind, ids in ending.items()}
    assert Translator(sides["byte level"], sides["bytes"]).endings() == {0: 0}  # namesakes
    assert Translator(sides["byte level"], sides["characters"]).endings() == {95: 0}
    assert Translator(lexicon("byte level"), sides["characters"]).endings() == {95: None}


def test_the_cost_of_a_crossing() -> None:
    finer = measure(Translator(lexicon("byte level"), lexicon("bytes")))
    assert finer.ratio > 1.1 and 0 < finer.common_entries < finer.target_entries
    coarser = measure(Translator(lexicon("bytes"), lexicon("byte level")))
    assert coarser.common_entries == coarser.target_entries and coarser.ratio == pytest.approx(1 / finer.ratio)
    assert "100.0% of the target's tokens are tokens of the draft too" in coarser.describe()
    near = measure(Translator(lexicon("byte level"), Lexicon(Tokenizer(KINDS["byte level"](390)))))
    assert near.aligned and 1.0 <= near.ratio < finer.ratio


def test_what_cannot_be_translated_is_refused() -> None:
    with pytest.raises(DraftMismatch, match="draft small has no tokenizer"):
        make_translator("small", None, tokenizer("bytes"))
    with pytest.raises(DraftMismatch, match="the target has no tokenizer"):
        make_translator("small", tokenizer("bytes"), None)
    with pytest.raises(DraftMismatch, match=r"draft small has the target's own vocabulary.*draft_model"):
        make_translator("small", tokenizer("bytes"), tokenizer("bytes"))


@pytest.mark.real_model
def test_the_default_models_tokenizer(smollm2_path: Path) -> None:
    from slipstream.models.formats.resolve import open_checkpoint

    real = open_checkpoint(smollm2_path).tokenizer()
    assert real is not None
    side, dice = Lexicon(real), random.Random(0)
    offered = sum(
        check_offer(side, text, *sorted(dice.randint(0, len(text)) for _ in range(2))) for text in texts() * 3
    )
    assert offered > 5000
    letters = measure(make_translator("bytes", tokenizer("bytes"), real))
    assert 2 < letters.ratio < 5 and not letters.aligned
    for kind in KINDS:
        translator = make_translator(kind, tokenizer(kind), real)
        for text in texts()[::4]:
            tokens = real.encode(text)
            _, ids = read_on(translator, tokens, [dice.randint(1, 200) for _ in range(5)])
            if kind in LOSSLESS:
                assert ids == tokenizer(kind).encode(text), text
