"""Table "models": a distribution over a handful of tokens for every prefix, drafters over them, and the decoding loop.

Each sample is decoded step by step as the engine does it (draft, verify, append, again) under a seed of its own, so
that drafting, acceptance, residuals, siblings, bonus tokens and the seams between steps are all in the joint
distribution.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats

from slipstream import noise
from slipstream.tree import Draw, TokenTree
from slipstream.verify import Verdict, Verifier

VOCABULARY = 5
POSITIONS = 3  # of the joint distribution
LONGEST = 4  # tables know what follows prefixes up to this long
PROMPT = 7  # tokens before the first one emitted
ROOT_TOKEN = 0
SAMPLES = 6_000  # twice as many as are enough to find every fault of tests/verify/test_verify_mutations.py

Prefix = tuple[int, ...]
Tables = dict[Prefix, torch.Tensor]  # prefix -> float64 [VOCABULARY]
PREFIXES = [p for length in range(LONGEST + 1) for p in itertools.product(range(VOCABULARY), repeat=length)]


# -- tables -----------------------------------------------------------------------------------------------------------


def target_tables(seed: int, zeros: float = 0.2) -> Tables:
    """A random distribution after every prefix; a share of the probabilities is 0, but two of five never are."""
    generator = np.random.default_rng(seed)
    tables = {}
    for prefix in PREFIXES:
        weights = generator.gamma(0.8, size=VOCABULARY) + 0.02
        absent = generator.random(VOCABULARY) < zeros
        absent[generator.choice(VOCABULARY, 2, replace=False)] = False
        weights[absent] = 0.0
        tables[prefix] = torch.from_numpy(weights / weights.sum())
    return tables


def draft_tables(target: Tables, quality: str, seed: int) -> Tables:
    """Drafts as good as they get (`equal`), near the target, unrelated to it, or made to hurt."""
    if quality == "equal":
        return target
    other = target_tables(seed)
    if quality == "bad":
        return other
    if quality == "good":
        return {prefix: 0.8 * p + 0.2 * other[prefix] for prefix, p in target.items()}
    drafts = {}
    for prefix, p in target.items():  # nothing on the target's favourite, most on what it never says
        weights = 0.1 + other[prefix] + 3.0 * (p == 0)
        weights[int(p.argmax())] = 0.0
        drafts[prefix] = weights / weights.sum()
    return drafts


def exact_joint(target: Tables) -> np.ndarray:
    """[VOCABULARY ** POSITIONS]: the probability of every answer, in the order of itertools.product."""
    answers = itertools.product(range(VOCABULARY), repeat=POSITIONS)
    return np.array([np.prod([float(target[a[:i]][a[i]]) for i in range(POSITIONS)]) for a in answers])


# -- random numbers, for all samples at once --------------------------------------------------------------------------


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def keys(seeds: np.ndarray, *parts: int) -> np.ndarray:
    """`noise.key(seed, *parts)` of many seeds below 2**32."""
    zero = np.zeros_like(seeds)
    low, high = zero + 0x243F6A88, zero + 0x85A308D3
    for word in (seeds, zero, *(zero + word for part in parts for word in (part, 0))):
        low = mixed((low ^ word) + 0x9E3779B9 & 0xFFFFFFFF)
        high = mixed(high + word + low & 0xFFFFFFFF)
    return high << 32 | low


def gumbels(many: np.ndarray) -> np.ndarray:
    """`noise.gumbel(key, VOCABULARY)` of many keys."""
    low, high = (many & 0xFFFFFFFF)[:, None], (many >> 32)[:, None]
    bits = mixed(mixed(np.arange(VOCABULARY, dtype=np.uint64) ^ low) + high & 0xFFFFFFFF)
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**32))


class Randomness:
    """Keys and Gumbel noise of every (position, node), made for all seeds in one go: one by one takes minutes."""

    def __init__(self, first_seed: int, samples: int) -> None:
        self._seeds = np.arange(first_seed, first_seed + samples, dtype=np.uint64)
        self._keys: dict[tuple[int, int, int], list[int]] = {}
        self._noise: dict[tuple[int, ...], list[list[float]]] = {}

    def key(self, sample: int, position: int, node: int, purpose: int) -> int:
        place = (position, node, purpose)
        if place not in self._keys:
            self._keys[place] = keys(self._seeds, 0, *place).tolist()
        return self._keys[place][sample]

    def gumbel(self, sample: int, *parts: int) -> list[float]:
        if parts not in self._noise:
            self._noise[parts] = gumbels(keys(self._seeds, 0, *parts)).tolist()
        return self._noise[parts][sample]


# -- decoding by tables -----------------------------------------------------------------------------------------------


@dataclass
class TableTarget:
    """`Distributions` at the nodes of one tree."""

    tables: Tables
    tree: TokenTree
    prefix: Prefix
    random: Randomness
    sample: int

    def _path(self, node: int) -> Prefix:
        return (*self.prefix, *self.tree.path_tokens(node))

    def probabilities(self, node: int) -> torch.Tensor:
        return self.tables[self._path(node)]

    def choose(self, node: int) -> int:
        path = self._path(node)
        gumbel = self.random.gumbel(self.sample, PROMPT + len(path), noise.MATCH)
        return int(np.argmax(np.log(np.maximum(self.tables[path].numpy(), 1e-300)) + gumbel))

    def key(self, node: int, purpose: int) -> int:
        return self.random.key(self.sample, PROMPT + len(self.prefix), node, purpose)


@dataclass
class TableDrafter:
    """Draws trees as `draft_model` does: level by level, Gumbel-top-k per parent. `chosen`: the top-k, without q."""

    tables: Tables
    depth: int
    branch: int = 1
    nodes: int = 7
    chosen: bool = False
    known: dict[Prefix, tuple[Draw, list[float], list[int]]] = field(default_factory=dict)

    def _row(self, prefix: Prefix) -> tuple[Draw, list[float], list[int]]:
        if prefix not in self.known:
            q = self.tables[prefix]
            self.known[prefix] = Draw(q), q.log().tolist(), q.nonzero()[:, 0].tolist()
        return self.known[prefix]

    def tree(self, prefix: Prefix, random: Randomness, sample: int) -> TokenTree:
        tree = TokenTree(prefix[-1] if prefix else ROOT_TOKEN)
        level = [(0, prefix)]
        for _ in range(min(self.depth, LONGEST - len(prefix))):
            following = []
            for parent, path in level:
                draw, logs, ids = self._row(path)
                scores = logs
                if not self.chosen:
                    gumbel = random.gumbel(sample, PROMPT + len(prefix), parent, noise.DRAFT)
                    scores = [a + b for a, b in zip(logs, gumbel, strict=True)]
                count = min(self.branch, self.nodes + 1 - len(tree))
                for token in sorted(ids, key=scores.__getitem__, reverse=True)[:count]:
                    node = tree.add(parent, token, draw=None if self.chosen else draw)
                    following.append((node, (*path, token)))
            level = following
        return tree


Observer = Callable[[Prefix, TokenTree, Verdict], None]


def decode(
    verifier: Verifier,
    target: Tables,
    drafter: TableDrafter,
    seed: int,
    samples: int = SAMPLES,
    see: Observer | None = None,
) -> list[Prefix]:
    """Answers of POSITIONS tokens, one per seed."""
    random = Randomness(seed, samples)
    answers = []
    for sample in range(samples):
        emitted: Prefix = ()
        while len(emitted) < POSITIONS:
            tree = drafter.tree(emitted, random, sample)
            verdict = verifier(tree, TableTarget(target, tree, emitted, random, sample))
            if see is not None:
                see(emitted, tree, verdict)
            emitted = (*emitted, *verdict.tokens)
        answers.append(emitted[:POSITIONS])
    return answers


def p_value(answers: Iterable[Prefix], exact: np.ndarray) -> float:
    """Chi-square of the answers; cells of expectation under 5 are merged. An impossible answer gives 0."""
    seen = Counter(answers)
    counts = np.array([seen[a] for a in itertools.product(range(VOCABULARY), repeat=POSITIONS)], dtype=float)
    expected = exact * counts.sum()
    if counts[exact == 0].any():
        return 0.0
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    cells: list[list[float]] = [[0.0, 0.0]]
    for index in order:  # ascending, so the small ones fill up the first cells together
        if cells[-1][1] >= 5.0:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts[index]
        cells[-1][1] += expected[index]
    table = np.array(cells)
    if table[-1, 1] < 5.0:
        table = np.vstack([table[:-2], table[-2:].sum(0)])
    statistic = float(((table[:, 0] - table[:, 1]) ** 2 / table[:, 1]).sum())
    return float(stats.chi2.sf(statistic, len(table) - 1))
