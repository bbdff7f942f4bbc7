"""The options of `slipstream bench`, in groups, and what their texts mean."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from slipstream.checks import require
from slipstream.commands.shared.options import Described
from slipstream.errors import OptionError
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

Number = TypeVar("Number", int, float)

_PRICE = re.compile(r"[^\d.]{0,3}(\d+(?:\.\d+)?)\s*(?:/\s*h(?:our)?)?")


@dataclass(frozen=True)
class BenchModel:
    """The model that is measured."""

    model: Annotated[str, Described("built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")] = (
        DEFAULT_MODEL
    )
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto"
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto"
    quantize: Annotated[str, Described("weights on a CPU: auto, none, int8 or int4")] = "auto"
    exact: Annotated[bool, Described("on a GPU: batch-invariant kernels, the same bits with any drafter; slower")] = (
        False
    )
    max_model_len: Annotated[
        int | None, Described("longest sequence in tokens, prompt included (default: the model's own)")
    ] = None
    verifier: Annotated[
        str, Described("how drafts are verified: match, rejection, block, traversal or typical (lossy)")
    ] = "match"
    threads: Annotated[int | None, Described("CPU threads (default: torch's choice)")] = None


@dataclass(frozen=True)
class Sweeps:
    """Conditions beside the base one, which has the first value of each list."""

    batch: Annotated[str, Described("requests at once, as in 1,8,32", metavar="LIST")] = "1"
    context: Annotated[str | None, Described("tokens to fill prompts up to, as in 512,4096", metavar="LIST")] = None
    temperature: Annotated[
        str | None, Described("as in 0,0.7 (default: 0, or what a prompt's line says)", metavar="LIST")
    ] = None
    nodes: Annotated[str | None, Described("tree sizes of every drafter, as in 8,16,32", metavar="LIST")] = None


@dataclass(frozen=True)
class ServerLoad:
    """How a server is loaded."""

    url: Annotated[
        str | None, Described("measure the OpenAI-compatible server at this address instead", metavar="URL")
    ] = None
    concurrency: Annotated[
        str, Described("closed loop: requests under way at all times, as in 1,8,32", metavar="LIST")
    ] = "8"
    rate: Annotated[
        str | None, Described("open loop: requests per second that arrive at random, as in 1,2,4", metavar="LIST")
    ] = None
    requests: Annotated[int | None, Described("requests of each point (default: all prompts)")] = None
    goodput: Annotated[
        tuple[str, ...],
        Described("service level in ms (repeatable): ttft:500, tpot:50 or e2el:3000", metavar="NAME:MS"),
    ] = ()
    header: Annotated[
        tuple[str, ...], Described("sent with every request (repeatable); OPENAI_API_KEY is sent too", metavar="N: V")
    ] = ()


def numbers(name: str, text: str | None, kind: Callable[[str], Number], low: float) -> list[Number]:
    """The numbers of a list with commas; None is an empty list."""
    found: list[Number] = []
    for part in (text or "").split(",") if text is not None else []:
        try:
            value = kind(part.strip())
        except ValueError:
            raise OptionError(f"--{name} {text!r} is not a list of numbers", hint=f"as in --{name} 1,8") from None
        require(math.isfinite(value) and value >= low, name, value, f"{low:g} or more")
        found.append(value)
    return list(dict.fromkeys(found))


def price_per_hour(text: str | None) -> float | None:
    """`2.5/h`, `$2.5/h` or `2.5`."""
    if text is None:
        return None
    found = _PRICE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise OptionError(f"--price {text!r} is not a price per hour", hint="as in --price 2.5/h")
    return float(found[1])


def output_folder(text: str) -> Path:
    """The directory for results, made if it is missing."""
    folder = expanded(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise OptionError(f"--output {text!r} cannot be written: {error.strerror or error}") from None
    return folder


def writable(text: str) -> Path:
    """A file to write, in a directory that exists."""
    path = expanded(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise OptionError(f"{text!r} cannot be written", hint="name a file in a directory that exists")
    return path


@dataclass(frozen=True)
class Limits:
    """What bounds a run."""

    tokens: int  # of an answer
    deadline: float  # of `time.monotonic`
    precision: float  # relative half width of an interval
    price: float | None  # of the machine per hour
    trace: Path | None  # where traces are written
