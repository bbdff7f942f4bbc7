"""Ordinary requests in rounds on a GPU: every kind of sampling, requests that come and go, what a warm-up records."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.engine.extras import Level
from slipstream.gpu.graphs import sizes
from slipstream.types import Output
from tests.device.on_gpu import DEVICE, Made, burst_of, recorded
from tests.engine.test_come_and_go import arriving
from tests.engine.test_ordinary_rounds import KINDS, SMALL, by_host, requests
from tests.engine.test_rounds import TREES

pytestmark = pytest.mark.gpu

DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    *(("none", {}), ("suffix", {})),
    *((name, SMALL) for name in TREES),
    ("suffix+eagle3", SMALL),
]
ENGINE: dict[str, Any] = {"eos": 5}


def exactly(output: Output) -> list[Any]:
    """All that a user gets but times and counters, to the last bit."""
    told = [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in output.outputs]
    return [*told, output.prompt_logprobs]


@pytest.mark.parametrize(("name", "options"), DRAFTERS, ids=lambda case: case if isinstance(case, str) else "")
def test_every_kind_is_bitwise_the_hosts_given_the_same_logits(
    name: str, options: dict[str, Any], table_of_logits: None, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, how = requests()
    wanted = made.host(**ENGINE).generate(prompts, how)
    llm = made.rounds(name, options, **ENGINE)
    with by_host(monkeypatch) as found:
        given = llm.generate(prompts, how)
    for kind, one, other in zip(KINDS, wanted, given, strict=True):
        assert exactly(one) == exactly(other), kind
    assert found == [] and llm.engine.draft_faults == 0


@pytest.mark.parametrize("name", ["none", "eagle3", "suffix+eagle3"])
def test_whole_texts_of_every_kind_are_equal_in_exact_mode(name: str, made: Made) -> None:
    prompts, how = requests()
    wanted = made.host(exact=True, **ENGINE).generate(prompts, how)
    given = made.rounds(name, SMALL if name != "none" else {}, exact=True, **ENGINE).generate(prompts, how)
    for kind, one, other in zip(KINDS, wanted, given, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs], kind


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_requests_that_come_and_go_after_a_warm_up_record_nothing(name: str, made: Made) -> None:
    prompts, how = arriving(24)
    wanted = made.host(exact=True, **ENGINE).generate(prompts, how)
    llm = made.rounds(name, SMALL if name != "none" else {}, exact=True, max_num_seqs=5, **ENGINE)
    device, burst = llm.engine.device, burst_of(llm)
    assert device is not None
    if DEVICE == "cuda":
        taken = llm.warm_up()
        assert taken.seconds > 0 and taken.graphs >= len(sizes(5)) * len(Level)
        assert recorded(burst) == len(sizes(5)) * (len(Level) + 2 * (name != "none"))
    else:
        device.warm_up()
    count, graphs = device.graphs, recorded(burst)
    given = llm.generate(prompts, how)
    assert [o.token_ids for o in given] == [o.token_ids for o in wanted]
    assert (device.graphs, recorded(burst)) == (count, graphs), "a request met a shape that is not warm"
