"""Figures of made-up answers, whose every value can be computed by hand."""

from __future__ import annotations

import pytest

from slipstream.bench.condition_table import ConditionTable, Grouping
from slipstream.bench.figures import Json, figures
from slipstream.bench.measure import Answer
from slipstream.bench.schedule import PLAIN, Condition
from slipstream.types import Stats

Chunk = tuple[float, int]


def plain(prompt: int, tokens: int, step: float = 10.0) -> Answer:
    """One token in every step of so many milliseconds, after a first one that took 50."""
    chunks = tuple((50.0 + step * place, 1) for place in range(tokens))
    stats = Stats(steps=tokens, emitted=tokens, decoded=tokens - 1, decode_ms=step * (tokens - 1), prefill_ms=50.0,
                  verify_ms=50.0 + step * (tokens - 1))  # fmt: skip
    return answer(PLAIN, prompt, chunks, stats)


def drafted(prompt: int, chunks: tuple[Chunk, ...], **counted: int) -> Answer:
    """A setting's answer: the first chunk is the prompt's step; the others take 2 ms to draft and 1 beside."""
    steps, tokens = len(chunks), sum(count for _, count in chunks)
    decode = chunks[-1][0] - chunks[0][0]
    stats = Stats(steps=steps, drafting_steps=steps - 1, emitted=tokens, decoded=tokens - chunks[0][1],
                  decode_ms=decode, prefill_ms=50.0, draft_ms=2.0 * (steps - 1), other_ms=1.0 * (steps - 1),
                  verify_ms=50.0 + decode - 3.0 * (steps - 1), **counted)  # fmt: skip
    return answer("d", prompt, chunks, stats)


def answer(setting: str, prompt: int, chunks: tuple[Chunk, ...], stats: Stats) -> Answer:
    ids = tuple(range(100 * prompt, 100 * prompt + sum(count for _, count in chunks)))
    last = chunks[-1][0]
    return Answer(0, setting, prompt, 0, 0, prompt, 7, ids, chunks[0][0], last, chunks, last, stats)


@pytest.fixture(scope="module")
def found() -> dict[str, Json]:
    """Two prompts. Of the first, 6 tokens: 1, 3 after 12 ms and 2 after 14 more; of the second, 5: 1, 1 and 3."""
    answers = [
        plain(0, 6),
        plain(1, 5),
        drafted(0, ((50.0, 1), (62.0, 3), (76.0, 2)), drafted=8, accepted=3),
        drafted(1, ((60.0, 1), (72.0, 1), (86.0, 3)), drafted=6, accepted=2),
    ]
    table = ConditionTable(answers, Condition(), Grouping(["a", "a"], {"a": 2}))
    listed = {name: figures(table, name, "all") for name in (PLAIN, "d")}
    return {name: each for name, each in listed.items() if each is not None}


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it(found: dict[str, Json]) -> None:
    assert found[PLAIN]["tpot_ms"]["mean"] == 10.0
    assert found["d"]["tpot_ms"]["mean"] == pytest.approx((26 / 5 + 26 / 4) / 2, abs=1e-3)
    assert found["d"]["ttft_ms"]["mean"] == 55.0 and found["d"]["e2e_ms"]["mean"] == 81.0


def test_itl_is_zero_within_a_delivery_and_chunk_gaps_are_not(found: dict[str, Json]) -> None:
    gaps = [12.0, 0.0, 0.0, 14.0, 0.0, 12.0, 14.0, 0.0, 0.0]  # one less than the tokens of each answer
    assert found["d"]["itl_ms"]["mean"] == pytest.approx(sum(gaps) / 9, abs=1e-3)
    assert (found["d"]["itl_ms"]["p50"], found["d"]["itl_ms"]["p99"]) == (0.0, 14.0)
    assert (found["d"]["chunk_gap_ms"]["mean"], found["d"]["chunk_gap_ms"]["p50"]) == (13.0, 13.0)
    assert found[PLAIN]["itl_ms"] == found[PLAIN]["chunk_gap_ms"]


def test_rows_are_the_root_and_the_drafted_nodes(found: dict[str, Json]) -> None:
    assert found["d"]["rows_per_step"] == pytest.approx(1 + 14 / 6, abs=1e-3)
    assert found[PLAIN]["rows_per_step"] == 1.0


def test_acceptance_is_pooled_and_by_request(found: dict[str, Json]) -> None:
    first, second = 1 + 3 / 2, 1 + 2 / 2
    assert found["d"]["acceptance_length"] == 1 + 5 / 4
    by_request = found["d"]["acceptance_length_by_request"]
    assert by_request["mean"] == by_request["p50"] == (first + second) / 2
    assert by_request["p10"] == pytest.approx(second + 0.1 * (first - second))
    assert by_request["p90"] == pytest.approx(second + 0.9 * (first - second))
    assert found["d"]["acceptance_rate"] == pytest.approx(5 / 14, abs=1e-4)
    assert found["d"]["tokens_per_step"] == pytest.approx(11 / 6, abs=1e-4)


def test_a_drafter_breaks_even_at_the_cost_of_its_step_in_plain_steps(found: dict[str, Json]) -> None:
    step = (26 + 26) / 4  # 13 ms, of which plain decoding needs 10
    assert found["d"]["break_even_tokens_per_step"] == step / 10 == 1.3
    assert found[PLAIN]["break_even_tokens_per_step"] == 1.0
    split = found["d"]["step_ms"]
    assert split == {"total": 13.0, "draft": 2.0, "verify": 10.0, "other": 1.0}


def test_break_even_is_where_the_decode_speedup_is_one() -> None:
    """With as many tokens per step after the first as a step costs, drafting gains nothing."""
    even = drafted(0, tuple((50.0 + 20.0 * place, 1 + (place > 0)) for place in range(6)), drafted=10, accepted=5)
    table = ConditionTable([plain(0, 11), even], Condition(), Grouping(["a"], {"a": 1}))
    each = figures(table, "d", "all")
    assert each is not None and each["break_even_tokens_per_step"] == 2.0
    assert each["decode_speedup"][0] == 1.0 == each["speedup"][0]
