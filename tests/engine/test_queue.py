"""The queue: limits, priorities, deadlines; and readers that fall behind."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.engine.mailbox import Mailbox, Message, Unread
from slipstream.errors import DeadlineExceeded, QueueFull
from slipstream.types import Delta
from tests.tiny import plain_answers, tiny_llm

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def ends(outbox: Mailbox, count: int) -> list[Message]:
    """The last messages of so many requests."""
    found: list[Message] = []
    while len(found) < count:
        message = outbox.get()
        if message.delta is None:
            found.append(message)
    return found


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    llm, outbox = tiny_llm(characters=True), Mailbox()
    loop = llm._loop
    tickets = loop.submit([llm._request([1, 2, 3], LONG) for _ in range(3)], outbox, limit=3)
    with pytest.raises(QueueFull) as refused:
        loop.submit([llm._request([1, 2, 3], SHORT)], outbox, limit=3)
    assert 1 <= refused.value.retry_after <= 60 and loop.under_way == 3
    loop.cancel(tickets[0])
    loop.submit([llm._request([1, 2, 3], SHORT)], outbox, limit=3)
    ends(outbox, 3)
    assert loop.under_way == 0


def test_lower_priorities_run_first_and_equal_ones_in_order_of_arrival() -> None:
    llm, outbox = tiny_llm(characters=True, max_num_seqs=1), Mailbox()
    order = [5, 0, 5, -1, 0, 7]
    requests = [llm._request([1, 2, number + 3], SHORT, priority=p) for number, p in enumerate(order)]
    tickets = llm._loop.submit(requests, outbox)
    said = [tickets.index(message.ticket) for message in ends(outbox, len(order))]
    assert said == sorted(range(len(order)), key=lambda number: (order[number], number))


def test_the_lowest_priority_is_preempted_first() -> None:
    prompts = [[7 + i] * 100 for i in range(4)]
    how = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    llm, outbox = tiny_llm(characters=True, max_model_len=256, cache_tokens=512), Mailbox()
    preempted: list[int] = []
    inner = llm.engine.scheduler._preempt

    def noted(sequence: Any) -> None:
        preempted.append(sequence.request.priority)
        inner(sequence)

    llm.engine.scheduler._preempt = noted  # type: ignore[method-assign]
    priorities = [1, 9, 0, 3]
    requests = [llm._request(prompt, how, priority=p) for prompt, p in zip(prompts, priorities, strict=True)]
    tickets = llm._loop.submit(requests, outbox)
    said = {message.ticket: message for message in ends(outbox, 4)}
    assert preempted and 0 not in preempted and preempted[0] == max(preempted)
    wanted = plain_answers(prompts, how, characters=True)
    for ticket, output in zip(tickets, wanted, strict=True):
        completions = said[ticket].completions
        assert completions is not None and completions[0].token_ids == output.token_ids


def test_a_request_that_is_late_ends_whether_it_runs_or_waits() -> None:
    llm, outbox = tiny_llm(characters=True, max_num_seqs=1), Mailbox()
    soon = time.perf_counter() + 0.05
    requests = [llm._request([1, 2, 3], LONG, deadline=soon) for _ in range(3)]
    begun = time.perf_counter()
    llm._loop.submit([*requests, llm._request([1, 2, 3], SHORT)], outbox)
    step = llm.engine.step
    llm.engine.step = lambda: (time.sleep(0.01), step())[1]  # type: ignore[method-assign, func-returns-value]
    said = ends(outbox, 4)
    assert [isinstance(message.error, DeadlineExceeded) for message in said] == [True, True, True, False]
    assert time.perf_counter() - begun < 3 and "after 0." in str(said[0].error)
    assert llm.engine.scheduler.idle and llm.cache.available == llm.cache.capacity


def test_what_a_reader_has_not_read_is_one_message_per_choice() -> None:
    llm, outbox = tiny_llm(characters=True, speculate="suffix"), Mailbox()
    how = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=200, ignore_eos=True, logprobs=1)
    llm._loop.submit([llm._request([1, 2, 3], how)], outbox, streams=True)
    while llm._loop.under_way:  # nobody reads
        time.sleep(0.01)
    assert len(outbox._unread) == 4
    deltas = sorted((outbox.get().delta for _ in range(3)), key=lambda delta: delta.index)  # type: ignore[union-attr]
    last = outbox.get()
    assert last.completions is not None
    for delta, completion in zip(deltas, last.completions, strict=True):
        assert delta is not None and delta.completion is not None
        assert (delta.text, delta.token_ids) == (completion.text, completion.token_ids)
        assert delta.origins == completion.stats.origins and delta.finish_reason == "length"
        assert delta.logprobs == completion.logprobs and len(completion.token_ids) == 200


def test_joined_deltas_keep_a_bounded_number_of_trees_those_of_the_first_tokens() -> None:
    unread, trees = Unread(), [object() for _ in range(600)]
    for place, tree in enumerate(trees):
        delta = Delta(0, "x", [place], [None], trees=[tree], decisions=[None])  # type: ignore[list-item]
        unread.add(Message(1, delta=delta))
    (message,) = unread.take()
    assert message.delta is not None and message.delta.token_ids == list(range(600))
    assert message.delta.trees == trees[:512]
    assert len(message.delta.decisions) == 512


def test_messages_are_plain_data() -> None:
    llm, outbox = tiny_llm(characters=True, speculate="suffix"), Mailbox()
    request = llm._request([1, 2, 3] * 5, SamplingParams(max_tokens=30, seed=1, logprobs=2), trace=True)
    assert pickle.loads(pickle.dumps(request)) == request
    llm._loop.submit([request], outbox, streams=True)
    while True:
        message = outbox.get()
        assert len(pickle.loads(pickle.dumps(message))) == len(message)
        if message.delta is None:
            break
