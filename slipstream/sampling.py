"""The only place where logits become a distribution.

Order (vLLM's): allowed tokens and bad words, minimum length and bias, penalties, temperature, min-p, top-k, top-p.
Everything is a function of one row of logits and of the tokens on the path to it, so it applies at any node of a tree,
and it is computed only for the nodes that a verifier visits. Ties are broken by token id, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from slipstream import noise
from slipstream.errors import OptionError
from slipstream.gumbel_max import drawn
from slipstream.tree import TokenTree
from slipstream.types import Logprob, Logprobs, SamplingParams

if TYPE_CHECKING:
    from slipstream.grammar import Constraint

Spell = Callable[[int], str | None]  # the text of a token

# Weights of tokens are fixed-point numbers, so that a sum of them has no order: the same on every device, however it is
# split. The likeliest token weighs 2**WEIGHT_BITS; 2**19 tokens of that weight still fit into 64 bits.
WEIGHT_BITS = 44
_NEAR, _FURTHER = 4.0, 2.0  # top-p looks for a nucleus among tokens whose logits are so close to the best, then further


@dataclass(frozen=True)
class Support:
    """The tokens that may be chosen: ids in ascending order (None: the whole vocabulary) and their scaled logits."""

    ids: torch.Tensor | None
    logits: torch.Tensor

    def token(self, index: int) -> int:
        """The token id at an index of `logits`."""
        return index if self.ids is None else int(self.ids[index])


def scale_logits(rows: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Logits divided by temperatures, float32.

    The divisor is a tensor on purpose: on a GPU, dividing by a Python number multiplies by its reciprocal, which gives
    other bits than dividing many rows by one temperature each.
    """
    return rows.float() / temperature


def token_weights(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """exp(score - best) in fixed point, int64: the unnormalised probabilities of tokens whose best score is `best`."""
    return torch.exp(scores.double() - best.double()).mul_(2.0**WEIGHT_BITS).long()


def log_total(weights: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of exp(score) by the sum of all weights, float64."""
    return best.double() + torch.log(weights.double() * 2.0**-WEIGHT_BITS)


def largest(row: torch.Tensor) -> int:
    """The index of the largest number of [n]; of equals, the first."""
    # numpy's argmax is 20 times as fast as torch's on a CPU: 4 against 90 us for 49,152 tokens.
    in_numpy = row.device.type == "cpu" and row.dtype in (torch.float32, torch.float64)
    return int(row.numpy().argmax() if in_numpy else row.argmax())


class BadWords:
    """Forbidden token sequences. There may be thousands: each length costs one look-up."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.words = [tuple(word) for word in words]
        self._last: dict[
            int, dict[tuple[int, ...], list[int]]
        ] = {}  # length of the prefix -> prefix -> forbidden next tokens
        for *before, last in self.words:
            self._last.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)

    def completing(self, output: Sequence[int], path: Sequence[int]) -> list[int]:
        """The tokens that would complete a forbidden sequence after the output and the path below the root."""
        longest = max(self._last, default=0)
        before = (*output[max(0, len(output) - longest) :], *path)
        found = (self._last[length].get(before[max(0, len(before) - length) :], ()) for length in self._last)
        return [last for group in found for last in group]


def _has_choice(row: torch.Tensor) -> bool:
    """Whether any token may be chosen. NaN is reported elsewhere."""
    return float(row[largest(row)]) != float("-inf")


class Sampler:
    """How one choice of one request picks tokens. It has no state of its own: it reads the sequence's live lists."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        end_ids: Sequence[int],
        bad_words: BadWords | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.constraint = constraint
        # The same sampler without its grammar: it chooses, and the grammar checks the choice afterwards.
        self.free = self
        if constraint is not None:
            self.free = Sampler(params, seed, choice, prompt_ids, output_ids, end_ids, bad_words)
        self.params = params
        self.seed = seed
        self.choice = choice
        self._prompt = prompt_ids
        self._output = output_ids
        self.masked_ids = sorted({*end_ids, *(params.stop_token_ids or ())})  # before `min_tokens`
        self._masked_ids = torch.tensor(self.masked_ids, dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.bias.values()), dtype=torch.float32)
        allowed = params.allowed_token_ids
        self._allowed_ids = None if allowed is None else torch.tensor(sorted(set(allowed)), dtype=torch.int64)
        self.bad_words = bad_words
        self._prompt_unique: torch.Tensor | None = None

    # -- from a row of logits to the tokens that may be chosen --------------------------------------------------------

    def adjusted(self, row: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] after masks, minimum length, bias and penalties; `path` holds the tokens below the root.

        If all allowed tokens are -inf in the row (a draft's vocabulary is smaller), they get the same logit.
        """
        changed = self._changed(self.masked(row, path), path)
        if (self.params.masks or self.constraint is not None) and not _has_choice(changed):
            changed = self._changed(self.masked(torch.zeros_like(row), path), path)
            if not _has_choice(changed):
                those = "allowed_token_ids, bad_words, logit_bias and min_tokens together forbid every token"
                raise OptionError(those if self.constraint is None else f"structured_outputs, {those}")
        return changed

    def masked(self, row: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] without the tokens that the grammar forbids after `path`."""
        forbidden = None if self.constraint is None else self.constraint.forbidden(path)
        if forbidden is None:
            return row
        return row.masked_fill(torch.from_numpy(forbidden).to(row.device), float("-inf"))

    def _changed(self, row: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        params = self.params
        bad = self.bad_words.completing(self._output, path) if self.bad_words is not None else []
        short = len(self._output) + len(path) < params.min_tokens and len(self._masked_ids) > 0
        if not (short or bad or params.bias or params.penalised or self._allowed_ids is not None):
            return row
        row = row.float().clone()
        device = row.device
        if self._allowed_ids is not None:
            allowed = self._allowed_ids.to(device)
            row = torch.full_like(row, float("-inf")).index_copy_(0, allowed, row[allowed])
        if bad:
            row[torch.tensor(bad, device=device)] = float("-inf")
        if short:
            row[self._masked_ids.to(device)] = float("-inf")
        if params.bias:
            row[self._bias_ids.to(device)] += self._bias.to(device)
        if params.penalised:
            self._penalise(row, path)
        return row

    def _penalise(self, row: torch.Tensor, path: Sequence[int]) -> None:
        params = self.params
        output = torch.tensor([*self._output, *path], dtype=torch.int64, device=row.device)
        if params.repetition_penalty != 1.0:
            seen = torch.cat([self._prompt_ids_once().to(row.device), output]).unique()
            values = row[seen]
            penalty = row.new_full((), params.repetition_penalty)  # a tensor: see `scale_logits`
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if len(output) and (params.presence_penalty or params.frequency_penalty):
            ids, counts = output.unique(return_counts=True)
            row[ids] -= params.frequency_penalty * counts.to(row.dtype) + params.presence_penalty

    def _prompt_ids_once(self) -> torch.Tensor:
        if self._prompt_unique is None:
            self._prompt_unique = torch.tensor(sorted(set(self._prompt)), dtype=torch.int64)
        return self._prompt_unique

    def take_over(self, other: Sampler) -> None:
        """Reuse what another sampler of the same prompt has computed."""
        if self.params.repetition_penalty != 1.0:
            self._prompt_unique = other._prompt_ids_once()

    def support(self, row: torch.Tensor, path: Sequence[int]) -> Support:
        """The tokens that temperature, min-p, top-k and top-p leave. Greedy leaves one."""
        params = self.params
        row = self.adjusted(row, path)
        if params.greedy:
            best = torch.tensor([largest(row)], device=row.device)
            return Support(best, row[best])
        scaled = scale_logits(row, row.new_full((), params.temperature, dtype=torch.float32))
        ids = self.cut(scaled)
        return Support(ids, scaled if ids is None else scaled[ids])

    def cut(self, scaled: torch.Tensor) -> torch.Tensor | None:
        """The indices that min-p, top-k and top-p leave of a row of scaled logits, ascending; None: all."""
        params = self.params
        ids: torch.Tensor | None = None
        if params.min_p > 0:
            threshold = scaled.max() + torch.log(torch.tensor(params.min_p, dtype=torch.float32))
            ids = (scaled >= threshold).nonzero()[:, 0]
            scaled = scaled[ids]
        for limit in (self._top_k, self._top_p):
            kept = limit(scaled)
            if kept is not None:
                ids = kept if ids is None else ids[kept]
                scaled = scaled[kept]
        return ids

    def _top_k(self, scaled: torch.Tensor) -> torch.Tensor | None:
        count = self.params.top_k
        if count == 0 or count >= len(scaled):
            return None
        threshold = torch.topk(scaled, count).values[-1]
        above = (scaled > threshold).nonzero()[:, 0]
        equal = (scaled == threshold).nonzero()[:, 0][: count - len(above)]
        return torch.cat([above, equal]).sort().values

    def _top_p(self, scaled: torch.Tensor) -> torch.Tensor | None:
        """The likeliest tokens that have the share `top_p` of the weight: of all whose predecessors have less."""
        if self.params.top_p >= 1.0:
            return None
        best = scaled.max()
        weights = token_weights(scaled, best)
        needed = math.ceil(self.params.top_p * float(weights.sum()))
        near = _NEAR
        while True:
            ids = (scaled >= best - near).nonzero()[:, 0]  # ascending, so that a stable sort breaks ties by id
            if near > WEIGHT_BITS or int(weights[ids].sum()) >= needed:  # tokens that are further away weigh nothing
                break
            near += _FURTHER
        ids = ids[scaled[ids].sort(descending=True, stable=True).indices]
        sums = weights[ids].cumsum(0)
        return ids[: 1 + int((sums < needed).sum())].sort().values

    # -- for verifiers and drafters -----------------------------------------------------------------------------------

    def choose(self, row: torch.Tensor, path: Sequence[int]) -> int:
        """The target's choice after `path`: the same for every caller, at any time."""
        if self.constraint is not None:
            if not self.params.cuts and self.stands(path, best := self.free.choose(row, path)):
                return best
            row = self.masked(row, path)
        if self.params.greedy:
            return largest(self.adjusted(row, path))
        if self.simple and (token := drawn(row, self.params.temperature, self.noise_key(path))) is not None:
            return token
        support = self.support(row, path)
        if support.logits.numel() == 1:
            return support.token(0)
        index = drawn(support.logits, 1.0, self.noise_key(path), support.ids)
        return support.token(largest(self.perturbed(support, path)) if index is None else index)

    def stands(self, path: Sequence[int], token: int) -> bool:
        """Whether `token`, chosen without the grammar, is the choice. If the grammar allows the best of all tokens,
        that is the best of the allowed ones. Not so where top-k, top-p or min-p cut: there the mask is applied first.
        """
        return self.constraint is None or (not self.params.cuts and self.constraint.allows(path, token))

    def perturbed(self, support: Support, path: Sequence[int]) -> torch.Tensor:
        """Scaled logits plus the noise of this position: the largest is the choice. Drafters use the same noise."""
        ids = support.ids if support.ids is not None else len(support.logits)
        return support.logits.double() + noise.gumbel(self.noise_key(path), ids, str(support.logits.device))

    def noise_key(self, path: Sequence[int]) -> int:
        """Key of the noise by which the token after `path` is chosen."""
        return noise.key(self.position + len(path), noise.MATCH, start=self.stem)

    def probabilities(self, row: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """The distribution after `path` over the whole vocabulary, float64."""
        support = self.support(row, path)
        weights = torch.softmax(support.logits.double(), dim=0)
        if support.ids is None:
            return weights
        return torch.zeros(len(row), dtype=torch.float64, device=row.device).index_copy_(0, support.ids, weights)

    @cached_property
    def stem(self) -> int:
        """The common prefix of the noise keys of all of the sampler's choices."""
        return noise.key(self.seed, self.choice)

    @cached_property
    def simple(self) -> bool:
        """Whether a choice needs only the logits, the temperature and the noise."""
        return not (self.params.adjusts or self.params.cuts)

    @property
    def forbids(self) -> bool:
        """Whether parameters forbid some tokens, always or at times: lists, a bias of -inf, `min_tokens`."""
        params = self.params
        return params.masks or params.min_tokens > 0 or float("-inf") in params.bias.values()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt)

    @property
    def position(self) -> int:
        """Absolute position of the token after the root."""
        return len(self._prompt) + len(self._output)

    def step_key(self, node: int, purpose: int) -> int:
        """Key of a p/q verifier's number in this step. `draft`, `accept` and `residual` have separate streams."""
        return noise.key(self.seed, self.choice, self.position, node, purpose)


class TreeDistributions:
    """The target's distributions at the nodes of one tree, computed lazily.

    `chosen`: the target's choices after all nodes, if they were made together (`gpu/device_sampling.py`).
    """

    def __init__(
        self, sampler: Sampler, tree: TokenTree, rows: torch.Tensor, chosen: Sequence[int] | None = None
    ) -> None:
        self._sampler = sampler
        self._tree = tree
        self._rows = rows  # [nodes, vocab]
        self._chosen = chosen

    def choose(self, node: int) -> int:
        """The target's choice after `node`."""
        path = self._tree.path_tokens(node)
        if self._chosen is not None and self._sampler.stands(path, self._chosen[node]):
            return self._chosen[node]
        return self._sampler.choose(self._rows[node], path)

    def probabilities(self, node: int) -> torch.Tensor:
        """The target's distribution after `node`, float64 over the whole vocabulary."""
        return self._sampler.probabilities(self._rows[node], self._tree.path_tokens(node))

    def key(self, node: int, purpose: int) -> int:
        """Key of the random number of `node` in this step."""
        return self._sampler.step_key(node, purpose)

    def logprobs(self, node: int, token: int, top: int, spell: Spell | None = None) -> Logprobs:
        """Log-probabilities of `token` and of the `top` likeliest tokens after `node`, of the raw distribution."""
        return logprobs(self._rows[node], token, top, spell)


def logprobs(row: torch.Tensor, token: int, top: int, spell: Spell | None = None) -> Logprobs:
    """Log-probabilities of `token` and of the `top` likeliest tokens by one row of raw logits [vocab].

    `token` comes first, with its exact rank; the others follow, the likeliest first. Ties break by token id.
    """
    row = row.float()
    best = row.max()
    whole = log_total(token_weights(row, best).sum(), best)
    above = int((row > row[token]).sum() + (row[:token] == row[token]).sum())
    ranks = {token: 1 + above, **{id: rank for rank, id in enumerate(top_tokens(row, top), 1)}}
    ids = list(ranks)
    values = (row[torch.tensor(ids, device=row.device)].double() - whole).float().tolist()
    return {id: Logprob(value, ranks[id], spell(id) if spell else None) for id, value in zip(ids, values, strict=True)}


def top_tokens(row: torch.Tensor, count: int) -> list[int]:
    """The indices of the `count` largest numbers of [n] in order; of equals, the first."""
    if count <= 0:
        return []
    values = torch.topk(row, min(count, len(row))).values
    found = (row >= values[-1]).nonzero()[:, 0]  # ascending, so that a stable sort breaks ties by id
    order = row[found].sort(descending=True, stable=True).indices[:count]
    return [int(id) for id in found[order].tolist()]
