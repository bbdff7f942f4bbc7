"""Emits tokens and finds where a sequence ends: EOS, stop tokens, stop strings, length."""

from __future__ import annotations

import time

from slipstream.policy.report import Progress, Round
from slipstream.sequence import Sequence
from slipstream.types import Stats


def emit(progress: Progress) -> None:
    """Emit the tokens of a sequence's rounds up to its end, and count them."""
    sequence, rounds = progress.sequence, progress.rounds
    progress.rounds = []
    stats, before = sequence.stats, sequence.stats.emitted
    if sequence.first_token_at is None:
        sequence.first_token_at = time.perf_counter()
        stats.prefill_ms = 1000 * (sequence.first_token_at - sequence.arrived)
    first = stats.steps == 0  # its time counts as prefill
    try:
        if emits_each(sequence):
            for item in rounds:
                _emit_each(sequence, item)
                if sequence.finished:
                    break
        else:
            _emit_all(sequence, rounds)
    finally:  # tokens emitted before an error are delivered
        count = stats.emitted - before
        progress.new_tokens += count
    now = sequence.first_token_at
    if not first:
        now = time.perf_counter()
        stats.decoded += count
        stats.decode_ms = 1000 * (now - sequence.first_token_at)
    if count:
        sequence.chunks.append((now, count))


def emits_each(sequence: Sequence) -> bool:
    """Whether tokens are emitted one by one: needed for stop strings, logprobs and `min_tokens`."""
    params = sequence.params
    return params.logprobs is not None or sequence.stops is not None or params.min_tokens > 0


def _emit_each(sequence: Sequence, item: Round) -> None:
    """Emit token by token."""
    parents = [0, *item.nodes]
    accepted = 0
    for index, token in enumerate(item.tokens):
        sequence.tokens.append(token)
        sequence.output_ids.append(token)
        sequence.stats.emitted += 1
        drafted = index < len(item.tokens) - 1
        accepted += drafted
        sequence.stats.origins.append(item.origins[index] if drafted else None)
        if sequence.params.logprobs is not None:
            assert item.target is not None
            top = sequence.params.logprobs
            sequence.logprobs.append(item.target.logprobs(parents[index], token, top, sequence.spell))
        _end(sequence, token)
        if sequence.finished:
            break
    _count(sequence.stats, item, accepted)


def _emit_all(sequence: Sequence, rounds: list[Round]) -> None:
    """Emit all tokens together, where only end tokens and the length can end the sequence. Much cheaper per token."""
    stats, room, ends = sequence.stats, sequence.remaining, ends_of(sequence)
    given: list[int] = []
    ended = False
    for item in rounds:
        fresh, ended = _up_to_end(item.tokens[: room - len(given)], ends)
        if item.steps > 1:
            stats.steps += len(fresh)
            stats.origins += [None] * len(fresh)
        else:
            accepted = min(len(fresh), len(item.tokens) - 1)
            stats.origins += [*item.origins[:accepted], *[None] * (len(fresh) - accepted)]
            _count(stats, item, accepted)
        given += fresh
        if ended or len(given) == room:
            break
    stats.emitted += len(given)
    sequence.tokens += given
    sequence.output_ids += given
    if ended:
        _append_text(sequence, given[:-1], last=False)
        _end(sequence, given[-1])
        return
    _append_text(sequence, given, last=False)
    if len(given) == room:
        sequence.finish_reason = "length"
        _append_text(sequence, [], last=True)


def ends_of(sequence: Sequence) -> frozenset[int]:
    """Tokens that end a sequence wherever they occur."""
    return sequence.end_ids.union(sequence.params.stop_token_ids or ())


class Lookout:
    """Looks for stop strings in tokens that are not emitted yet: rounds that follow one need not run."""

    def __init__(self, sequence: Sequence) -> None:
        assert sequence.decoder is not None and sequence.stops is not None
        self._decoder, self._stops = sequence.decoder.copy(), sequence.stops.copy()
        self._short = sequence.params.min_tokens - len(sequence.output_ids)  # tokens before a stop may count

    def stops_at(self, tokens: list[int]) -> bool:
        """Whether these tokens, the next ones, complete a stop string."""
        for token in tokens:
            self._short -= 1
            text = self._decoder.push([token])
            if self._short <= 0 and self._stops.push(text)[1] is not None:
                return True
        return False


def _up_to_end(tokens: list[int], ends: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to and including the first end token, and whether there is one."""
    if ends.isdisjoint(tokens):
        return tokens, False
    return tokens[: 1 + next(i for i, token in enumerate(tokens) if token in ends)], True


def _end(sequence: Sequence, token: int) -> None:
    """Set the finish reason if `token`, just appended, is the last one."""
    params = sequence.params
    long_enough = len(sequence.output_ids) >= params.min_tokens
    if long_enough and (token in sequence.end_ids or token in (params.stop_token_ids or ())):
        sequence.finish_reason = "stop"
        sequence.stop_reason = token if token not in sequence.end_ids else None
        _append_text(sequence, [token] if params.include_stop_str_in_output else [], last=True)
        return
    _append_text(sequence, [token], last=False, stoppable=long_enough)
    if not sequence.finished and sequence.remaining <= 0:
        sequence.finish_reason = "length"
        _append_text(sequence, [], last=True)


def _append_text(sequence: Sequence, tokens: list[int], *, last: bool, stoppable: bool = True) -> None:
    """Decode tokens to text; a stop string ends the sequence and is cut from the text."""
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


def _count(stats: Stats, item: Round, accepted: int) -> None:
    """Count a step that offered a tree, `accepted` nodes of which were accepted and emitted."""
    stats.steps += 1
    stats.accepted += accepted
    if not item.drafted:
        return
    stats.drafting_steps += 1
    stats.drafted += item.drafted
    for drafter in item.offered:
        if drafter is not None:
            stats.drafted_by[drafter] = stats.drafted_by.get(drafter, 0) + 1
    for counts, reached in ((stats.offered_by_depth, item.deepest), (stats.accepted_by_depth, accepted)):
        counts.extend([0] * (item.deepest - len(counts)))
        for depth in range(reached):
            counts[depth] += 1
