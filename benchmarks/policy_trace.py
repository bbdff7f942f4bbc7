"""A text that turns from prose to code and back: how many steps the policy needs to follow.

    python -m benchmarks.policy_trace [--quantize int8] [--drafters eagle3] [--threads 2]

The target is made to say a given text, so that every machine sees the same one: the verifier accepts what the text
says. Passes, drafts and their costs are real; the policy starts from the prior that ships and saves nothing. It
*follows* into code when it chooses (tries do not count) to draft from a match of five or more tokens, the free signal,
counted from the first step that has one; it follows into prose with the first step in which it chooses not to draft.

Below the table, a letter for each step: `.` plain, `s` suffix, `m` a model-based drafter, `b` both; capital letters are
tries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from benchmarks.cells import keep_policy_in
from slipstream import LLM, SamplingParams
from slipstream.tree import TokenTree
from slipstream.types import Decision
from slipstream.verify import Distributions, Verdict, Verifier

_PROSE = """\
Mira had kept the books of the bakery for eleven years, and she had never trusted the till. Every evening, after the
last loaf was sold, she wrote the takings into a grey ledger, added them twice, and compared the sum with the drawer.
On most days it was right. On some it was not, and then she stayed until she had found the missing coin, the roll that
nobody paid for, or the cake that her brother had given to a friend. One winter her nephew came to visit, looked over
her shoulder, and said that a machine could do all this before she had found her glasses. He sat down with her.
"""
_CODE = """\
class Ledger:
    def __init__(self):
        self.entries = []

    def add_sale(self, name, amount, price):
        self.entries.append(("sale", name, amount, price))

    def add_gift(self, name, amount, price):
        self.entries.append(("gift", name, amount, price))

    def add_loss(self, name, amount, price):
        self.entries.append(("loss", name, amount, price))

    def total_of_sales(self):
        return sum(entry[2] * entry[3] for entry in self.entries if entry[0] == "sale")

    def total_of_gifts(self):
        return sum(entry[2] * entry[3] for entry in self.entries if entry[0] == "gift")

    def total_of_losses(self):
        return sum(entry[2] * entry[3] for entry in self.entries if entry[0] == "loss")
"""
_END = """\
She read it through slowly, moved her lips at the brackets, and asked what happened to a customer who paid next week.
Her nephew had not thought of that. They walked to the harbour instead, bought fried fish, and talked about her sister,
about the price of flour, and about a dog that had once eaten a wedding cake in a single afternoon. When they came home
it had begun to snow, and the old ledger lay open on the kitchen table with a cat asleep across the month of January.
"""
_LONG_MATCH = 5  # tokens
_QUESTION = "Tell a story about a baker who keeps her books by hand, and show the program that helps her."


class _Scripted(Verifier):
    """A verifier that accepts the tokens of a given text."""

    name = "scripted"
    uses_draws = False

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._said = 0

    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        nodes: list[int] = []
        tokens: list[int] = []
        node: int | None = 0
        while node is not None and self._said < len(self._tokens):
            tokens.append(self._tokens[self._said])
            self._said += 1
            node = tree.child(node, tokens[-1])
            if node is not None and self._said < len(self._tokens):
                nodes.append(node)
        return Verdict(nodes, tokens)


class Part(NamedTuple):
    """The decisions for one part of the text."""

    name: str
    repeats: bool  # what `suffix` can draft from
    decisions: list[Decision]

    @property
    def tokens_per_step(self) -> float:
        return sum(made.tokens for made in self.decisions) / len(self.decisions)

    @property
    def drafted(self) -> float:
        """The share of steps with a draft."""
        return sum(made.drafters != () for made in self.decisions) / len(self.decisions)

    @property
    def followed(self) -> int | None:
        """The number of steps until the policy followed into this part; None: it never did."""
        if not self.repeats:
            return _first(made.drafters == () and not made.probe for made in self.decisions)
        begun = _first(made.matched >= _LONG_MATCH for made in self.decisions)
        if begun is None:
            return None
        return _first("suffix" in made.drafters and not made.probe for made in self.decisions[begun - 1 :])

    @property
    def letters(self) -> str:
        """A letter for each step."""
        return "".join(_letter(made) for made in self.decisions)


def _first(found: Iterable[bool]) -> int | None:
    return next((number for number, true in enumerate(found, 1) if true), None)


def _letter(made: Decision) -> str:
    if not made.drafters:
        return "."
    letter = "b" if len(made.drafters) > 1 else "s" if made.drafters == ("suffix",) else "m"
    return letter.upper() if made.probe else letter


def trace(llm: LLM, speculate: str | dict[str, object]) -> Iterator[Part]:
    """The parts of the text, in turn."""
    tokenizer = llm.get_tokenizer()
    named = {"prose": _PROSE, "code": _CODE, "prose again": _END}
    ids = {name: tokenizer.encode(text, add_special=False) for name, text in named.items()}
    script = [token for tokens in ids.values() for token in tokens]
    engine, learnt = llm.engine, llm.engine.policy.state()
    engine._state = replace(engine._state, verifier=_Scripted(script))
    engine.set_runners()
    engine.policy.restore(learnt)
    how = SamplingParams(temperature=0.0, max_tokens=len(script), ignore_eos=True, speculate=speculate)
    output = llm.chat([{"role": "user", "content": _QUESTION}], how)[0]
    if list(output.token_ids) != script:
        raise RuntimeError("the text was not said as it was given")
    ends = [sum(len(tokens) for tokens in list(ids.values())[: place + 1]) for place in range(len(ids))]
    said, parts = 1, {name: Part(name, name == "code", []) for name in ids}  # the first token comes from the prompt
    for made in output.stats.decisions:
        where = next(place for place, end in enumerate(ends) if said < end)
        parts[list(ids)[where]].decisions.append(made)
        said += made.tokens
    yield from parts.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--drafters", nargs="*", help="those that the policy may pick from; all, if none is named")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    limits: dict[str, object] = {"method": "auto", "drafters": given.drafters}
    with TemporaryDirectory() as folder:
        keep_policy_in(Path(folder))
        with LLM(quantize=given.quantize, speculate="auto") as llm:
            parts = list(trace(llm, limits if given.drafters else "auto"))
    print("| part of the text | steps | tokens per step | steps with a draft | followed after step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for part in parts:
        followed = "never" if part.followed is None else part.followed
        figures = f"{len(part.decisions)} | {part.tokens_per_step:.2f} | {100 * part.drafted:.0f}% | {followed}"
        print(f"| {part.name} | {figures} |")
    for part in parts:
        print(f"\n{part.name}:")
        print("\n".join(f"    {part.letters[at : at + 100]}" for at in range(0, len(part.letters), 100)))


if __name__ == "__main__":
    main()
