"""The walks in docs/architecture.md are what requests do: these files, each below its caller, each once."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import slipstream
from slipstream import LLM, SamplingParams, gumbel_max
from tests.heads import random_head
from tests.laned import burst_on_cpu
from tests.serving import served
from tests.tiny import tiny_llm

PACKAGE = Path(slipstream.__file__).parent


class Calls(set[tuple[str, str]]):
    """(file of a frame, file of a function that is called while that frame is active)."""

    noted = False  # what is called before is not of interest: to look at every frame takes its time


def walk(title: str) -> dict[str, str]:
    """The file that each file of a walk is indented under; "" at the top."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    section = page.partition("## A newcomer's walk")[2].partition("\n## ")[0]
    lines = section.partition(f"**{title}**")[2].partition("\n**")[0]
    above: list[tuple[int, str]] = []
    found: dict[str, str] = {}
    line = re.compile(r"^( {4,})([\w/]+\.py)(?:, ([\w/]+\.py))?", re.MULTILINE)
    for indent, first, second in line.findall(lines):
        while above and above[-1][0] >= len(indent):
            above.pop()
        for file in filter(None, (first, second)):
            assert file not in found, f"{file} is passed twice"
            found[file] = above[-1][1] if above else ""
        above.append((len(indent), first))
    return found


@contextmanager
def traced() -> Iterator[Calls]:
    """Calls between files of the package, in this thread and in those that start meanwhile."""
    calls = Calls()

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if not calls.noted or frame is None or event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
        calls.add(("", file))
        while frame := frame.f_back:
            if frame.f_code.co_filename.startswith(str(PACKAGE)):
                calls.add((str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), file))

    profile: Callable[[FrameType, str, object], object] = note
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.real_model
def test_on_a_cpu(smollm2_path: Path) -> None:
    with traced() as calls:
        llm = LLM(smollm2_path, speculate="suffix")
        gumbel_max.kernels_work.cache_clear()  # it compares the kernel with `noise.py`, once in a process
        calls.noted = True
        llm.generate("The cat sat on", SamplingParams(temperature=0.7, seed=1, max_tokens=40))
        llm.close()
    steps = walk("On a CPU")
    del steps["types.py"]  # dataclasses, whose generated code has no file
    assert len(steps) > 25 and not {(above, file) for file, above in steps.items()} - calls


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In emulation, so without the files that have kernels only."""
    head = {"method": "eagle3", "checkpoint": str(random_head("eagle3")), "depth": 3, "nodes": 8}
    with traced() as calls:
        llm = burst_on_cpu(tiny_llm(characters=True, context=300, speculate=head), monkeypatch)
        calls.noted = True
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.7, seed=1, max_tokens=40, repetition_penalty=1.1))
        llm.close()
    steps = walk("On a GPU")
    for file in ("attention/paged.py", "gpu/gemm.py", "gpu/layer_ops.py"):
        del steps[file]
    assert len(steps) > 10 and not {(above, file) for file, above in steps.items()} - calls


def test_through_the_server(tiny: str) -> None:
    with traced() as calls, served(tiny, speculate="suffix") as server:
        calls.noted = True
        question = [{"role": "user", "content": "The quick brown fox. The quick brown"}]
        server.events("/v1/chat/completions", {"messages": question, "max_tokens": 20})
    steps = walk("Through the server")
    assert len(steps) > 10 and not {(above, file) for file, above in steps.items()} - calls
