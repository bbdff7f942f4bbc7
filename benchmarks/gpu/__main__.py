"""The GPU's table: a body of SmolLM2, our plain decoding and every drafter, transformers, and the floor, in one run.

    python -m benchmarks.gpu [--body 8b|1.5b|moe] [--parts floor steps answers batches served ...]
                             [--drafters eagle3 mtp ...] [--foreign MODEL] [--questions FILE] [--each 2] [--tokens 160]
                             [--json FILE] [--costs FILE --seconds 50]

A body computes what the small model computes, at the cost of its own size (docs/bodies.md). vLLM is not measured: it is
not installed there. Each figure is printed when it is measured; the table comes at the end, without the figures of
`profile`. The JSON file has all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bodies import bodies
from benchmarks.bodies.widening import widened
from benchmarks.gpu import answers, companions, costs, floor, hf, profile, served, steps
from benchmarks.gpu.table import table
from slipstream import LLM, SamplingParams
from slipstream.drafters import tuned
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.layer_skip import format_layers, parse_layers
from slipstream.models.formats.resolve import open_model

PARTS = (
    "floor",
    "steps",
    "profile",
    "answers",
    "batches",
    "sampling",
    "served",
    "shapes",
    "contexts",
    "peers",
    "costs",
)
LEARNED = ("eagle3", "mtp", "parallel", "medusa", "draft_model", "kangaroo")
UNTAUGHT = ("suffix", "ngram", "lookahead", "early_exit")
ROWS = (1, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (512, 2048, 8192, 32_000)
_CACHE = 98_304  # tokens
_SERVED = ("greedy", "T 0.7, top-p 0.9")
_LOADS = ((13, 1), (64, 16), (256, 64))  # requests, and how many at a time
# Trees that may suit a batch as well as the default ones.
_SHAPES = {
    16: (",nodes=15,depth=5",),
    64: (",nodes=2,depth=2,branch=1",),
    128: (",nodes=2,depth=2,branch=1",),
}
WORKLOAD = Path(__file__).parents[1] / "workload.jsonl"


@dataclass
class Run:
    """The settings, and the figures so far."""

    llm: LLM
    body: bodies.BodyCheckpoint
    drafters: dict[str, str]  # by name, as `use` takes them
    asked: list[tuple[str, str]]
    tokens: int
    companions: Callable[[], list[str]]  # makes drafters that need models beside the target
    seconds: float = float("inf")  # that `costs` may take, loading included
    found: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def note(self, part: str, row: Any) -> None:
        """Store a figure, and print it with the time."""
        self.found.setdefault(part, []).append(asdict(row))
        print(f"{time.perf_counter() - self.began:4.0f} s  {part}: {_line(asdict(row))}", flush=True)

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of `count` questions, repeated as needed."""
        texts = [self.llm.get_tokenizer().encode_chat([{"role": "user", "content": text}]) for _, text in self.asked]
        return [list(texts[i % len(texts)]) for i in range(count)]

    @cached_property
    def weights(self) -> int:
        """Bytes of the target's weights that one row reads."""
        model: Any = self.llm.model
        return floor.weights_of_a_row(model)

    @cached_property
    def context(self) -> int:
        """Tokens before a step, on average over all answers."""
        return round(sum(map(len, self.prompts(len(self.asked)))) / len(self.asked) + self.tokens / 2)

    @property
    def joined(self) -> list[str]:
        """`suffix` with the drafter that it joins on the device."""
        return [f"suffix+{self.drafters['eagle3']}"] if "eagle3" in self.drafters else []

    @property
    def decided(self) -> list[str]:
        """`auto` with the same drafters: the policy picks among them."""
        heads = [self.drafters["eagle3"]] if "eagle3" in self.drafters else []
        return [json.dumps({"method": "auto", "drafters": ["suffix", *heads]})]

    def on_device(self, drafter: str) -> bool:
        """Whether it drafts in rounds on the device, and not on the host."""
        self.llm.use(drafter)
        return self.llm.burst is not None

    def floor(self) -> None:
        model: Any = self.llm.model
        for rows in ROWS:
            self.note("floor", floor.floor(model, rows))

    def steps(self) -> None:
        for context in (256, 1900):
            self.note("steps", steps.step(self.llm, "none", context))
        for spec in filter(self.on_device, (*self.drafters.values(), *self.joined)):
            self.note("steps", steps.step(self.llm, spec, 1900))
        if "eagle3" in self.drafters:
            for context, options in ((256, ""), (1900, ",depth=8"), (1900, ",nodes=7"), (1900, ",nodes=31")):
                self.note("steps", steps.step(self.llm, self.drafters["eagle3"] + options, context))
            for spec in ("none", self.drafters["eagle3"]):
                self.note("steps", steps.step(self.llm, spec, 256, batch=64))

    def profile(self) -> None:
        for context, batch in ((1900, 1), (256, 64)):
            for spec in ("none", *self.joined):
                for kernel in profile.kernels(self.llm, spec, context, batch):
                    self.note("profile", kernel)

    def answers(self) -> None:
        plain = None
        taught, untaught = (*self.drafters.values(), *self.joined, *self.decided), (*UNTAUGHT, *skipping(self.body))
        for spec in ("none", *taught, *untaught, *self.companions()):
            found = answers.answer(self.llm, spec, self.asked, self.tokens)
            # `suffix` has two kinds of rounds, plain ones and those with a chain; `auto` has more.
            whole = spec in ("suffix", *self.decided) or self.llm.burst is None
            halves = None if whole else steps.step(self.llm, spec, self.context)
            self.note("answers", found.report(plain).beside(halves, self.weights))
            plain = plain or found

    def batches(self) -> None:
        for batch in BATCHES:
            prompts = self.prompts(batch)
            self.note("batches", steps.throughput(self.llm, "none", prompts, 128, self.weights))
            trees = [self.drafters["eagle3"], *self.joined] if "eagle3" in self.drafters else []
            for spec in trees:
                for options in ("", *_SHAPES.get(batch, ())):
                    run = steps.throughput(self.llm, f"{spec}{options}", prompts, 128, self.weights)
                    self.note("batches", run)
            for spec in self.decided:
                self.note("batches", steps.throughput(self.llm, spec, prompts, 128, self.weights))

    def sampling(self) -> None:
        for spec, batch in ((spec, batch) for spec in ("none", *self.joined) for batch in (1, 16)):
            for kind in served.KINDS:
                self.note("sampling", served.sampling(self.llm, spec, kind, batch))

    def served(self) -> None:
        """Every load twice; the first pass of all after one warm-up."""
        for spec in ("none", *self.joined, *self.decided):
            self.llm.use(spec)
            self.note("served", self.llm.warm_up())
            for kind, (count, at_once) in itertools.product(_SERVED, _LOADS):
                how = served.KINDS[kind]
                self._serve(spec, f"40 to 225 tokens, {kind}", served.lengths(count, how), at_once)
                if at_once > 1:
                    self._serve(spec, f"static, {kind}", served.equal([how] * at_once, 128), at_once)
            for load, kinds in (("greedy", [served.KINDS["greedy"]] * 16), ("mixed", served.MIXED)):
                self._serve(spec, load, served.equal(kinds, 128), 16)

    def _serve(self, spec: str, load: str, how: list[SamplingParams], at_once: int) -> None:
        prompts = self.prompts(len(how))
        for passes in (1, 2):
            self.note("served", served.served(self.llm, spec, load, prompts, how, at_once, passes))

    def shapes(self) -> None:
        """The shapes of rounds that the policy picks from."""
        for spec, batch in itertools.product(self.decided, (1, 4, 16, 64)):
            self.note("shapes", steps.step(self.llm, "none", 256, batch))
            self.llm.use(spec)
            burst = self.llm.burst
            for shape in range(0 if burst is None else len(burst.shapes(batch))):
                self.note("shapes", steps.step(self.llm, spec, 256, batch, shape))

    def contexts(self) -> None:
        for context in CONTEXTS:
            if context + 500 <= self.llm.max_model_len:
                self.note("contexts", steps.step(self.llm, "none", context))
                if "eagle3" in self.drafters:
                    self.note("contexts", steps.step(self.llm, self.drafters["eagle3"], context))

    def costs(self) -> None:
        for batch in costs.PACED:
            self.note("paced", steps.throughput(self.llm, "none", self.prompts(batch), 128, self.weights))
        for spec, context, batch in costs.shapes(self.drafters, self.joined):
            if time.perf_counter() - self.began > self.seconds:
                break
            self.note("costs", steps.step(self.llm, spec, context, batch))

    def peers(self) -> None:
        for peer in hf.peers(self.body, self.llm.model.dtype, self.prompts(3), 64):
            self.note("peers", peer)


def skipping(body: bodies.BodyCheckpoint) -> list[str]:
    """`layer_skip` without the layers that the small model can skip, if known."""
    found = tuned.find("layer_skip", body.source_fingerprint)
    if found is None:
        return []
    spared = parse_layers(found["skip"])
    return [f"layer_skip:skip={format_layers({i for i, layer in enumerate(body.order) if layer in spared})}"]


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v != {})


def _places(body: bodies.BodyCheckpoint, names: list[str]) -> dict[str, Path]:
    """The directories of the shipped drafters, or others given as METHOD=DIRECTORY."""
    given = {name: Path(directory) if directory else None for name, _, directory in (n.partition("=") for n in names)}
    return {name: place or head_checkpoint.own(name, body.source_fingerprint) for name, place in given.items()}


def _widened(llm: LLM, body: bodies.BodyCheckpoint, places: dict[str, Path], folder: Path) -> dict[str, str]:
    """These drafters, widened for the body, as `use` takes them."""
    for name, place in places.items():
        head_checkpoint.save(folder / name, widened(head_checkpoint.load(place), body, llm.model.fingerprint))
    return {name: f"{name}:checkpoint={folder / name}" for name in places}


def measure(run: Run, parts: list[str], title: str, file: Path | None) -> None:
    """All parts in order. However they end, the table is printed, and the file has all figures so far."""

    def save() -> None:
        if file:
            file.write_text(json.dumps({"title": title, **run.found}, indent=1))

    try:
        for part in parts:
            getattr(run, part)()
            save()  # the process may be killed
    finally:
        print(f"\n{title}\n\n{table(run.found)}")
        save()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--body", default="8b")
    parser.add_argument("--parts", nargs="+", default=list(PARTS[:-1]), choices=PARTS, help="default: all but costs")
    parser.add_argument("--drafters", nargs="*", default=list(LEARNED))
    parser.add_argument("--foreign", default="", help="a model of another vocabulary, for foreign_draft")
    parser.add_argument("--questions", type=Path, default=WORKLOAD)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--costs", type=Path, help="write the part `costs` as a table for `slipstream simulate`")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of that part, loading included")
    given = parser.parse_args()
    if given.costs and "costs" not in given.parts:
        parser.error("--costs needs --parts costs")
    if unknown := [name for name in given.drafters if name.partition("=")[0] not in LEARNED]:
        parser.error(f"--drafters {' '.join(unknown)}: of {', '.join(LEARNED)}, or METHOD=DIRECTORY of such a one")
    if given.json and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no such directory")
    if given.foreign:
        open_model(given.foreign)  # fail now, not after minutes
    elif "answers" in given.parts:
        print("no foreign_draft: --foreign names a model of another vocabulary for it", flush=True)
    began = time.perf_counter()
    body = bodies.make(given.body, dtype="bfloat16", device="cuda")
    # Longer than the small model's context: it costs the same.
    body.config = replace(body.config, context=CONTEXTS[-1] + 768)
    llm = LLM(body, speculate=None, dtype="bfloat16", device="cuda", max_num_seqs=BATCHES[-1], cache_tokens=_CACHE)
    title = f"{body.name}, bfloat16, {torch.cuda.get_device_name()}; vLLM is not measured"
    print(f"{title} (loaded in {time.perf_counter() - began:.0f} s)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        places = _places(body, given.drafters)
        drafters = _widened(llm, body, places, Path(folder))
        others = partial(companions.drafters, body, places.get("draft_model"), given.foreign, Path(folder))
        asked = answers.questions(given.questions, given.each)
        run = Run(llm, body, drafters, asked, given.tokens, others, given.seconds, began=began)
        measure(run, given.parts, title, given.json)
        if given.costs:
            machine = f"{body.name}, bfloat16, {torch.cuda.get_device_name()}"
            given.costs.write_text(json.dumps(costs.table_of(run.found, machine, sys.argv[1:]).as_dict(), indent=1))


if __name__ == "__main__":
    main()
