"""What is kept between runs belongs to one machine, as far as it is costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine import core
from slipstream.policy.saved import SavedPolicy, without_costs
from slipstream.profiles import Profile
from tests.tiny import tiny_llm

ROUNDS = {"passes": {"1,1": {"1": 4.0}}, "drafts": {"calls": {}}, "record": {"suffix,16|3,0,0": [4.0, 2.0, 60.0]}}
STATE = {"passes": {"1,1": {"1": 9.0}}, "drafts": {}, "worth": {}, "record": {}, "rounds": ROUNDS}


def test_costs_of_another_machine_are_left_out_of_those_of_rounds_too() -> None:
    assert without_costs(STATE) == {"worth": {}, "record": {}, "rounds": {"record": ROUNDS["record"]}}
    assert without_costs({"worth": {}, "record": {}}) == {"worth": {}, "record": {}}


def test_a_profile_of_another_machine_brings_no_costs(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    policy: Any = SimpleNamespace(restore=seen.append)
    saved = SavedPolicy(policy, "model", ("int8", "cpu", 2))
    saved.start_from(Profile("auto", "m", "model", "int8-cuda-H200", STATE))
    assert seen == [without_costs(STATE)]
    saved.start_from(Profile("auto", "m", "model", saved.setup, STATE))
    assert seen[1] == STATE


def test_the_key_names_what_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor, its threads and whether our own kernels run on it; on a GPU its name."""
    llm = tiny_llm(context=100, device="cpu")
    made = object.__new__(core.EngineCore)
    made.model, made.config = llm.model, SimpleNamespace(quantize="none")  # type: ignore[assignment]
    keys = set()
    for threads, works in ((2, True), (2, False), (1, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(core, "native_works", lambda works=works: works)
        facts = made._cost_facts()
        assert core.cpu_model() in facts and facts[-1] == core.__version__
        keys.add(facts)
    assert len(keys) == 3
    made.model = SimpleNamespace(device="cuda", dtype=torch.bfloat16)  # type: ignore[assignment]
    for name in ("H200", "L4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        facts = made._cost_facts()
        assert name in facts and core.cpu_model() not in facts
        keys.add(facts)
    assert len(keys) == 5
