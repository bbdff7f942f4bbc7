"""`slipstream synth`: conversations to train drafters on, written by the target itself."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from slipstream import checks
from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.options import Described, TargetName
from slipstream.commands.shared.terminal import mebibytes, note, say, temporary_line
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.bench.tune.prompts import Dialogue
    from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint
    from slipstream.models.formats.checkpoint import Checkpoint
    from slipstream.text import Tokenizer
    from slipstream.train.data import ChatWriter
    from slipstream.train.synth.conversation import Author
    from slipstream.train.synth.write import Room, Status, Write

_COUNT = 20_000
_SHOW_EVERY = 0.2  # seconds between two updates of the progress


def synth(
    output: Annotated[str, Described("directory to create, or to continue", ("--output", "-o"), "DIR")],
    model: TargetName = DEFAULT_MODEL,
    count: Annotated[
        int | None,
        Described(f"conversations to write (default: {_COUNT:,}, or all of --prompts)", ("-n", "--count"), "COUNT"),
    ] = None,
    prompts: Annotated[
        str | None,
        Described(
            "answer these instead of making prompts: .txt with one per line, or .jsonl with prompt, question, "
            "instruction (and input), turns, messages or text",
            metavar="FILE",
        ),
    ] = None,
    max_tokens: Annotated[int, Described("longest answer in tokens")] = 320,
    seed: Annotated[int, Described("seed of the conversations")] = 0,
    at_once: Annotated[int | None, Described("concurrent conversations (default: 1024 on a GPU, 32 on a CPU)")] = None,
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto",
    threads: Annotated[
        int | None, Described("CPU threads (default: torch's choice, divided among the writers)")
    ] = None,
    writers: Annotated[
        int, Described("writer processes, each with the whole model: with one, a GPU waits for the host")
    ] = 1,
) -> None:
    """Let a model write conversations to train drafters on; the same command continues an interrupted run."""
    least_one = {"n": count, "max_tokens": max_tokens, "at_once": at_once, "threads": threads, "writers": writers}
    for name, value in least_one.items():
        if value is not None:
            checks.integer(name, value, 1)
    checks.integer("seed", seed, 0, 2**63 - 1, valid="0 to 2**63 - 1")
    directory = expanded(output)
    with temporary_line("loading torch ..."):
        import torch

        from slipstream.bench.tune.prompts import read_dialogues
        from slipstream.models.formats.resolve import open_model
        from slipstream.train.synth.conversation import RECIPE, Author
        from slipstream.train.synth.phrasebook import phrasebook
    if threads is not None or writers > 1:
        torch.set_num_threads(threads or max(1, torch.get_num_threads() // writers))
    dialogues = None if prompts is None else read_dialogues(expanded(prompts))
    count = _settled_count(count, prompts, dialogues)
    _fetch(model)
    with temporary_line(f"opening {model} ..."):
        checkpoint = open_model(model)
        tokenizer, guidance = _guidance(checkpoint, seed, max_tokens, dialogues)
        author = Author(tokenizer, **guidance)
        room, chosen = _room(checkpoint, author, at_once, count, dtype, device, writers)
    _require_disk(directory, count * _most_bytes(checkpoint.config.vocab_size, author))
    said = {"seed": seed, "max_tokens": max_tokens, "dtype": chosen, "prompts": _provenance(prompts)}
    arguments = {**said, "recipe": RECIPE, "phrases": phrasebook().digest if prompts is None else None}
    with _writing(directory):
        _require_writable(directory)
    loading = _loading(model, dtype, device, room)
    with (
        _hands(loading, author, guidance, room, writers) as hands,
        _writing(directory),
        _writer(directory, hands, tokenizer, model, arguments, prompts) as writer,
    ):
        _work(hands, author, writer, f"{writers * room.at_once:,} conversations at once", count, directory)
    _report(directory, writer)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Report an unwritable directory or a full disk in one line."""
    try:
        yield
    except BrokenPipeError:  # the reader of stdout is gone: handled elsewhere
        raise
    except OSError as error:
        raise OptionError(f"cannot write {str(directory)!r}: {error.strerror or error}") from error


def _settled_count(count: int | None, prompts: str | None, dialogues: list[Dialogue] | None) -> int:
    if dialogues is None:
        return _COUNT if count is None else count
    if count is not None and count > len(dialogues):
        raise OptionError(f"{prompts!r} has {len(dialogues)} prompts, not {count}", hint="each is answered once")
    return len(dialogues) if count is None else count


def _fetch(model: str) -> None:
    from slipstream.drafters import DrafterSpec

    fetch_models(model, DrafterSpec("none"))


def _guidance(
    checkpoint: Checkpoint | AdapterCheckpoint, seed: int, max_tokens: int, dialogues: list[Dialogue] | None
) -> tuple[Tokenizer, dict[str, Any]]:
    """The arguments of an `Author`, without the tokenizer."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    if tokenizer is None:
        raise OptionError(f"{checkpoint.name} has no tokenizer, so it cannot write")
    ends = frozenset((*config.eos_ids, *tokenizer.eos_ids))
    limits = {"seed": seed, "max_tokens": max_tokens, "context": config.context}
    return tokenizer, {"end_ids": ends, "dialogues": dialogues, **limits}


def _room(
    checkpoint: Checkpoint | AdapterCheckpoint,
    author: Author,
    at_once: int | None,
    count: int,
    dtype: str,
    device: str,
    writers: int,
) -> tuple[Room, str]:
    """How much runs at once in each process, and the dtype that `auto` resolves to."""
    from slipstream.models.load import choose_device, choose_dtype, require_memory, weight_bytes
    from slipstream.models.memory import available_bytes
    from slipstream.train.synth.write import AT_ONCE, find_room

    device = choose_device(device)
    kind = choose_dtype(dtype, device)
    require_memory(checkpoint.name, checkpoint.config, kind, device)
    free = available_bytes(device) // writers - weight_bytes(checkpoint.config, kind)
    wanted = at_once or AT_ONCE["cuda" if device.startswith("cuda") else "cpu"]
    room = find_room(checkpoint.config, kind.itemsize, free, author.longest, min(wanted, count))
    if at_once is not None and room.at_once < min(at_once, count):
        note(f"memory for {room.at_once} conversations at once, not {at_once}")
    return room, str(kind).removeprefix("torch.")


def _most_bytes(vocab_size: int, author: Author) -> int:
    """Size of one conversation on disk."""
    from slipstream.train.data_files import INDEX, token_bytes

    return author.longest * token_bytes(vocab_size) + INDEX.itemsize


def _require_disk(directory: Path, needed: int) -> None:
    there = next(folder for folder in (directory, *directory.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise OptionError(
            f"{str(directory)!r} may need {mebibytes(needed)}, but {mebibytes(free)} are free",
            hint="a smaller -n or --max-tokens, or another disk",
        )


def _require_writable(directory: Path) -> None:
    """Check before the model is loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / "data.json.partial"
    probe.touch()
    probe.unlink()


def _provenance(prompts: str | None) -> dict[str, str] | None:
    if prompts is None:
        return None
    path = expanded(prompts)
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _loading(model: str, dtype: str, device: str, room: Room) -> dict[str, Any]:
    """The arguments of an `LLM`."""
    space = {"max_model_len": room.max_model_len, "max_num_seqs": room.at_once, "cache_tokens": room.cache_tokens}
    return {"model": model, "speculate": "none", "dtype": dtype, "device": device, "quantize": "none", **space}


class _Hands(NamedTuple):
    """The engines that write: one here, or those of other processes."""

    fingerprint: str  # of the model
    vocab_size: int
    speed: Callable[[], float]  # tokens per second
    write: Write


@contextmanager
def _hands(
    loading: dict[str, Any], author: Author, guidance: dict[str, Any], room: Room, writers: int
) -> Iterator[_Hands]:
    """`loading` and `guidance`: arguments for the `LLM` and the `Author` of other processes."""
    import torch

    from slipstream.llm import LLM
    from slipstream.train.synth.scribe import Scribe
    from slipstream.train.synth.writers import WriteJob, Writers

    if writers == 1:
        with temporary_line(f"loading {loading['model']} ..."):
            llm = LLM(**loading)
        scribe = Scribe(llm, author, room.at_once)
        yield _Hands(llm.model.fingerprint, llm.model.config.vocab_size, scribe.speed, scribe.write)
        return
    with Writers(writers, WriteJob(loading, guidance, room.at_once, torch.get_num_threads())) as many:
        with temporary_line(f"loading {loading['model']} {writers} times ..."):
            ready = many.ready()
        first, speed = ready[0], sum(each.speed for each in ready)
        yield _Hands(first.fingerprint, first.vocab_size, lambda: speed, many.write)


def _writer(
    directory: Path, hands: _Hands, tokenizer: Tokenizer, model: str, arguments: dict[str, Any], prompts: str | None
) -> ChatWriter:
    from slipstream.drafters.retrieval.corpus import fingerprint
    from slipstream.train.data import ChatWriter
    from slipstream.train.synth.conversation import SOURCES

    return ChatWriter(
        directory,
        fingerprint=hands.fingerprint,
        vocab_size=hands.vocab_size,
        tokenizer=fingerprint(tokenizer, len(tokenizer)),
        model=model,
        arguments=arguments,
        sources=SOURCES if prompts is None else [Path(prompts).name],
    )


def _work(hands: _Hands, author: Author, writer: ChatWriter, together: str, count: int, directory: Path) -> None:
    from slipstream.train.synth.write import Synthesis

    left = count - writer.items
    if left <= 0:
        note(f"{directory} has its {writer.items:,} conversations already", "bold")
    else:
        if writer.items:
            note(f"{directory} has {writer.items:,} of {count:,} conversations: continuing", "bold")
        with temporary_line("measuring the speed ..."):
            speed = hands.speed()
        size = mebibytes(left * _most_bytes(hands.vocab_size, author))
        longest = _span(left * author.most_written / speed)
        fast = f"{together}, {speed:,.0f} tokens per second"
        note(f"{left:,} conversations: at most about {size} and {longest} ({fast}); most answers are shorter")
        try:
            with _Meter(count, writer.items) as meter:
                Synthesis(writer, hands.write).run(count, meter)
        except KeyboardInterrupt:
            note(f"stopped: {writer.items:,} of {count:,} are kept, and the same command continues from there")
            raise


class _Meter:
    """A progress line on stderr, in a terminal only."""

    def __init__(self, count: int, before: int) -> None:
        self._count, self._before = count, before
        self._began = time.monotonic()
        self._next = self._began if sys.stderr.isatty() else float("inf")

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, status: Status) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next, gone = now + _SHOW_EVERY, now - self._began
        fresh = status.items - self._before
        left = _span(gone / fresh * (self._count - status.items))
        speed = f"{status.written / max(gone, 1e-9):,.0f} tokens per second"
        line = f"  {status.items:,} of {self._count:,}, {speed}, {status.dropped:,} dropped, about {left} left"
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)


def _span(seconds: float) -> str:
    """4000 -> '1 h 7 min'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{rest} s"


def _report(directory: Path, writer: ChatWriter) -> None:
    counts = writer.counts
    size = sum(file.stat().st_size for file in directory.iterdir())
    say(
        f"{directory}: {counts['kept']:,} of {counts['items']:,} conversations, {counts['tokens']:,} tokens "
        f"({counts['answer_tokens']:,} of answers), {mebibytes(size)}"
    )
    if counts["dropped"]:
        reasons = sorted(counts["dropped"].items(), key=lambda pair: -pair[1])
        say("dropped: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons))
    if counts["cut"]:
        say(f"cut where they started to repeat themselves: {counts['cut']:,}")
