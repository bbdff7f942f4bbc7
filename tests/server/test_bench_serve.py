"""`/metrics` as `vllm bench serve` reads it, against what the answers of the same run say of themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.serving import Served

PREFIX = "vllm:spec_decode_num_"
PROMPTS = ["abc abc abc abc", "The quick brown fox. The quick brown", "one two one two one two", "x"]


def counters(text: str) -> Counter[str]:
    """Sums by name, and by position: the number at the end of each line that begins with one of vLLM's names."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        assert line.startswith(PREFIX), line
        name = line.removeprefix(PREFIX).partition("{")[0]
        if name == "accepted_tokens_per_pos_total":
            name = line.partition('position="')[2].partition('"')[0]
        found[name] += int(float(line.split()[-1]))
    return found


def test_acceptance_of_a_run(server: Served) -> None:
    before = counters(server.http.get("/metrics").text)
    told: list[dict[str, Any]] = []
    for place, prompt in enumerate(PROMPTS):
        body = {"max_tokens": 60, "temperature": place % 2, "seed": place}
        chat = {**body, "messages": [{"role": "user", "content": prompt}]}
        told.append(server.answer("/v1/completions", {**body, "prompt": prompt}))
        told.append(server.answer("/v1/chat/completions", chat))
        told.append(server.events("/v1/chat/completions", {**chat, "n": 2})[-2])
    after = counters(server.http.get("/metrics").text)
    run = Counter({name: after[name] - before[name] for name in after})
    answers = [one["metrics"]["speculative_decoding"] for one in told]
    drafts, drafted, accepted = (run[f"{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert drafts == sum(one["num_spec_steps"] for one in answers) > 0
    assert drafted == sum(one["num_draft_tokens"] for one in answers)
    assert accepted == sum(one["num_accepted_draft_tokens"] for one in answers) > 0
    length = sum(one["mean_acceptance_length"] * one["num_spec_steps"] for one in answers) / drafts
    assert 1 + accepted / drafts == pytest.approx(length)
    deepest = max(len(one["acceptance_histogram"]) for one in answers) - 1
    rates = [run[str(position)] / drafts for position in range(deepest)]
    assert rates == sorted(rates, reverse=True) and rates[0] <= 1 and sum(rates) * drafts == pytest.approx(accepted)
    for position, rate in enumerate(rates):  # steps that accepted a token there, of those that had a draft
        reached = sum(sum(one["acceptance_histogram"][position + 1 :]) for one in answers)
        assert rate == pytest.approx(reached / drafts), position
