"""`exact` on a GPU: are texts bitwise the same with any drafter, alone and in a batch, and what does that cost?

    python -m benchmarks.gpu.exact [--tokens 100000] [--drafters eagle3 medusa ...] [-m MODEL] [--dtype bfloat16]

Every prompt of the workload is answered greedily by plain decoding, one after the other, and then again in every other
way: plainly in a batch, and with each drafter, in a batch and (some) alone, until `--tokens` tokens have been compared.
The exit code is 1 if an answer differs. The same without `exact` follows, for one round and with the first drafter
only: how many answers diverge, how nearly tied the two tokens were, and how much faster plain decoding is.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.answers import Answers, agreeing, answer, questions
from benchmarks.gpu.near_ties import NearTies, add_partings, add_rows
from slipstream import LLM, SamplingParams
from slipstream.models.formats.builtin import DEFAULT_MODEL

DRAFTERS = ("suffix", "eagle3", "medusa")
WORKLOAD = Path(__file__).parents[1] / "workload.jsonl"

_ALONE = 4  # one in so many questions is asked alone as well: a batch is many times as fast

Asked = list[tuple[str, str]]  # task and text


@dataclass
class Tally:
    """The result of comparisons."""

    answers: int = 0
    tokens: int = 0  # of plain answers, up to the first difference of each
    differences: int = 0  # answers that are not the plain ones
    ties: NearTies = field(default_factory=NearTies)  # where they diverge

    def add(self, expected: list[list[int]], found: list[list[int]]) -> int:
        """Compare answers; returns how many differ."""
        pairs = list(zip(expected, found, strict=True))
        differing = sum(one != other for one, other in pairs)
        self.answers += len(pairs)
        self.tokens += sum(agreeing(one, other) for one, other in pairs)
        self.differences += differing
        return differing

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.answers:,} answers compared, {self.differences} answers differ"


def together(llm: LLM, drafter: str, asked: Asked, length: int) -> list[list[int]]:
    """All answers in one batch."""
    llm.use(drafter)
    conversations = [[{"role": "user", "content": text}] for _, text in asked]
    return [output.token_ids for output in llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=length))]


def other_ways(llm: LLM, drafters: list[str], asked: Asked, length: int) -> Iterator[tuple[str, list[list[int]], int]]:
    """The answers in every other way, with the stride of the questions that were asked."""
    yield "none, in a batch", together(llm, "none", asked, length), 1
    for drafter in drafters:
        yield f"{drafter}, in a batch", together(llm, drafter, asked, length), 1
        yield f"{drafter}, alone", answer(llm, drafter, asked[::_ALONE], length).tokens, _ALONE


def one_round(llm: LLM, drafters: list[str], asked: Asked, length: int, tally: Tally, enough: int) -> Answers:
    """Compare until there are enough tokens; returns the plain answers."""
    plain = answer(llm, "none", asked, length)
    prompts = [list(llm.get_tokenizer().encode_chat([{"role": "user", "content": text}])) for _, text in asked]
    for way, found, every in other_ways(llm, drafters, asked, length):
        expected = plain.tokens[::every]
        differing = tally.add(expected, found)
        add_partings(tally.ties, llm, prompts[::every], expected, found)
        print(f"  {way}: {differing} of {len(found)} differ ({tally.tokens:,} tokens so far)", flush=True)
        if tally.tokens >= enough:
            break
    if tally.ties.partings:
        add_rows(tally.ties, llm, prompts, length)
    return plain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.exact")
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare")
    parser.add_argument("--length", type=int, default=512, help="longest answer")
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), help="as --speculate takes them")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a GPU", file=sys.stderr)
        return 2
    asked = questions(WORKLOAD, each=1000)
    tallies, speeds = {}, {}
    for exact in (True, False):
        llm = LLM(given.model, speculate=None, dtype=given.dtype, device="cuda", exact=exact)
        name = "exact" if exact else "not exact"
        print(f"{name}: {given.model}, {given.dtype}, {torch.cuda.get_device_name()}", flush=True)
        tally = tallies[exact] = Tally()
        number, turn = 0, asked
        while number == 0 or (exact and tally.tokens < given.tokens):
            drafters = given.drafters if exact else given.drafters[:1]
            plain = one_round(llm, drafters, turn, given.length, tally, given.tokens)
            if number == 0:
                speeds[exact] = plain.report(None).tok_s
            number += 1
            turn = [(task, f"Question {number}. {text}") for task, text in asked]  # other texts, to compare more
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    print(f"exact: {tallies[True]}")
    print(f"not exact: {tallies[False]}")
    print(f"near-ties: {tallies[False].ties}")
    print(
        f"plain decoding: {speeds[True]:.1f} tok/s exact, {speeds[False]:.1f} not, {speeds[True] / speeds[False]:.3f}"
    )
    return 1 if tallies[True].differences else 0


if __name__ == "__main__":
    sys.exit(main())
