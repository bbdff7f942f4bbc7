"""`slipstream check` of trained drafters: the reported memory is what they take."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from slipstream.cache import PAGE_SIZE
from slipstream.commands.check.verb import examine
from slipstream.commands.shared.options import ModelSetup
from slipstream.models.memory import KV_SHARE
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
    pages = llm.cache.capacity + 1  # one of them is the scratch page
    assert head.per_token == kept // (pages * PAGE_SIZE)
    assert head.weights > 0 and head.draft_tokens == 61 and head.problem is None


def test_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    place = random_head("eagle3")
    other = invoke("check", "-m", str(tiny_directory(0, vocab_size=50)), "--speculate", f"eagle3:checkpoint={place}")
    assert other.exit_code == 2 and "which has vocab_size=97, but this target has 50" in other.stdout
    kind = invoke("check", "-m", MODEL, "--speculate", f"medusa:checkpoint={place}")
    assert kind.exit_code == 2 and "holds a drafter of kind 'eagle3', not 'medusa'" in kind.stdout
    missing = invoke("check", "-m", MODEL, "--speculate", f"eagle3:checkpoint={tmp_path}")
    assert missing.exit_code == 2 and "holds no trained drafter" in missing.stdout


def test_a_drafter_without_a_checkpoint_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    done = invoke("check", "-m", MODEL, "--speculate", "suffix+eagle3")
    assert done.exit_code == 2 and not re.search(r"^fits", done.stdout, re.MULTILINE)
    assert "no eagle3 drafter has been trained for a target of this shape (slipstream train eagle3" in done.stdout


def test_a_drafter_that_is_found_by_the_target_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    place = random_head("eagle3")
    shutil.copytree(place, tmp_path / "drafters" / "eagle3-0123456789abcdef")
    (named,) = examine(ModelSetup(model=MODEL, speculate=f"eagle3:checkpoint={place}")).heads
    (found,) = examine(ModelSetup(model=MODEL, speculate="eagle3")).heads
    assert (found.weights, found.per_token, found.problem) == (named.weights, named.per_token, None)
    assert found.by_shape and not named.by_shape
    done = invoke("check", "-m", MODEL, "--speculate", "eagle3")
    assert done.exit_code == 0 and "whether it fits these weights" in done.stdout
    other = invoke("check", "-m", str(tiny_directory(0, vocab_size=50)), "--speculate", "eagle3")
    assert other.exit_code == 2 and "no eagle3 drafter" in other.stdout


def test_the_head_that_auto_finds_is_counted_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert not examine(ModelSetup(model=MODEL)).heads
    shutil.copytree(random_head("eagle3"), tmp_path / "drafters" / "eagle3-0123456789abcdef")
    findings = examine(ModelSetup(model=MODEL))
    assert [head.method for head in findings.heads] == ["eagle3"]
    assert findings.memory.draft_weights > 0 and findings.memory.draft_kv > 0
    assert not examine(ModelSetup(model=MODEL, speculate="auto:drafters=suffix")).heads
    plain = examine(ModelSetup(model=MODEL, speculate="none")).memory
    least = plain.weights + int(plain.kv / KV_SHARE) + 1
    monkeypatch.setattr("slipstream.commands.check.verb.available_bytes", lambda device: least)
    tight = examine(ModelSetup(model=MODEL))
    assert not tight.heads and tight.memory.fits, "it is left out, as loading does"
