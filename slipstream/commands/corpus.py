"""`slipstream corpus build`: builds a corpus to retrieve drafts from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import ProgressBar, mebibytes, note, say, temporary_line
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.drafters.retrieval.corpus import Header
    from slipstream.drafters.retrieval.corpus_build import CorpusWriter
    from slipstream.drafters.retrieval.corpus_files import Reader, Source
    from slipstream.text import Tokenizer


def build(
    files: Annotated[
        tuple[str, ...], Described("text files, .jsonl files, directories", metavar="FILES", positional=True)
    ],
    output: Annotated[str, Described("directory to create; an existing corpus is replaced", ("--output", "-o"), "DIR")],
    model: Annotated[
        str,
        Described("whose tokenizer to use: built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL"),
    ] = DEFAULT_MODEL,
    field: Annotated[
        str | None, Described("field of .jsonl lines with a text or chat messages (default: text, else messages)")
    ] = None,
) -> None:
    """Build a corpus for --speculate suffix:corpus=DIR."""
    if not files:
        raise OptionError("no texts to build a corpus from", hint="name files or directories")
    with temporary_line("loading torch ..."):
        from slipstream.drafters.retrieval.corpus import fingerprint
        from slipstream.drafters.retrieval.corpus_build import CorpusWriter, require_free
        from slipstream.drafters.retrieval.corpus_files import Reader, find_sources
    target = expanded(output)
    require_free(target)
    sources = find_sources(files, target)
    tokenizer = _tokenizer(model)
    reader = Reader(tokenizer, field)
    with temporary_line("checking the texts ..."):
        reader.survey(sources)
    for source in sources:
        _tell_skipped(source)
    size = len(tokenizer)
    try:
        with CorpusWriter(target, tokenizer=fingerprint(tokenizer, size), vocabulary=size, model=model) as writer:
            header = writer.finish(_fill(writer, reader, sources))
    except OSError as error:
        raise OptionError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
    _report(target, header)


def _tokenizer(model: str) -> Tokenizer:
    from slipstream.drafters import DrafterSpec
    from slipstream.models.formats.resolve import open_model

    fetch_models(model, DrafterSpec("none"))
    with temporary_line(f"opening {model} ..."):
        tokenizer = open_model(model).tokenizer()
    if tokenizer is None:
        raise OptionError(f"{model} has no tokenizer, so it cannot read text")
    return tokenizer


def _fill(writer: CorpusWriter, reader: Reader, sources: list[Source]) -> list[dict[str, Any]]:
    """Write every document; returns the counts of each source."""
    total, done, counted = sum(source.size for source in sources), 0, []
    with ProgressBar() as bar:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            bar(done, total)

        for source in sources:
            before = (writer.documents, writer.tokens)
            for path in source.files:
                for document in reader.read(path, progress):
                    for ids in document:
                        writer.add(ids)
                    writer.end_document()
            counted.append(
                {
                    "path": source.given,
                    "files": len(source.files),
                    "skipped": len(source.skipped),
                    "documents": writer.documents - before[0],
                    "tokens": writer.tokens - before[1],
                }
            )
    return counted


def _tell_skipped(source: Source) -> None:
    if source.skipped:
        more = f" and {len(source.skipped) - 1} more" if len(source.skipped) > 1 else ""
        note(f"{source.given}: skipped what is not UTF-8 text: {source.skipped[0]}{more}")


def _report(target: Path, header: Header) -> None:
    size = sum(file.stat().st_size for file in target.iterdir())
    shards = f"{len(header.shards)} shard{'s' if len(header.shards) > 1 else ''}"
    say(f"{target}: {header.documents:,} documents, {header.tokens:,} tokens, {shards}, {mebibytes(size)}")
    spelled = f"suffix:corpus={target}"
    if "," in spelled:  # commas separate options
        spelled = json.dumps({"method": "suffix", "corpus": str(target)})
    note(f"use it: slipstream run --speculate {shlex.quote(spelled)} ...")
