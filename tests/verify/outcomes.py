"""What a verifier does with a tree, exactly: every way its dice can fall is tried, and nothing is sampled.

The verifier under test is the real one. Its uniform numbers are replaced by dice that say nothing until they are
compared; a comparison that chance decides is tried both ways, with the probability of each. Every tree that a drafter
could have drawn is made too, so what a step says is a sum and not an estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from slipstream import noise
from slipstream.tree import Draw, TokenTree
from slipstream.verify import Verifier, block, rejection, traversal
from tests.verify.tables import Prefix, Tables

# How many children a node has, and whether they are chosen; after every prefix.
Shape = Callable[[Prefix], tuple[int, bool]]


def levels(*counts: int, chosen: bool = False) -> Shape:
    """The same number of children for all nodes of a level."""
    return lambda prefix: (counts[len(prefix)] if len(prefix) < len(counts) else 0, chosen)


# -- dice -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One way the dice can fall. `left`: what the target's own token is drawn from, normalised."""

    probability: float
    nodes: list[int]
    left: torch.Tensor


class Dice:
    """Uniform numbers of one run of a verifier: the first fall as `told`, the others so that drafts are accepted."""

    def __init__(self, told: list[bool]) -> None:
        self._told = told
        self._used: set[tuple[int, int]] = set()
        self.decided: list[bool] = []
        self.probability = 1.0
        self.left: torch.Tensor | None = None

    def uniform(self, key: tuple[int, int]) -> Die:
        return Die(self, key)

    def use(self, key: tuple[int, int], purpose: int) -> None:
        assert key not in self._used, f"the number of {key} is used twice"
        assert key[1] == purpose, f"the number of {key} is used for another purpose"
        self._used.add(key)

    def decide(self, probability: float) -> bool:
        if probability in (0.0, 1.0):
            return probability == 1.0
        stands = self._told[len(self.decided)] if len(self.decided) < len(self._told) else True
        self.decided.append(stands)
        self.probability *= probability if stands else 1.0 - probability
        return stands

    def draw(self, left: torch.Tensor, u: Die) -> int:
        self.use(u.key, noise.RESIDUAL)
        self.left = left / left.sum()
        return int(left.argmax())


@dataclass(frozen=True)
class Die:
    """A number in (0, 1), times `scale`."""

    dice: Dice
    key: tuple[int, int]
    scale: float = 1.0

    def __mul__(self, factor: float) -> Die:
        return Die(self.dice, self.key, self.scale * factor)

    def __lt__(self, bound: float) -> bool:
        self.dice.use(self.key, noise.ACCEPT)
        return self.dice.decide(min(1.0, bound / self.scale) if bound > 0.0 else 0.0)


@dataclass
class Asked:
    """`Distributions` that refuse to be asked twice for a node."""

    tables: Tables
    tree: TokenTree

    def __post_init__(self) -> None:
        self.nodes: list[int] = []

    def probabilities(self, node: int) -> torch.Tensor:
        assert node not in self.nodes, f"node {node} was asked for twice"
        self.nodes.append(node)
        return self.tables[tuple(self.tree.path_tokens(node))]

    def choose(self, node: int) -> int:
        raise AssertionError("a p/q verifier draws its own tokens")

    def key(self, node: int, purpose: int) -> tuple[int, int]:
        return node, purpose


class Numbered(Asked):
    """The same, with numbers in place of dice."""

    def key(self, node: int, purpose: int) -> int:  # type: ignore[override]
        return noise.key(node, purpose)


def outcomes(verifier: Verifier, tree: TokenTree, tables: Tables) -> list[Outcome]:
    """Every way the dice can fall on one tree."""
    found, waiting = [], [list[bool]()]
    while waiting:
        told = waiting.pop()
        dice = Dice(told)
        with (
            mock.patch.object(noise, "uniform", dice.uniform),
            mock.patch.object(rejection, "draw", dice.draw),
            mock.patch.object(block, "draw", dice.draw),
            mock.patch.object(traversal, "draw", dice.draw),
        ):
            verdict = verifier(tree, Asked(tables, tree))  # type: ignore[arg-type]
        waiting.extend([*dice.decided[:i], False] for i in range(len(told), len(dice.decided)))
        assert dice.left is not None and len(verdict.tokens) == len(verdict.nodes) + 1
        found.append(Outcome(dice.probability, verdict.nodes, dice.left))
    return found


# -- all trees --------------------------------------------------------------------------------------------------------


def all_trees(drafts: Tables, shape: Shape) -> Iterator[tuple[float, TokenTree]]:
    """Every tree that can be drawn, with its probability; level by level, siblings without replacement."""

    def grow(made: list[tuple[int, int, Draw | None]], open_: list[tuple[int, Prefix]], probability: float) -> Grown:
        if not open_:
            tree = TokenTree(0)
            for parent, token, draw in made:
                tree.add(parent, token, draw=draw)
            yield probability, tree
            return
        (parent, path), *rest = open_
        count, chosen = shape(path)
        q = drafts[path].tolist() if count else []
        draw = None if chosen or not count else Draw(drafts[path])
        for tokens in picks(q, count, chosen):
            nodes = [(len(made) + 1 + i, (*path, token)) for i, token in enumerate(tokens)]
            likely = 1.0 if chosen else chance(q, tokens)
            new = [(parent, token, draw) for token in tokens]
            yield from grow([*made, *new], [*rest, *nodes], probability * likely)

    yield from grow([], [(0, ())], 1.0)


Grown = Iterator[tuple[float, TokenTree]]


def picks(q: list[float], count: int, chosen: bool) -> list[tuple[int, ...]]:
    possible = [token for token, probability in enumerate(q) if probability > 0]
    if chosen:
        return [tuple(sorted(possible, key=lambda token: -q[token])[:count])]
    return list(itertools.permutations(possible, min(count, len(possible))))


def chance(q: list[float], tokens: tuple[int, ...]) -> float:
    """The probability of drawing these, in this order, without replacement."""
    left, product = 1.0, 1.0
    for token in tokens[: max(1, sum(probability > 0 for probability in q) - 1)]:  # the last one left is certain
        product *= q[token] / left
        left -= q[token]
    return product


# -- what a step says -------------------------------------------------------------------------------------------------


def step_law(verifier: Verifier, target: Tables, drafts: Tables, shape: Shape, length: int) -> np.ndarray:
    """[vocabulary] * length: the probability of every text of a step that is continued by the target itself."""
    size = len(target[()])
    law = np.zeros((size,) * length)
    for likely, tree in all_trees(drafts, shape):
        for outcome in outcomes(verifier, tree, target):
            said = tuple(tree.tokens[node] for node in outcome.nodes)
            for own in range(size):
                weight = likely * outcome.probability * float(outcome.left[own])
                law[(*said, own)] += weight * continuation(target, (*said, own), length)
    return law


def continuation(target: Tables, said: Prefix, length: int) -> np.ndarray:
    """[vocabulary] * what is missing: how the target itself goes on."""
    if len(said) == length:
        return np.ones(())
    return np.stack([p * continuation(target, (*said, t), length) for t, p in enumerate(target[said].tolist())])


def mean_accepted(verifier: Verifier, target: Tables, drafts: Tables, shape: Shape) -> float:
    """The expected number of drafted tokens that are accepted in a step."""
    return sum(
        likely * outcome.probability * len(outcome.nodes)
        for likely, tree in all_trees(drafts, shape)
        for outcome in outcomes(verifier, tree, target)
    )


def small_tables(depth: int) -> st.SearchStrategy[Tables]:
    """Three tokens after every prefix of up to `depth`. Small whole numbers: zeros, ties and certainty are common."""
    prefixes = small_prefixes(depth)
    row = st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any)
    rows = st.lists(row, min_size=len(prefixes), max_size=len(prefixes))
    return rows.map(lambda listed: dict(zip(prefixes, (distribution(*weights) for weights in listed), strict=True)))


def random_tables(depth: int, seed: int) -> Tables:
    """The same, random and without zeros."""
    generator = np.random.default_rng(seed)
    return {prefix: distribution(*generator.gamma(0.8, size=3) + 0.02) for prefix in small_prefixes(depth)}


def small_prefixes(depth: int) -> list[Prefix]:
    return [prefix for length in range(depth + 1) for prefix in itertools.product(range(3), repeat=length)]


def distribution(*weights: float) -> torch.Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return values / values.sum()
