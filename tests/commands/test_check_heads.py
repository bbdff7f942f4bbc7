"""`slipstream check` of trained drafters: the memory it tells is the memory they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.cache import PAGE_SIZE
from slipstream.commands.check import examine
from slipstream.commands.options import ModelSetup
from slipstream.sequence import TARGET
from tests.heads import random_head
from tests.invoking import invoke
from tests.tiny import tiny_directory, tiny_llm

MODEL = str(tiny_directory(context=300, characters=True))
HEADS = {
    "eagle3": {},
    "medusa": {},
    "mtp": {"modules": 3},
    "parallel": {},
    "kangaroo": {"exit": 1},
    "draft_model": {},
}


@pytest.mark.parametrize("method", HEADS)
def test_what_a_token_of_context_costs_is_what_the_stores_hold(method: str) -> None:
    speculate = f"{method}:checkpoint={random_head(method, **HEADS[method])}"
    (head,) = examine(ModelSetup(model=MODEL, speculate=speculate)).heads
    llm = tiny_llm(context=300, characters=True, speculate=speculate)
    kept = sum(data.nbytes for name, data in llm.cache.stores.items() if name != TARGET)
    pages = llm.cache.capacity + 1  # one of them for rows that nobody wants
    assert head.per_token == kept // (pages * PAGE_SIZE)
    assert head.weights > 0 and head.draft_tokens == 61 and head.problem is None


def test_what_does_not_fit_is_told_and_what_is_not_known_is_said(tmp_path: Path) -> None:
    place = random_head("eagle3")
    other = invoke("check", "-m", str(tiny_directory(0, vocab_size=50)), "--speculate", f"eagle3:checkpoint={place}")
    assert other.exit_code == 2 and "which has vocab_size=97, and this target has 50" in other.stdout
    kind = invoke("check", "-m", MODEL, "--speculate", f"medusa:checkpoint={place}")
    assert kind.exit_code == 2 and "holds a drafter of kind 'eagle3', not 'medusa'" in kind.stdout
    missing = invoke("check", "-m", MODEL, "--speculate", f"eagle3:checkpoint={tmp_path}")
    assert missing.exit_code == 2 and "holds no trained drafter" in missing.stdout
    found_later = invoke("check", "-m", MODEL, "--speculate", "suffix+mtp")
    assert found_later.exit_code == 0 and "its memory is not counted here" in found_later.stdout
