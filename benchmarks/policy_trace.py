"""A text that turns from prose to code and back: how many steps the policy needs to follow.

    python -m benchmarks.policy_trace [--quantize int8] [--drafters eagle3] [--threads 2]

The target is made to say a given text, so that every machine sees the same one: the verifier accepts what the text
says. Passes, drafts and their costs are real. Of each part of the text: its tokens per step, and a letter for each
step: `.` plain, `s` suffix, `m` a model-based drafter, `b` both; capital letters are tries. Besides, after how many
steps of the part the policy chose to draft (tries do not count), and after how many steps with a match of five or more
tokens, the free signal, it drafted from the match.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

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
    """Accepts what a text says."""

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
    decisions: list[Decision]

    @property
    def first(self) -> int | None:
        """Steps until it was chosen to draft."""
        return _first(made.drafters != () and not made.probe for made in self.decisions)

    @property
    def first_match(self) -> int | None:
        """Steps with a match of some length until it was drafted from one."""
        return _first("suffix" in made.drafters for made in self.decisions if made.matched >= _LONG_MATCH)

    @property
    def letters(self) -> str:
        """One for each step."""
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
    said, parts = 1, {name: Part(name, []) for name in ids}  # the first token comes from the prompt
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
    with LLM(quantize=given.quantize, speculate="auto") as llm:
        limits: dict[str, object] = {"method": "auto", "drafters": given.drafters}
        for part in trace(llm, limits if given.drafters else "auto"):
            steps, tokens = len(part.decisions), sum(made.tokens for made in part.decisions)
            print(f"{part.name}: {steps} steps, {tokens / steps:.2f} tokens per step")
            print(f"    chose to draft after {part.first} steps, from a match after {part.first_match} with one")
            print(f"    {part.letters}")


if __name__ == "__main__":
    main()
