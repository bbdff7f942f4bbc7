"""Where an answer ends: EOS, stop tokens, stop strings, length. Token by token, in the order the user sees them."""

from __future__ import annotations

import time
from typing import NamedTuple

from slipstream.sampling import TreeDistributions
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Stats
from slipstream.verify import Verdict


def emit(sequence: Sequence, tree: TokenTree, verdict: Verdict, distributions: TreeDistributions) -> int:
    """Give the accepted tokens to the sequence until one of them ends it; returns how many it took."""
    if sequence.first_token_at is None:
        sequence.first_token_at = time.perf_counter()
        sequence.stats.prefill_ms = 1000 * (sequence.first_token_at - sequence.arrived)
    parents = [0, *verdict.nodes]
    for index, token in enumerate(verdict.tokens):
        accepted = index < len(verdict.nodes)
        sequence.tokens.append(token)
        sequence.output_ids.append(token)
        sequence.stats.emitted += 1
        sequence.stats.accepted += accepted
        sequence.stats.origins.append(tree.origins[verdict.nodes[index]] if accepted else None)
        if sequence.params.logprobs is not None:
            top = sequence.params.logprobs
            sequence.logprobs.append(distributions.logprob(parents[index], token, top))
        _end(sequence, token)
        if sequence.finished:
            break
    count = index + 1
    if sequence.stats.steps:  # the first step's time belongs to the prompt
        sequence.stats.decoded += count
        sequence.stats.decode_ms = 1000 * (time.perf_counter() - sequence.first_token_at)
    deepest = max(d for d, scout in zip(tree.depths, tree.scouts, strict=True) if not scout)
    _count(sequence.stats, tree.drafted, deepest, min(count, len(verdict.nodes)))
    return count


class Taken(NamedTuple):
    """What one round on the device gave a sequence: the accepted path and the target's own token behind it."""

    tokens: list[int]
    drafted: int  # nodes that were offered
    deepest: int  # levels of the tree


def emit_rounds(sequence: Sequence, rounds: list[Taken], origin: str) -> int:
    """The same for what rounds gave one after the other; returns how many tokens the sequence took.

    It has emitted before, and has neither a minimum length, stop strings nor logprobs: many tokens at once cost little
    more than one. `origin`: the drafter of accepted tokens.
    """
    stats, room, ends = sequence.stats, sequence.remaining, ends_of(sequence)
    given: list[int] = []
    ended = False
    for tokens, drafted, deepest in rounds:
        fresh, ended = _up_to_end(tokens[: room - len(given)], ends)
        accepted = min(len(fresh), len(tokens) - 1)
        stats.origins += [origin] * accepted + [None] * (len(fresh) - accepted)
        _count(stats, drafted, deepest, accepted)
        stats.accepted += accepted
        given += fresh
        if ended or len(given) == room:
            break
    return _give(sequence, given, ended)


def emit_plain(sequence: Sequence, tokens: list[int]) -> int:
    """The same for rounds without trees, a token each: in one go, since batches are the largest here."""
    given, ended = _up_to_end(tokens[: sequence.remaining], ends_of(sequence))
    sequence.stats.steps += len(given)
    sequence.stats.origins += [None] * len(given)
    return _give(sequence, given, ended)


def ends_of(sequence: Sequence) -> frozenset[int]:
    """Tokens that end an answer, wherever they stand in it."""
    return sequence.end_ids.union(sequence.params.stop_token_ids or ())


def _up_to_end(tokens: list[int], ends: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to the first that ends an answer, and whether there is one."""
    if ends.isdisjoint(tokens):
        return tokens, False
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in ends)], True


def _give(sequence: Sequence, given: list[int], ended: bool) -> int:
    """Append the tokens of rounds, of which the last one ends the answer or not; returns how many they are."""
    stats, room = sequence.stats, sequence.remaining
    stats.emitted += len(given)
    stats.decoded += len(given)
    sequence.tokens += given
    sequence.output_ids += given
    _say(sequence, given[:-1] if ended else given, last=False)
    if ended:
        _end(sequence, given[-1])
    elif len(given) == room:
        sequence.finish_reason = "length"
        _say(sequence, [], last=True)
    if sequence.first_token_at is not None:
        stats.decode_ms = 1000 * (time.perf_counter() - sequence.first_token_at)
    return len(given)


def _end(sequence: Sequence, token: int) -> None:
    """Set the finish reason if `token`, just appended, is the last."""
    params = sequence.params
    long_enough = len(sequence.output_ids) >= params.min_tokens
    if long_enough and (token in sequence.end_ids or token in (params.stop_token_ids or ())):
        sequence.finish_reason = "stop"
        sequence.stop_reason = token if token not in sequence.end_ids else None
        _say(sequence, [], last=True)
        return
    _say(sequence, [token], last=False, stoppable=long_enough)
    if not sequence.finished and sequence.remaining <= 0:
        sequence.finish_reason = "length"
        _say(sequence, [], last=True)


def _say(sequence: Sequence, tokens: list[int], *, last: bool, stoppable: bool = True) -> None:
    """Turn tokens into text; a stop string ends the sequence and is not part of the text."""
    if sequence.decoder is None:
        return
    text = sequence.decoder.push(tokens)
    if last:
        text += sequence.decoder.flush()
    if sequence.stops is None or not stoppable:
        sequence.text += text
        return
    safe, matched = sequence.stops.push(text)
    sequence.text += safe
    if matched is not None:
        if not last:
            sequence.finish_reason = "stop"
        sequence.stop_reason = matched
    elif last:
        sequence.text += sequence.stops.flush()


def _count(stats: Stats, drafted: int, deepest: int, accepted: int) -> None:
    """A step that offered so many nodes on so many levels, and of which so many were taken."""
    stats.steps += 1
    if not drafted:
        return
    stats.drafting_steps += 1
    stats.drafted += drafted
    for counts, reached in ((stats.offered_by_depth, deepest), (stats.accepted_by_depth, accepted)):
        counts.extend([0] * (deepest - len(counts)))
        for depth in range(reached):
            counts[depth] += 1
