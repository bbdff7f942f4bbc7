"""What does a bad drafter cost under `auto`? Planted ones, installed as another package would install them.

    python -m benchmarks.bad_drafters FILE [--kinds random sleeps raises nan sure] [--quantize int8] [--requests 100]
                                      [--tokens 128] [--temperature 0] [--threads 2]
    python -m benchmarks.bad_drafters FILE --show

For each kind two engines start without anything learnt: `auto` with what is at hand, and the same with the planted
drafter. Both answer the same prompts in turns; texts must be identical. A kind is written to FILE when all of its
requests are answered; one that FILE has, with as many requests or more, is not measured again. Times are from arrival
to last token; the interval (95%) is a bootstrap over requests.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.cells import keep_policy_in
from slipstream import LLM, SamplingParams
from slipstream.bench.encoding import Encoder
from slipstream.bench.intervals import Bootstrap
from slipstream.bench.prompts import workload
from slipstream.bench.schedule import stratified
from slipstream.drafters import Drafter, DraftOptions, DraftRequest
from slipstream.tree import TokenTree
from slipstream.types import Output

AT_HAND = ("suffix", "grammar", "prediction", "eagle3")
_SLEEP = 0.05  # seconds
_MOST = 1.03  # times plain `auto`: what a planted drafter may cost


class Bad(Drafter[DraftOptions]):
    """The base of the planted drafters: a chain of the planned depth."""

    summary = helps = cost = "planted"
    options_type = DraftOptions

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        return [self.tree(request, min(request.plan.depth, request.plan.nodes)) for request in requests]

    def tree(self, request: DraftRequest, length: int) -> TokenTree:
        vocab, last = self.target.config.vocab_size, request.sequence.tokens[-1]
        return TokenTree.chain(last, random.choices(range(vocab), k=length), self.name)


class Random(Bad):
    """Random tokens."""

    name = "random"


class Sleeps(Bad):
    """Random tokens after a delay."""

    name = "sleeps"

    def tree(self, request: DraftRequest, length: int) -> TokenTree:
        time.sleep(_SLEEP)
        return super().tree(request, length)


class Raises(Bad):
    """An error at every call."""

    name = "raises"

    def tree(self, request: DraftRequest, length: int) -> TokenTree:
        raise RuntimeError("planted")


class NotANumber(Bad):
    """Confidences that are not numbers."""

    name = "nan"

    def tree(self, request: DraftRequest, length: int) -> TokenTree:
        tree, node = TokenTree(request.sequence.tokens[-1]), 0
        for token in super().tree(request, length).tokens[1:]:
            node = tree.add(node, token, origin=self.name, confidence=float("nan"))
        return tree


class Sure(Bad):
    """Always sure, always wrong: a token that no answer contains."""

    name = "sure"

    def tree(self, request: DraftRequest, length: int) -> TokenTree:
        last = request.sequence.tokens[-1]
        return TokenTree.chain(last, [self.target.config.vocab_size - 1] * length, self.name)


KINDS = {kind.name: kind for kind in (Random, Sleeps, Raises, NotANumber, Sure)}


@dataclass(frozen=True)
class Row:
    """One request, answered by both."""

    quantize: str
    kind: str
    prompt: str
    tokens: int
    ms: float
    planted_ms: float
    steps: int  # steps that asked the planted drafter
    faults: int
    same: bool


def install(folder: Path) -> None:
    """Install a package with the planted drafters."""
    metadata = folder / "bad_drafters-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-drafters\nVersion: 1\n")
    lines = [f"{name} = benchmarks.bad_drafters:{kind.__name__}\n" for name, kind in KINDS.items()]
    (metadata / "entry_points.txt").write_text("[slipstream.drafters]\n" + "".join(lines))
    sys.path.append(str(folder))


def measure(kind: str, given: argparse.Namespace) -> Iterator[Row]:
    """All requests with one planted drafter."""
    engines = [
        LLM(quantize=given.quantize, speculate={"method": "auto", "drafters": drafters}, cache_tokens=16_384)
        for drafters in (AT_HAND, (*AT_HAND, kind))
    ]
    encoder, prompts = Encoder(engines[0].get_tokenizer()), workload()
    for turn, place in enumerate(stratified(prompts)[: given.requests]):
        ids = encoder.encode(prompts[place])
        how = SamplingParams(temperature=given.temperature, max_tokens=given.tokens, ignore_eos=True, seed=turn)
        answers = {}
        for number in (0, 1) if turn % 2 == 0 else (1, 0):
            engines[number].reset_prefix_cache()
            (output,) = engines[number].generate([ids], how)
            answers[number] = output
        ms, planted_ms = (round(_whole_ms(answers[number]), 3) for number in (0, 1))
        stats = answers[1].stats
        yield Row(
            given.quantize,
            kind,
            prompts[place].name,
            len(answers[0].token_ids),
            ms,
            planted_ms,
            sum(kind in made.drafters for made in stats.decisions),
            stats.draft_faults,
            answers[0].token_ids == answers[1].token_ids,
        )
    for engine in engines:
        engine.close()


def _whole_ms(output: Output) -> float:
    """From arrival to last token."""
    assert output.metrics is not None and output.metrics.last_token_time is not None
    return 1000 * (output.metrics.last_token_time - output.metrics.arrival_time)


def load(path: Path) -> list[Row]:
    """What was measured so far."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def keep(path: Path, rows: list[Row]) -> None:
    """Write the rows of one kind, which replace those of an earlier, shorter run of it."""
    key = rows[0].quantize, rows[0].kind
    others = [row for row in load(path) if (row.quantize, row.kind) != key]
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (*others, *rows)))
    temporary.replace(path)


def missing(rows: list[Row], given: argparse.Namespace) -> list[str]:
    """The kinds that have fewer requests than are wanted."""
    found = Counter(row.kind for row in rows if row.quantize == given.quantize)
    return [kind for kind in given.kinds if found[kind] < given.requests]


def show(rows: list[Row]) -> None:
    """The cost of each planted drafter, with its interval over prompts."""
    print(f"times of `auto` with a planted drafter over those without it; at most {_MOST} passes\n")
    print("| weights | planted | requests | time | 95% | first request | steps that asked it | faults | texts | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for key in dict.fromkeys((row.quantize, row.kind) for row in rows):
        mine = [row for row in rows if (row.quantize, row.kind) == key]
        without, planted = (np.array([getattr(row, name) for row in mine]) for name in ("ms", "planted_ms"))
        ratio = Bootstrap([key] * len(mine)).ratio(planted, without)
        between = "" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        counts = f"{sum(row.steps for row in mine)} | {sum(row.faults for row in mine)}"
        texts = "identical" if all(row.same for row in mine) else "DIFFER"
        first = f"{mine[0].planted_ms - mine[0].ms:+.0f} ms"
        figures = f"{len(mine)} | {ratio.value:.3f}x | {between} | {first} | {counts} | {texts}"
        passes = ratio.value <= _MOST and all(row.same for row in mine)
        print(f"| {' | '.join(key)} | {figures} | {'pass' if passes else 'FAIL'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="show what was measured")
    given = parser.parse_args()
    if not given.show:
        torch.set_num_threads(given.threads)
        logging.getLogger("slipstream").setLevel(logging.ERROR)  # each fault is a warning
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            install(Path(folder))
            for kind in missing(load(given.file), given):
                keep_policy_in(Path(folder) / kind)
                keep(given.file, list(measure(kind, given)))
        print(f"{(time.monotonic() - begun) / 60:.1f} minutes\n")
    show(load(given.file))


if __name__ == "__main__":
    main()
