"""The corpus: what is found in it against a search by hand, how it is written, and what is refused."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.drafters import parse_speculate
from slipstream.drafters.base import DraftRequest
from slipstream.drafters.retrieval.corpus import HEADER, SAMPLES, Corpus, Header
from slipstream.drafters.retrieval.corpus_build import SORTED_BY, CorpusWriter, suffix_array
from slipstream.errors import CorruptFile, DraftMismatch, OptionError, SlipstreamError
from slipstream.sequence import Request, Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan
from tests.corpora import contents, tiny_corpus, write_corpus
from tests.tiny import tiny_llm

fixed = settings(derandomize=True, deadline=None, max_examples=60)
tokens_of_texts = st.integers(0, 2)  # few, so that short texts repeat themselves
repetitions = st.builds(lambda base, times: base * times, st.lists(tokens_of_texts, max_size=9), st.integers(5, 9))
texts = st.one_of(st.lists(tokens_of_texts, max_size=60), repetitions)
collections = st.lists(texts, min_size=1, max_size=5).filter(any)
queries = texts.filter(bool)


def occurrences(documents: list[list[int]], pattern: list[int]) -> int:
    size = len(pattern)
    return sum(text[i : i + size] == pattern for text in documents for i in range(len(text) - size + 1))


def longest_by_hand(documents: list[list[int]], text: list[int]) -> int:
    sizes = range(1, min(len(text), SORTED_BY) + 1)
    return max((size for size in sizes if occurrences(documents, text[-size:])), default=0)


def check_match(folder: Path, query: list[int], levels: int = 3) -> None:
    """Length, continuations and counts of a match, and of the continuations' continuations."""
    documents = [document for shard in contents(folder) for document in shard]
    longest, match = longest_by_hand(documents, query), Corpus.open(folder).match(query, depth=levels)
    assert (match.length if match else 0) == longest
    if match is None:
        return
    states = [(query[-longest:], match.state)]
    for _ in range(levels):
        seen = [(context, match.following(state)) for context, state in states]
        for context, following in seen:
            found = {token: count for token, count, _ in following}
            expected = {token: occurrences(documents, [*context, token]) for token in range(4)}
            assert found == {token: count for token, count in expected.items() if count}
        states = [([*context, token], state) for context, following in seen for token, _, state in following]


@fixed
@given(collections, queries)
def test_a_match_is_what_a_search_by_hand_finds(many: list[list[int]], query: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", many, vocabulary=4)
        check_match(Path(folder) / "corpus", query)


@fixed
@given(collections, queries, st.integers(2, 20), st.sampled_from([4, 70_000]))
def test_shards_are_searched_together(many: list[list[int]], query: list[int], size: int, vocabulary: int) -> None:
    """Also with ids of four bytes. Documents go on in the next shard, in order, and nothing is lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "corpus"
        header = write_corpus(folder, many, vocabulary, shard_tokens=size)
        assert all(count <= size for count in header.shards)
        joined = [token for shard in contents(folder) for document in shard for token in document]
        assert joined == [token for document in many for token in document]
        assert (header.tokens, header.documents) == (len(joined), sum(map(bool, many)))
        check_match(folder, query)


@fixed
@given(texts.filter(bool), st.sampled_from([np.uint16, np.uint32]))
def test_the_suffix_array_is_sorted_and_stable(tokens: list[int], dtype: Any) -> None:
    array = np.array([token or np.iinfo(dtype).max for token in tokens], dtype)
    expected = sorted(range(len(tokens)), key=lambda i: (array[i : i + SORTED_BY].tolist(), i))
    assert suffix_array(array, SORTED_BY).tolist() == expected


def test_a_long_repetition_counts_as_the_longest_match_there_is(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[*range(80), 90], [*range(40, 80), 91]])
    match = Corpus.open(tmp_path / "corpus").match(list(range(80)), depth=1)
    assert match is not None and match.length == SORTED_BY
    assert sorted((token, count) for token, count, _ in match.following(match.state)) == [(90, 1), (91, 1)]


def test_documents_are_not_joined(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2], [3, 4], [2, 5]])
    corpus = Corpus.open(tmp_path / "corpus")
    crossing = corpus.match([1, 2, 3], depth=4)
    assert crossing is not None and crossing.length == 1
    ended = corpus.match([1, 2], depth=4)
    assert ended is not None and ended.length == 2 and ended.following(ended.state) == []


def test_every_continuation_of_a_wide_match_keeps_its_share(tmp_path: Path) -> None:
    chooser = random.Random(3)
    followers = [chooser.choice([2, 2, 2, 2, 3, 3, 4]) for _ in range(5000)]
    write_corpus(tmp_path / "corpus", [[1, token] for token in followers], shard_tokens=4000)
    match = Corpus.open(tmp_path / "corpus").match([1], depth=2)
    assert match is not None
    found = {token: count for token, count, _ in match.following(match.state)}
    assert sum(found.values()) == SAMPLES
    shards = -(-3 * len(followers) // 4000)
    for token, count in Counter(followers).items():
        # Even spacing over sorted suffixes: in each shard a continuation is off by less than one sample.
        assert abs(found[token] - SAMPLES * count / len(followers)) <= shards


def test_a_match_has_the_least_length_or_is_none(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2, 3]])
    corpus = Corpus.open(tmp_path / "corpus")
    assert corpus.match([9, 1, 2], depth=1, least=3) is None
    assert corpus.match([9, 9], depth=1) is None
    found = corpus.match([9, 1, 2], depth=1, least=2)
    assert found is not None and found.length == 2


def test_ids_that_the_corpus_cannot_hold_are_no_match(tmp_path: Path) -> None:
    """A model may have more rows than its tokenizer has tokens; 65,535 would look like a separator."""
    write_corpus(tmp_path / "corpus", [[1, 2], [1, 3]])
    corpus = Corpus.open(tmp_path / "corpus")
    for padding in (97, 65_535, 70_000, 2**32):
        assert corpus.match([2, padding], depth=1) is None
        found = corpus.match([2, padding, 1], depth=1)
        assert found is not None and found.length == 1


# -- writing ----------------------------------------------------------------------------------------------------------


def test_the_same_texts_make_the_same_bytes(tmp_path: Path) -> None:
    chooser = random.Random(1)
    many = [[chooser.randrange(5) for _ in range(chooser.randrange(60))] for _ in range(30)]
    write_corpus(tmp_path / "one", many, shard_tokens=100)
    with CorpusWriter(tmp_path / "two", tokenizer="size:97", vocabulary=97, shard_tokens=100) as writer:
        for document in many:
            for token in document:  # in the smallest pieces
                writer.add([token])
            writer.end_document()
        writer.finish()
    names = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_header_says_what_was_read(tmp_path: Path) -> None:
    import slipstream

    with CorpusWriter(tmp_path / "corpus", tokenizer="size:97", vocabulary=97, model="some model") as writer:
        writer.add([1, 2, 3])
        written = writer.finish([{"path": "a.txt", "tokens": 3}])
    header = json.loads((tmp_path / "corpus" / HEADER).read_text())
    assert header["format"] == "slipstream corpus" and header["version"] == 1
    assert (header["token_bytes"], header["shards"], header["tokens"], header["documents"]) == (2, [4], 3, 1)
    assert header["made_by"] == f"slipstream {slipstream.__version__}" and header["model"] == "some model"
    assert header["sources"] == [{"path": "a.txt", "tokens": 3}]
    assert Header.read(tmp_path / "corpus") == written


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_what_is_interrupted_leaves_nothing_and_spoils_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2, 3]])
    before = {file.name: file.read_bytes() for file in (tmp_path / "corpus").iterdir()}
    with (
        pytest.raises(failure),
        CorpusWriter(tmp_path / "corpus", tokenizer="x", vocabulary=9, shard_tokens=4) as writer,
    ):
        writer.add([5] * 50)
        assert len(list(tmp_path.iterdir())) == 2, "shards are written already, elsewhere"
        raise failure
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "corpus").iterdir()}


def test_a_corpus_is_replaced_whole(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [list(range(50))], shard_tokens=10)
    opened = Corpus.open(tmp_path / "corpus")
    write_corpus(tmp_path / "corpus", [[1, 2]])
    assert len(list((tmp_path / "corpus").iterdir())) == 3
    assert contents(tmp_path / "corpus") == [[[1, 2]]]
    match = opened.match([20, 21], depth=1)  # an open corpus still reads the old one
    assert match is not None and match.length == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus"]


def test_what_is_not_a_corpus_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    write_corpus(tmp_path / "mixed", [[1]])
    (tmp_path / "mixed" / "notes.txt").write_text("mine too")
    for name, complaint in (("file", "is a file"), ("photos", "'cat.jpg'"), ("mixed", "'notes.txt'")):
        with pytest.raises(OptionError, match=complaint):
            write_corpus(tmp_path / name, [[1]])
    (tmp_path / "empty").mkdir()
    write_corpus(tmp_path / "empty", [[1]])
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "meow"


@pytest.mark.parametrize("ids", [[97], [-1], [3, 200_000]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(OptionError, match="there is no token"):
        write_corpus(tmp_path / "corpus", [[1], ids])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("many", [[], [[]], [[], []]])
def test_nothing_is_no_corpus(tmp_path: Path, many: list[list[int]]) -> None:
    with pytest.raises(OptionError, match="nothing to build"):
        write_corpus(tmp_path / "corpus", many)
    assert list(tmp_path.iterdir()) == []


# -- opening ----------------------------------------------------------------------------------------------------------


def _header(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / HEADER).read_text()) | changes
    (folder / HEADER).write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def _truncate(name: str) -> Any:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_truncate("tokens-00000.bin"), r"tokens-00000.bin' has \d+ bytes, expected"),
        (_truncate("suffixes-00001.bin"), r"suffixes-00001.bin' has \d+ bytes, expected"),
        (lambda folder: (folder / "suffixes-00000.bin").unlink(), "has 0 bytes"),
        (lambda folder: (folder / HEADER).write_text("{"), "cannot be read"),
        (lambda folder: (folder / HEADER).write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (lambda folder: (folder / HEADER).write_text("[1]"), "does not describe a corpus"),
        (lambda folder: (folder / HEADER).write_text('{"format": "other"}'), "does not describe a corpus"),
        (lambda folder: (folder / HEADER).unlink(), "has no corpus.json"),
        (lambda folder: _header(folder, version=2), "is version 2 of the format, and version 1 is read here"),
        (lambda folder: _header(folder, shards=...), "no valid 'shards'"),
        (lambda folder: _header(folder, tokenizer=7), "no valid 'tokenizer'"),
        (lambda folder: _header(folder, vocabulary=True), "no valid 'vocabulary'"),
        (lambda folder: _header(folder, token_bytes=3), "impossible sizes"),
        (lambda folder: _header(folder, shards=[]), "impossible sizes"),
        (lambda folder: _header(folder, shards=[-4, "x"]), "impossible sizes"),
    ],
)
def test_damage_is_reported_in_one_line_before_anything_is_loaded(tmp_path: Path, damage: Any, complaint: str) -> None:
    write_corpus(tmp_path / "corpus", [list(range(50))], shard_tokens=30)
    damage(tmp_path / "corpus")
    for use in (Corpus.open, lambda folder: parse_speculate({"method": "suffix", "corpus": str(folder)})):
        with pytest.raises(SlipstreamError, match=complaint) as caught:
            use(tmp_path / "corpus")
        assert isinstance(caught.value, OptionError | CorruptFile)
        assert "\n" not in str(caught.value) and caught.value.hint


def test_a_missing_corpus_is_reported_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no corpus: '.*nowhere' is no directory .*slipstream corpus build"):
        LLM("no/such/model", speculate=f"suffix:corpus={tmp_path / 'nowhere'}")


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2]], vocabulary=96)
    llm = tiny_llm()
    with pytest.raises(DraftMismatch, match="built with tokenizer size:96, the model has size:97") as caught:
        llm.use({"method": "suffix", "corpus": str(tmp_path / "corpus")})
    assert "build it again" in str(caught.value.hint)
    with pytest.raises(DraftMismatch, match=r"built with tokenizer sha256:\w{12}, the model has size:97"):
        llm.use(f"suffix:corpus={tiny_corpus()}")


# -- drafting ---------------------------------------------------------------------------------------------------------


def offered(llm: LLM, tokens: list[int], **plan: Any) -> TokenTree:
    sequence = Sequence(Request("r", None, tokens, SamplingParams(), 0), 0, frozenset(), 512)
    settings = {"depth": 4, "nodes": 16, "branch": 3, "min_confidence": 0.0} | plan
    (tree,) = llm.drafter.propose([DraftRequest(sequence, Plan(**settings))])
    tree.check(tokens[-1], 97)
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def test_own_text_and_corpus_are_merged(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2, 8, 9]] * 3 + [[2, 7]])
    llm = tiny_llm(speculate={"method": "suffix", "corpus": str(tmp_path / "corpus")})
    tree = offered(llm, [2, 3, 1, 2], depth=2)
    assert paths(tree) == {(3,), (3, 1), (8,), (8, 9)}, "the longest match of each: 2 before, 1 2 in the corpus"
    assert paths(offered(llm, [5, 1, 2], depth=2)) == {(8,), (8, 9)}
    assert paths(offered(llm, [2, 3, 1, 2], nodes=1)) == {(8,)}, "three times after two tokens beats once after one"
    assert paths(offered(llm, [50, 60])) == set()
    assert paths(offered(llm, [1, 2], depth=0)) == set()


def test_guesses_are_followed_and_not_learnt() -> None:
    llm = tiny_llm(speculate="suffix:min_confidence=0")
    drafter = llm.drafter
    sequence = Sequence(Request("r", None, [1, 2, 3, 4, 9], SamplingParams(), 0), 0, frozenset(), 512)
    plan = Plan(2, 8, 3, 0.0)
    assert paths(drafter.propose([DraftRequest(sequence, plan)])[0]) == set()
    shadow = sequence.shadow(None)
    shadow.tokens += [2, 3]
    for _ in range(2):
        assert paths(drafter.propose([DraftRequest(shadow, plan)])[0]) == {(4,), (4, 9)}
    sequence.tokens += [2, 7]  # what was said in truth
    assert paths(drafter.propose([DraftRequest(sequence, plan)])[0]) == set()
    sequence.tokens += [2]
    assert paths(drafter.propose([DraftRequest(sequence, plan)])[0]) == {(3,), (3, 4), (7,), (7, 2)}


def test_text_of_the_corpus_takes_fewer_steps(tmp_path: Path) -> None:
    llm = tiny_llm(speculate=None)
    prompts, how = [[i, i + 1, i + 2] for i in range(6)], SamplingParams(temperature=1.0, seed=5, max_tokens=60)
    plain = llm.generate(prompts, how)
    write_corpus(tmp_path / "corpus", [[*p, *o.token_ids] for p, o in zip(prompts, plain, strict=True)])
    steps = []
    for speculate in ("suffix", {"method": "suffix", "corpus": str(tmp_path / "corpus")}):
        llm.use(speculate)
        answers = llm.generate(prompts, how)
        assert [o.token_ids for o in answers] == [o.token_ids for o in plain]
        steps.append(sum(o.stats.steps for o in answers))
    assert steps[1] < steps[0] / 4
