"""`slipstream corpus build`: from files to a corpus, what is refused on the way, and drafting from the result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream import LLM, SamplingParams
from slipstream.cli import app
from slipstream.commands.corpus import build
from slipstream.drafters.retrieval import corpus_build
from slipstream.drafters.retrieval.corpus import Corpus, Header
from slipstream.drafters.retrieval.corpus_files import Reader, cut
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.text import Tokenizer, tokenizer_from_gguf
from slipstream.text.gguf_tokenizer import _RULES
from tests.corpora import contents
from tests.tiny import tiny_directory, tiny_llm
from tests.vocabularies import gguf_of_byte_level, gguf_of_spm, train_byte_level

ROOT = Path(__file__).parents[2]
PROSE = (ROOT / "docs" / "architecture.md").read_text()[:6000] + "\r\n\r\nГлава 1. naïve  cafés, 東京\t10 of 12\n"


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_directory(characters=True))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def spelled(folder: Path, model: str) -> list[str]:
    """The documents of a corpus as text."""
    tokenizer = Tokenizer.from_directory(model)
    return ["".join(map(tokenizer.token_text, ids)) for shard in contents(folder) for ids in shard]


# -- what is read -----------------------------------------------------------------------------------------------------


def test_files_lines_chats_and_directories_become_documents(model: str, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_bytes(b"\xef\xbb\xbfone text")
    (tmp_path / "code.py").write_text("x = 1")
    tree = tmp_path / "tree"
    (tree / "b" / "c").mkdir(parents=True)
    (tree / ".git").mkdir()
    (tree / ".git" / "config").write_text("hidden")
    (tree / "z.md").write_text("last")
    (tree / "b" / "c" / "deep.txt").write_text("deep")
    (tree / "b" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tree / "b" / "latin.txt").write_bytes(b"gr\xfc\xdfe")
    (tree / "empty.txt").write_text("")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    lines = [{"text": "a line"}, {"messages": chat}, {"text": ""}]
    (tmp_path / "lines.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    given = [tmp_path / name for name in ("first.txt", "tree", "lines.jsonl", "code.py")]
    done = invoke("corpus", "build", *given, "-o", tmp_path / "out", "-m", model)
    assert done.exit_code == 0, done.output
    assert spelled(tmp_path / "out", model) == ["one text", "deep", "last", "a line", "hi|ho|", "x = 1"]
    assert "6 documents, " in done.stdout and ", 1 shard, " in done.stdout
    assert "skipped what is not UTF-8 text: " in done.stderr and "latin.txt and 1 more" in done.stderr
    assert f"--speculate suffix:corpus={tmp_path / 'out'}" in done.stderr
    sources = Header.read(tmp_path / "out").sources
    assert [source["documents"] for source in sources] == [1, 2, 2, 1]
    assert sources[1] == {"path": str(tree), "files": 3, "skipped": 2, "documents": 2, "tokens": 8}


def test_a_field_can_be_named(model: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "not this", "answer": "this", "messages": 3}\n')
    done = invoke("corpus", "build", tmp_path / "x.jsonl", "-o", tmp_path / "out", "-m", model, "--field", "answer")
    assert done.exit_code == 0, done.output
    assert spelled(tmp_path / "out", model) == ["this"]


def test_an_old_corpus_in_the_way_is_replaced_and_not_read(model: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("abc")
    sizes = []
    for _ in range(2):
        done = invoke("corpus", "build", tmp_path / "texts", "-o", tmp_path / "texts" / "corpus", "-m", model)
        assert done.exit_code == 0, done.output
        sizes.append(Header.read(tmp_path / "texts" / "corpus").tokens)
    assert sizes == [3, 3]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"fine\nfine\nbro\xffken", "error: '{}' is not UTF-8 text: invalid start byte in line 3"),
        ("a.txt", b"cut in a char\n\xe2\x82", "error: '{}' is not UTF-8 text: unexpected end of data in line 2"),
        ("a.bin", b"\x7fELF\n\0\0", "error: '{}' is not UTF-8 text: a NUL byte in line 2"),
        ("a.txt", "utf".encode("utf-16"), "error: '{}' is not UTF-8 text"),
        ("a.txt", b"", "error: there is nothing to build a corpus from: no text was found"),
        ("a.jsonl", b"\n \n", "error: there is nothing to build a corpus from"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', "error: '{}' line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\xff', "error: '{}' is not UTF-8 text: invalid start byte in line 2"),
        ("a.jsonl", b'["text"]', "error: '{}' line 1 is not a JSON object but list"),
        ("a.jsonl", b'{"text": null}', "error: '{}' line 1: 'text' is not a text but NoneType"),
        ("a.jsonl", b'{"text": {"a": 1}}', "error: '{}' line 1: 'text' is not a text but dict"),
        ("a.jsonl", b'{"text": "\\ud800"}', "error: '{}' line 1 has half a surrogate pair"),
        ("a.jsonl", b'{"text": "a"}\n\n{"id": 1, "body": ""}',
         "error: '{}' line 3 has no field 'text' or 'messages'; it has 'id', 'body'\nhint: name one with --field"),
        ("a.jsonl", b'{"messages": [{"content": "hi"}]}', "error: '{}' line 1: messages[0] has no role"),
        ("a.jsonl", b'{"messages": []}', "error: '{}' line 1: messages is empty"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_place(
    model: str, tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / "good.txt").write_text("" if "nothing" in complaint else "good")
    (tmp_path / name).write_bytes(content)
    done = invoke("corpus", "build", tmp_path / "good.txt", tmp_path / name, "-o", tmp_path / "out", "-m", model)
    assert done.exit_code == 2
    assert done.stderr.startswith(complaint.format(tmp_path / name)), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted({"good.txt", name})


def test_wrong_usage_is_reported_before_any_work(model: str, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abc")
    assert invoke("corpus", "build", "-o", tmp_path / "out").exit_code == 2
    assert invoke("corpus", "build", text).exit_code == 2
    os.mkfifo(tmp_path / "pipe")
    for arguments, complaint in [
        ([tmp_path / "nowhere", "-o", tmp_path / "out"], "does not exist"),
        ([tmp_path / "pipe", "-o", tmp_path / "out"], "is neither a file nor a directory"),
        ([text, "-o", text], "is a file"),
        ([text, "-o", tmp_path], "is not a corpus and is left alone: it has 'a.txt'"),
        ([text, "-o", text / "below"], "cannot write"),
        ([text, "-o", tmp_path / "out", "-m", tmp_path / "nothing"], "no such model"),
        ([text, "-o", tmp_path / "out", "-m", tiny_directory()], "has no tokenizer"),
    ]:
        done = invoke("corpus", "build", "-m", model, *arguments)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr.startswith("error: ") and complaint in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interrupted_build_leaves_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("abc " * 100)
    sort: Callable[..., Any] = corpus_build.suffix_array

    def interrupted(*arguments: Any) -> Any:
        sort(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_build, "suffix_array", interrupted)
    done = invoke("corpus", "build", tmp_path / "a.txt", "-o", tmp_path / "out", "-m", model)
    assert done.exit_code == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


# -- pieces -----------------------------------------------------------------------------------------------------------


def ids_in_pieces(tokenizer: Tokenizer, path: Path, piece: int) -> list[int]:
    (document,) = Reader(tokenizer, piece=piece).read(path, lambda _: None)
    return [token for ids in document for token in ids]


@pytest.mark.parametrize("rule", [*sorted(_RULES), "sentencepiece", "characters"])
def test_small_pieces_give_the_tokens_of_the_whole(rule: str, model: str, tmp_path: Path) -> None:
    """For every way to cut words that we know, a piece ends where a word would end anyway."""
    if rule == "characters":
        tokenizer = Tokenizer.from_directory(model)
    else:
        metadata = gguf_of_spm() if rule == "sentencepiece" else gguf_of_byte_level(train_byte_level(), rule)
        tokenizer = tokenizer_from_gguf(metadata)
    text = tmp_path / "prose.md"
    text.write_bytes(PROSE.encode())
    whole = tokenizer.encode(PROSE, add_special=False)
    for piece in (64, 65, 500, 1 << 18):
        assert ids_in_pieces(tokenizer, text, piece) == whole, piece
    lines = tmp_path / "prose.jsonl"
    lines.write_text(json.dumps({"text": PROSE}))
    assert ids_in_pieces(tokenizer, lines, 100) == whole


def test_characters_of_several_bytes_may_be_read_in_parts(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(PROSE.encode())
    for piece in (1, 2, 3, 50):
        blocks = list(Reader(Tokenizer.from_directory(model), piece=piece)._blocks(tmp_path / "a.txt", lambda _: None))
        assert "".join(blocks) == PROSE and len(blocks) >= len(PROSE) / piece


def test_pieces_are_bounded_even_where_there_is_no_safe_place() -> None:
    for text in ("x" * 5000, "東京\n" * 2000, " " * 3000):
        pieces = list(cut((text[i : i + 10] for i in range(0, len(text), 10)), 10))
        assert "".join(pieces) == text
        assert len(pieces) > 10 and max(map(len, pieces)) <= 17 * 10


def test_progress_comes_to_the_size_of_the_file(model: str, tmp_path: Path) -> None:
    told: list[int] = []
    for name, content in (("a.txt", PROSE), ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}')):
        (tmp_path / name).write_bytes(content.encode())
        told.clear()
        for document in Reader(Tokenizer.from_directory(model), piece=100).read(tmp_path / name, told.append):
            list(document)
        assert sum(told) == (tmp_path / name).stat().st_size


# -- use --------------------------------------------------------------------------------------------------------------


def test_run_drafts_from_a_corpus_and_gives_the_same_text(model: str, tmp_path: Path) -> None:
    llm = tiny_llm(characters=True, speculate=None)
    how = SamplingParams(temperature=0.0, max_tokens=60)
    answer = llm.generate("Hello there|", how)[0].text
    (tmp_path / "answers.txt").write_text(f"Hello there|{answer}")
    assert invoke("corpus", "build", tmp_path / "answers.txt", "-o", tmp_path / "co,rpus", "-m", model).exit_code == 0
    listed = {"method": "suffix", "corpus": str(tmp_path / "co,rpus")}  # a comma parts options: JSON does not mind
    results = {}
    for drafter in ("none", "suffix", json.dumps(listed)):
        done = invoke("run", "-m", model, "--max-tokens", 60, "--json", "--speculate", drafter, "Hello there")
        assert done.exit_code == 0, done.output
        results[drafter] = json.loads(done.stdout)
    texts = {result["text"] for result in results.values()}
    assert texts == {answer}
    steps = [result["stats"]["steps"] for result in results.values()]
    assert steps[2] < steps[1] / 2 and steps[1] <= steps[0] == 60


def test_a_corpus_of_another_tokenizer_is_refused_with_both_names(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(model).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    described = (other / "tokenizer.json").read_text().replace('"q"', '"\\u00e9"')
    (other / "tokenizer.json").write_text(described)
    build((str(tmp_path / "a.txt"),), str(tmp_path / "out"), str(other))
    ours, theirs = (Tokenizer.from_directory(path).fingerprint()[:12] for path in (other, model))
    assert ours != theirs
    done = invoke("run", "-m", model, "--speculate", f"suffix:corpus={tmp_path / 'out'}", "Hi")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"tokenizer sha256:{ours} ({other}), the model has sha256:{theirs}" in done.stderr
    assert "hint: build it again" in done.stderr
    assert invoke("run", "-m", other, "--speculate", f"suffix:corpus={tmp_path / 'out'}", "Hi").exit_code == 0


@pytest.mark.real_model
def test_the_default_model_drafts_from_these_documents(tmp_path: Path) -> None:
    done = invoke("corpus", "build", ROOT / "docs" / "drafters", ROOT / "README.md", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    header = Corpus.open(tmp_path / "out").header
    assert header.model == DEFAULT_MODEL and header.documents >= 5 and header.token_bytes == 2
    llm = LLM(speculate=None, max_model_len=512)
    page = (ROOT / "docs" / "drafters" / "suffix.md").read_text()
    prompts, how = [page[:300], "The capital of France is"], SamplingParams(temperature=0.0, max_tokens=24)
    plain = llm.generate(prompts, how)
    llm.use(f"suffix:corpus={tmp_path / 'out'}")
    drafted = llm.generate(prompts, how)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.stats.drafted for o in drafted) > 0
