"""Rounds on a GPU: they choose what the host's steps choose, and in exact mode every text is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.types import Output
from tests.device.on_gpu import DTYPES, Made, burst_of, mixed
from tests.engine.test_rounds import TREES, asked, story

pytestmark = pytest.mark.gpu

DRAFTERS = [("none", {}), ("suffix", {}), *TREES.items(), ("suffix+eagle3", TREES["eagle3"])]
LONG = 10  # prompts of a batch that is filled up


def same_texts(ones: list[Output], others: list[Output]) -> None:
    for one, other in zip(ones, others, strict=True):
        for left, right in zip(one.outputs, other.outputs, strict=True):
            assert (left.token_ids, left.text, left.finish_reason) == (right.token_ids, right.text, right.finish_reason)


@pytest.mark.parametrize(("name", "options"), DRAFTERS, ids=lambda case: case if isinstance(case, str) else "")
def test_rounds_choose_what_host_steps_choose_given_the_same_logits(
    name: str, options: dict[str, Any], table_of_logits: None, made: Made
) -> None:
    how = mixed(5)
    plain = made.host().generate(asked(), how)
    same_texts(plain, made.host(name, options).generate(asked(), how))
    llm = made.rounds(name, options)
    same_texts(plain, llm.generate(asked(), how))
    assert llm.engine.draft_faults == 0 and llm.burst is not None
    assert llm.cache.available == llm.cache.capacity


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), DRAFTERS, ids=lambda case: case if isinstance(case, str) else "")
def test_in_exact_mode_every_text_is_that_of_plain_decoding(
    name: str, options: dict[str, Any], dtype: str, made: Made
) -> None:
    """By the host and in rounds, one request alone and all in a batch; the drafter accepts what it does by the host."""
    how = mixed(5)
    plain = made.host(exact=True, dtype=dtype)
    alone = [plain.generate([prompt], one)[0] for prompt, one in zip(asked(), how, strict=True)]
    by_host = made.host(name, options, exact=True, dtype=dtype).generate(asked(), how)
    llm = made.rounds(name, options, exact=True, dtype=dtype)
    assert llm.exact
    by_device = llm.generate(asked(), how)
    same_texts(alone, by_host)
    same_texts(alone, by_device)
    assert llm.engine.draft_faults == 0 and llm.burst is not None
    if name != "none" and name != "suffix":
        assert sum(output.stats.accepted for output in by_device) > 0
    if name in TREES and dtype == "float32":
        assert list(map(story, by_device)) == list(map(story, by_host))
    same_texts(alone[:1], [llm.generate(asked()[:1], how[0])[0]])


def test_in_exact_mode_a_prompt_of_any_length_is_read_alone_as_in_a_batch(made: Made) -> None:
    """Lone prompts are padded: with some lengths to as many tiles as rows, which says nothing of the rows of a tile."""
    prompts = [[(7 * i + length) % 97 for i in range(length)] for length in range(1, 70)]
    how = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm = made.host(exact=True)
    alone = [llm.generate([prompt], how)[0] for prompt in prompts]
    same_texts(alone, made.host(exact=True).generate(prompts, how))


def test_ends_choices_and_batches_that_are_filled_up(made: Made) -> None:
    """EOS inside an accepted run, the end of the context, several choices; more sequences than a power of two."""
    prompts = [*asked(3, 60), [5] * 120, [6] * 127, *asked(LONG, 40)]
    how = [
        *(SamplingParams(temperature=1.0, seed=i, max_tokens=60, stop_token_ids=[11, 12]) for i in range(2)),
        SamplingParams(n=3, temperature=0.8, seed=9, max_tokens=30),
        *(SamplingParams(temperature=0.0) for _ in range(2)),
        *mixed(LONG),
    ]
    shape = {"context": 160, "eos": 5, "exact": True}
    plain = made.host(**shape).generate(prompts, how)
    same_texts(plain, made.rounds("eagle3", TREES["eagle3"], **shape).generate(prompts, how))


def test_what_needs_the_host_and_what_does_not_share_a_batch(made: Made) -> None:
    how = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.9, seed=1, max_tokens=40, top_p=0.9),
        SamplingParams(temperature=0.9, seed=2, max_tokens=40, presence_penalty=0.5),
        SamplingParams(temperature=0.0, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0.9, seed=4, max_tokens=60),
    ]
    plain = made.host(exact=True).generate(asked(), how)
    same_texts(plain, made.rounds("eagle3", TREES["eagle3"], exact=True).generate(asked(), how))


def test_pages_that_rounds_filled_hold_the_right_rows(made: Made) -> None:
    llm = made.rounds("eagle3", TREES["eagle3"], exact=True)
    prompt, how = asked(1)[0][:100], SamplingParams(temperature=0.7, seed=3, max_tokens=100)
    told = [*prompt, *llm.generate([prompt], how)[0].token_ids, 1, 2, 3]
    again = llm.generate([told], how)[0]
    fresh = made.rounds("eagle3", TREES["eagle3"], exact=True).generate([told], how)[0]
    assert (again.token_ids, again.stats.accepted) == (fresh.token_ids, fresh.stats.accepted)


def test_a_draft_that_fails_on_the_device_goes_on_by_the_host(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, sampled: bool) -> None:
        raise RuntimeError("no such kernel")

    llm = made.rounds("eagle3", TREES["eagle3"], exact=True)
    monkeypatch.setattr("slipstream.drafters.device.tree_loop.TreeLoop.draft", broken)
    plain = made.host(exact=True).generate(asked(), mixed(5))
    same_texts(plain, llm.generate(asked(), mixed(5)))
    assert llm.burst is None and llm.engine.draft_faults == 1


def test_rounds_begin_ahead(made: Made) -> None:
    """A lone sequence whose answer takes several bursts: the first round of the next one begins before the report."""
    llm = made.rounds("medusa", TREES["medusa"], exact=True)
    begun = 0
    burst = burst_of(llm)
    go_ahead = burst.go_ahead

    def noted(launched: Any) -> None:
        nonlocal begun
        go_ahead(launched)
        begun += burst.ahead is not None

    burst.go_ahead = noted  # type: ignore[method-assign]
    how = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    found = llm.generate([[5, 6, 7]], how)
    assert begun > 0
    same_texts(made.host(exact=True).generate([[5, 6, 7]], how), found)
