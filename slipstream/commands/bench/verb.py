"""`slipstream bench`: measures drafters on your own prompts, or a server, and says what to use."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream import checks
from slipstream.commands.bench.options import (
    BenchModel,
    Limits,
    ServerLoad,
    Sweeps,
    output_folder,
    price_per_hour,
    writable,
)
from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import print_json, say
from slipstream.errors import OptionError
from slipstream.folders import expanded

if TYPE_CHECKING:
    from slipstream.bench.prompts import BenchPrompt


def bench(
    setup: BenchModel | None = None,
    sweeps: Sweeps | None = None,
    server: ServerLoad | None = None,
    speculate: Annotated[
        tuple[str, ...],
        Described("setting to compare with plain decoding (repeatable; default: auto)", metavar="DRAFTER"),
    ] = (),
    prompts: Annotated[
        str | None, Described(".jsonl or .txt with your own prompts (default: 176 of eleven kinds)", metavar="FILE")
    ] = None,
    tokens: Annotated[int, Described("longest answer, unless a prompt's line says otherwise")] = 128,
    minutes: Annotated[float, Described("end after so many minutes, loading included")] = 3.0,
    precision: Annotated[float, Described("end earlier if all speed-ups are within so many percent")] = 2.0,
    price: Annotated[str | None, Described("of the machine, as in 2.5/h: gives costs", metavar="PRICE")] = None,
    trace: Annotated[str | None, Described("write acceptance traces and costs, for `simulate`", metavar="FILE")] = None,
    output: Annotated[str, Described("directory for results.json and report.html", ("--output", "-o"), "DIR")] = (
        "bench-results"
    ),
    as_json: Annotated[bool, Described("print the results as JSON", ("--json",))] = False,
) -> int:
    """Measure speed and acceptance on your own prompts: every setting against plain decoding, with intervals."""
    began = time.monotonic()
    setup, sweeps, server = setup or BenchModel(), sweeps or Sweeps(), server or ServerLoad()
    limits = Limits(
        tokens=checks.integer("tokens", tokens, 1),
        deadline=began + 60 * checks.number("minutes", minutes, 0.01, 100_000),
        precision=checks.number("precision", precision, 0.0, 100.0) / 100,
        price=price_per_hour(price),
        trace=None if trace is None else writable(trace),
    )
    folder = output_folder(output)
    given: dict[str, Any] = {**asdict(setup), **asdict(sweeps), **asdict(server), "speculate": speculate}
    given |= {"prompts": prompts, "tokens": tokens, "minutes": minutes, "precision": precision, "price": price}
    asked = _prompts(prompts)
    if server.url is not None:
        from slipstream.commands.bench.server import bench_server

        for name, value in (("--speculate", speculate), ("--trace", trace)):
            if value:
                raise OptionError(f"{name} needs a model of this process", hint="leave it out with --url")
        results = bench_server(server, asked, limits, given)
    else:
        from slipstream.commands.bench.engine import bench_engine

        results = bench_engine(setup, sweeps, speculate, asked, limits, given)
    _write(results, folder)
    if as_json:
        print_json(results, indent=1)
        return 0
    from slipstream.commands.bench.tables import show_results

    show_results(results)
    say(f"\nwritten: {folder / 'results.json'}, {folder / 'report.html'}")
    return 0


def compare(
    first: Annotated[str, Described("results.json of a run, or its directory", metavar="A", positional=True)],
    second: Annotated[str, Described("the same of another run", metavar="B", positional=True)],
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> int:
    """Compare two results of `slipstream bench`, prompt by prompt."""
    from slipstream.bench.compare import compare_results
    from slipstream.bench.results import load
    from slipstream.commands.bench.tables import show_comparison

    paths = [path / "results.json" if (path := expanded(text)).is_dir() else path for text in (first, second)]
    compared = compare_results(*map(load, paths))
    if as_json:
        print_json(compared, indent=1)
    else:
        show_comparison(compared)
    return 0


def _prompts(file: str | None) -> list[BenchPrompt]:
    from slipstream.bench.prompts import read_file, workload

    return workload() if file is None else read_file(expanded(file))


def _write(results: dict[str, Any], folder: Path) -> None:
    from slipstream.bench.report.page import render
    from slipstream.bench.results import save

    save(results, folder / "results.json")
    (folder / "report.html").write_text(render(results), encoding="utf-8")
    for point in results.get("points", ()):  # as files of their own, for programs that read vLLM's
        name = "".join(c if c.isalnum() or c in ".-" else "-" for c in point["load"].removesuffix("/s"))
        save(point, folder / f"serve-{name}.json")
