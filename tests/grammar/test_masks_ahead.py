"""On the host's path of a GPU masks are made while the pass runs. Here on a CPU, where a pass is said to run on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine import host
from slipstream.engine.host import HostRunner
from slipstream.errors import OptionError
from slipstream.grammar import Constraint
from slipstream.models.decoder import Decoder
from slipstream.sampling import TreeDistributions
from tests.drafters.test_conformance import prompts
from tests.engine.test_ordinary_rounds import seen
from tests.grammar.test_engine import EXPLOSIVE
from tests.grammars import PERSON, SPECS, lettered_llm

CUT: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
DRAFTERS = ["suffix:min_match=1,min_confidence=0", "suffix+grammar"]


def running_on(monkeypatch: pytest.MonkeyPatch, speculate: Any = DRAFTERS[0], verifier: str = "match") -> LLM:
    monkeypatch.setattr(HostRunner, "_overlaps", property(lambda self: True))
    return lettered_llm(speculate, verifier)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What happens, in order: passes, masks that are made, and nodes whose logits are read."""
    told: list[tuple[str, tuple[int, ...]]] = []

    def noted(owner: Any, name: str, event: str, path: Any = lambda *_: ()) -> None:
        healthy = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            told.append((event, tuple(path(*arguments))))
            return healthy(*arguments, **named)

        monkeypatch.setattr(owner, name, run)

    noted(Decoder, "forward", "pass")
    noted(Constraint, "_allowed", "mask", lambda _, path: path)
    noted(host, "choose_trees", "read")
    for name in ("choose", "probabilities"):
        noted(TreeDistributions, name, "read", lambda self, node: self._tree.path_tokens(node))
    return told


def by_pass(told: list[tuple[str, tuple[int, ...]]]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """What follows each pass, until the next one."""
    starts = [at for at, (event, _) in enumerate(told) if event == "pass"]
    return [told[start + 1 : stop] for start, stop in zip(starts, [*starts[1:], len(told)], strict=True)]


@pytest.mark.parametrize(("how", "verifier"), [(CUT, "match"), ({"temperature": 0.8}, "rejection")])
def test_all_masks_are_made_before_anything_is_read(
    how: dict[str, Any], verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = running_on(monkeypatch, verifier=verifier)
    told, several = watched(monkeypatch), 0
    for number, text in enumerate(prompts(6, 3)):
        llm.generate([text], SamplingParams(structured_outputs={"json": PERSON}, seed=number, max_tokens=120, **how))
    for events in by_pass(told):
        kinds = [event for event, _ in events]
        if "read" not in kinds:
            continue
        first = kinds.index("read")
        made, read = (
            {path for event, path in part if event == kind}
            for part, kind in ((events[:first], "mask"), (events, "read"))
        )
        assert "mask" not in kinds[first:], "the host waits for the pass, and then makes a mask"
        assert read <= made and kinds.count("mask") == len(made), "each once"
        several += len(made) > len(read)
    assert several > 5, "nodes that were not visited have masks too: it is not known which will be"


@pytest.mark.parametrize("overlaps", [True, False])
def test_masks_are_made_ahead_only_where_they_come_first_and_a_pass_runs_on(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constraint, "foresee", lambda *_: pytest.fail("a mask that nobody may need"))
    llm = running_on(monkeypatch) if overlaps else lettered_llm(DRAFTERS[0])
    how = {"temperature": 0.8} if overlaps else CUT
    llm.generate(prompts(1, 3), SamplingParams(structured_outputs={"json": PERSON}, seed=1, max_tokens=60, **how))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("how", [CUT, {"temperature": 1.2, "top_k": 7, "min_p": 0.01, "repetition_penalty": 1.2}])
def test_the_text_is_the_same(name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts(len(SPECS), 3)
    params = [
        SamplingParams(structured_outputs=spec, seed=number, max_tokens=50, logprobs=2, n=1 + number % 2, **how)
        for number, spec in enumerate(SPECS.values())
    ]
    wanted = lettered_llm().generate(texts, params)
    llm = running_on(monkeypatch, name)
    given = llm.generate(texts, params)
    assert [seen(one) for one in given] == [seen(one) for one in wanted]
    assert sum(one.stats.accepted for one in given) > 20 and llm.cache.available == llm.cache.capacity


def test_a_grammar_that_fails_there_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = SamplingParams(structured_outputs={"json": PERSON}, seed=3, max_tokens=80, **CUT)
    (wanted,) = lettered_llm().generate([[1]], fine)
    llm = running_on(monkeypatch)
    stream = llm.stream([1], fine)
    given = list(next(stream).token_ids)
    with pytest.raises(OptionError, match=r"^structured_outputs: .*items"):
        llm.generate([[2]], SamplingParams(structured_outputs=EXPLOSIVE["crowd"], seed=1, max_tokens=60, **CUT))
    for delta in stream:
        given += delta.token_ids
    assert given == wanted.token_ids
    assert llm.cache.available == llm.cache.capacity and llm.engine.draft_faults == 0


def test_masks_are_made_while_the_pass_runs_and_the_others_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass that is over after two masks: the host does not go on with those that nobody may need."""
    how = SamplingParams(structured_outputs={"json": PERSON}, seed=1, max_tokens=80, **CUT)
    (wanted,) = lettered_llm().generate(prompts(1, 3), how)
    llm = running_on(monkeypatch)
    told = watched(monkeypatch)
    monkeypatch.setattr(HostRunner, "_running", lambda self: partial(next, iter([True, True]), False))
    (given,) = llm.generate(prompts(1, 3), how)
    assert given.token_ids == wanted.token_ids
    ahead = [[event for event, _ in events] for events in by_pass(told) if "read" in [event for event, _ in events]]
    assert max(events[: events.index("read")].count("mask") for events in ahead) == 2
