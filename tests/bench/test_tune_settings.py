"""`slipstream tune` over drafters and tree sizes, and the profiles that it writes."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.bench.intervals import Interval
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import conditions
from slipstream.bench.tune.candidates import methods, sizes
from slipstream.bench.tune.halving import Finding, Halving
from slipstream.bench.tune.profile import advice, save_profile
from slipstream.errors import OptionError, SlipstreamError
from slipstream.profiles import read_profile
from tests.invoking import invoke


def finding(best: str, speed: Interval, over: Interval) -> Finding:
    return Finding(best, {"batch 1": {best: speed, "auto": speed}}, {"batch 1": over}, {"chat": speed}, {best: 1.5}, 8)


def saved(path: Path, **changed: Any) -> Path:
    facts = {"model": "m", "fingerprint": "f", **changed}
    save_profile(finding("suffix:nodes=8", Interval(1.5, 1.4, 1.6), Interval(1.1, 1.0, 1.2)), facts, path)
    return path


def test_candidates_are_what_the_model_can_use() -> None:
    assert methods("nobody's") == ["suffix", "ngram", "lookahead"]
    assert methods("nobody's", "tiny")[3:] == ["draft_model:model=tiny", "suffix+draft_model:model=tiny"]
    assert sizes("suffix") == [f"suffix:nodes={n}" for n in (4, 8, 16, 32)]
    assert sizes("suffix+draft_model:model=x")[0] == "suffix+draft_model:model=x,nodes=4"
    assert sizes("suffix:nodes=4") == [] and sizes("lookahead") == ["lookahead:nodes=32"]


@pytest.mark.real_model
def test_heads_of_the_default_model_are_candidates(smollm2_path: Path) -> None:
    with LLM(speculate=None) as llm:
        assert {"eagle3", "suffix+eagle3", "medusa", "draft_model"} <= set(methods(llm.model.fingerprint))


def test_the_search_keeps_what_is_fast(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three drafters one is slowed down: it is dropped in the first round, and is not recommended."""
    from slipstream.drafters.ngram import NgramDrafter

    propose = NgramDrafter.propose

    def slowly(self: Any, requests: Any) -> Any:
        time.sleep(0.02)
        return propose(self, requests)

    monkeypatch.setattr(NgramDrafter, "propose", slowly)
    prompts = [
        BenchPrompt(f"{n}", "ab"[n % 2], ({"role": "user", "content": f"The quick brown fox {n}"},)) for n in range(8)
    ]
    opened: list[list[str]] = []

    def loaded(settings: list[str]) -> LLM:
        opened.append(settings)
        return LLM(tiny, speculate=None, drafters=settings)

    told: list[str] = []
    halving = Halving(loaded, prompts, conditions([1, 2]), 16, told.append)
    found = halving.search(["suffix", "ngram", "lookahead"], time.monotonic() + 12)
    assert opened[0] == ["none", "suffix", "ngram", "lookahead"] and opened[-1][-1] == "auto"
    assert "ngram" not in opened[-1] and not found.best.startswith("ngram")
    assert found.tried["ngram"] < min(found.tried["suffix"], found.tried["lookahead"])
    assert list(found.speedups) == ["batch 1", "batch 2"] and found.prompts >= 2 and told


def test_a_profile_is_read_and_used(tiny: str, tmp_path: Path) -> None:
    with LLM(tiny, speculate=None) as plain:
        path = saved(tmp_path / "p.toml", model=plain.model.name, fingerprint=plain.model.fingerprint)
        expected = plain.generate("The quick", SamplingParams(temperature=0, max_tokens=8))[0].token_ids
    assert read_profile(path).speculate == "suffix:nodes=8"
    data = tomllib.loads(path.read_text())
    assert data["measured"][0]["speedup"] == [1.5, 1.4, 1.6] and data["tried"] == {"suffix:nodes=8": 1.5}
    with LLM(tiny, profile=path) as llm:
        assert (llm.drafter.name, llm.drafter.options.nodes) == ("suffix", 8)
        assert llm.generate("The quick", SamplingParams(temperature=0, max_tokens=8))[0].token_ids == expected
    done = invoke("run", "-m", tiny, "--profile", str(path), "--max-tokens", "4", "--json", "Hi")
    assert done.exit_code == 0 and json.loads(done.stdout)["speculate"] == "suffix:nodes=8", done.output


def test_a_profile_has_the_priors_and_costs_of_the_policy(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are those that the policy starts from; on another machine, or with other weights, its costs are not used."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    with LLM(tiny, speculate="auto") as taught:
        taught.generate("The quick brown fox. The quick", SamplingParams(temperature=0, max_tokens=60))
        setup, learnt = taught.learnt()
        facts = {"model": taught.model.name, "fingerprint": taught.model.fingerprint}
    assert learnt["passes"] and learnt["record"] and learnt["worth"]
    found = finding("suffix", Interval(1.5, 1.4, 1.6), Interval(1.1, 1.0, 1.2))
    found.setup, found.policy = setup, learnt
    save_profile(found, facts, tmp_path / "p.toml")
    assert read_profile(tmp_path / "p.toml").policy == learnt
    with LLM(tiny, profile=tmp_path / "p.toml") as llm:
        assert llm.learnt() == (setup, learnt)
    assert "are not used" not in caplog.text
    found.setup = "another machine"
    save_profile(found, facts, tmp_path / "p.toml")
    with LLM(tiny, profile=tmp_path / "p.toml") as llm:
        _, started = llm.learnt()
    assert (started["worth"], started["record"]) == (learnt["worth"], learnt["record"]) and not started["passes"]
    assert "the costs in the profile are those of another machine, and are not used" in caplog.text
    found.policy = {"worth": {"suffix": 3}, "record": {}}
    save_profile(found, facts, tmp_path / "p.toml")
    with pytest.raises(SlipstreamError, match="no valid priors"):
        LLM(tiny, profile=tmp_path / "p.toml")


def test_a_profile_of_another_model_is_refused(tiny: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "p.toml")
    with pytest.raises(OptionError, match="the profile was made for m"):
        LLM(tiny, profile=path)
    with pytest.raises(OptionError, match="either a profile or a drafter"):
        LLM(tiny, profile=path, speculate="ngram")
    done = invoke("run", "-m", tiny, "--profile", str(path), "--speculate", "ngram", "Hi")
    assert done.exit_code == 2 and "either --profile or a drafter" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not TOML"), ("a = 1", "is not a profile"), ('format = "slipstream-profile"\nversion = 1', "lacks")],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(SlipstreamError, match=message):
        read_profile(path)
    with pytest.raises(SlipstreamError, match="cannot be read"):
        read_profile(tmp_path / "nowhere.toml")


def test_advice_is_plain() -> None:
    better = advice(finding("suffix", Interval(1.5, 1.4, 1.6), Interval(1.1, 1.05, 1.2)), untrained=True)
    assert better[0] == "batch 1: suffix is 1.50x (1.40 to 1.60) as fast as plain decoding"
    assert "more than auto" in better[1] and "slipstream train eagle3" in better[-1]
    worse = advice(finding("suffix", Interval(0.9, 0.8, 0.95), Interval(1.0, 0.9, 1.1)), untrained=False)
    assert "nothing helps" in worse[0] and "no different from auto" in worse[1] and worse[-1].endswith("chat")


def test_the_verb_writes_a_profile(tiny: str, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.jsonl", tmp_path / "p.toml"
    file.write_text("\n".join(json.dumps({"prompt": f"The quick {n}"}) for n in range(6)))
    line = ["tune", "-m", tiny, "--prompts", str(file), "--minutes", "0.3", "--tokens", "12", "-o", str(out)]
    began = time.monotonic()
    done = invoke(*line)
    assert done.exit_code == 0, done.output
    assert time.monotonic() - began < 45
    assert f"recommended: {read_profile(out).speculate}" in done.output and f"--profile {out}" in done.output
    assert invoke("tune", "--budget", "3").exit_code == 2
