"""`slipstream tune` over drafters and tree sizes, and the profiles that it writes."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.bench.intervals import Interval
from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.schedule import conditions
from slipstream.bench.tune.candidates import limits, methods, sizes
from slipstream.bench.tune.halving import Finding, Halving
from slipstream.bench.tune.profile import advice, save_profile
from slipstream.bench.tune.progress import TuneProgress
from slipstream.drafters.base import Drafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.errors import OptionError, SlipstreamError
from slipstream.profiles import read_profile
from tests.invoking import invoke

FACTS = {"model": "m", "fingerprint": "f"}
BETTER = Interval(1.5, 1.4, 1.6), Interval(1.1, 1.05, 1.2)  # over plain decoding, over auto


def finding(best: str, speed: Interval, over: Interval, auto: Interval | None = None) -> Finding:
    speeds = {best: speed, "auto": auto or Interval(speed.value / over.value)}
    return Finding(best, {"batch 1": speeds}, {"batch 1": over}, {"chat": speed}, {best: 1.5}, 8)


def slow_down(monkeypatch: pytest.MonkeyPatch, kind: type[Drafter[Any]]) -> None:
    """Each draft takes longer than all passes that it could save."""
    propose = kind.propose

    def slowly(self: Any, requests: Any) -> Any:
        time.sleep(0.02)
        return propose(self, requests)

    monkeypatch.setattr(kind, "propose", slowly)


def saved(path: Path, **changed: Any) -> Path:
    save_profile(finding("suffix:nodes=8", *BETTER), {**FACTS, **changed}, path)
    return path


def test_candidates_are_what_the_model_can_use() -> None:
    assert methods("nobody's") == ["suffix", "ngram", "lookahead"]
    assert methods("nobody's", "tiny")[3:] == ["draft_model:model=tiny", "suffix+draft_model:model=tiny"]
    assert sizes("suffix") == [f"suffix:nodes={n}" for n in (4, 8, 16, 32)]
    assert sizes("suffix+draft_model:model=x")[0] == "merge:nodes=4,drafters=suffix+draft_model:model=x"
    assert sizes("suffix:nodes=4") == sizes("suffix")[1:] and sizes("lookahead") == ["lookahead:nodes=32"]
    for method, parts in (("ngram", "ngram"), ("suffix+draft_model:model=x", "suffix+draft_model:model=x")):
        assert limits(method) == [f"auto:drafters={parts}", *(f"auto:max_nodes={n}" for n in (4, 8, 16, 32))]


@pytest.mark.real_model
def test_heads_of_the_default_model_are_candidates(smollm2_path: Path) -> None:
    with LLM(speculate=None) as llm:
        assert {"eagle3", "suffix+eagle3", "medusa", "draft_model"} <= set(methods(llm.model.fingerprint))


def test_the_search_keeps_what_is_fast(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three drafters one is slowed down: it is dropped in the first round, and is not recommended."""
    slow_down(monkeypatch, NgramDrafter)
    prompts = [
        BenchPrompt(f"{n}", "ab"[n % 2], ({"role": "user", "content": f"The quick brown fox {n}"},)) for n in range(8)
    ]
    opened: list[list[str]] = []

    def loaded(settings: list[str]) -> LLM:
        opened.append(settings)
        return LLM(tiny, speculate=None, drafters=settings)

    told: list[str] = []
    shown: list[int] = []
    progress = TuneProgress(told.append, show=lambda answers, text: shown.append(answers))
    halving = Halving(loaded, prompts, conditions([1, 2]), 16, progress)
    found = halving.search(["suffix", "ngram", "lookahead"], time.monotonic() + 12)
    assert opened[0] == ["none", "suffix", "ngram", "lookahead"] and opened[-1][-1] == "auto"
    assert "ngram" not in opened[-1] and not found.best.startswith("ngram")
    assert found.tried["ngram"] < min(found.tried["suffix"], found.tried["lookahead"])
    assert list(found.speedups) == ["batch 1", "batch 2"] and found.prompts >= 2 and told
    assert set(found.methods) == {"suffix", "ngram", "lookahead"}
    assert shown == sorted(shown) and len(shown) >= 6, "two conditions, and methods, sizes and finals at least once"
    fixed, limited, auto = opened[-1][1:]
    assert not fixed.startswith("auto") and limited.startswith("auto:") and auto == "auto"
    assert {f"auto:max_nodes={n}" for n in (4, 8, 16, 32)} < set(opened[1]) and set(opened[1]) <= {"none", *found.tried}


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


def test_a_loss_is_not_recommended(tmp_path: Path) -> None:
    """What is written is plain decoding where all are slower, and `auto` where nothing is shown to be faster."""
    path = tmp_path / "p.toml"
    cases = [
        (finding("suffix", Interval(0.9, 0.8, 0.95), Interval(1.1, 1.05, 1.2)), "none", [1.0, 1.0, 1.0]),
        (finding("auto", Interval(0.98, 0.9, 0.99), Interval(1.0, 1.0, 1.0)), "none", [1.0, 1.0, 1.0]),
        (finding("suffix", Interval(1.5, 1.4, 1.6), Interval(1.02, 0.9, 1.1)), "auto", [1.4706]),
        (finding("suffix", Interval(1.5), Interval(1.2)), "auto", [1.25]),
        (finding("suffix", Interval(1.01, 0.9, 1.1), Interval(1.03, 0.9, 1.1)), "none", [1.0, 1.0, 1.0]),
        (finding("suffix", *BETTER), "suffix", [1.5, 1.4, 1.6]),
    ]
    for found, recommended, speedup in cases:
        for speeds in found.speedups.values():
            speeds["none"] = Interval(1.0, 1.0, 1.0)
        save_profile(found, FACTS, path)
        assert found.recommended == read_profile(path).speculate == recommended
        (measured,) = tomllib.loads(path.read_text())["measured"]
        assert measured["speedup"] == speedup
        auto = found.speedups["batch 1"]["auto"]
        assert measured["over_auto"][0] == pytest.approx(speedup[0] / auto.value, abs=2e-4)


def test_under_several_loads_a_setting_must_not_lose_to_auto() -> None:
    found = finding("suffix", *BETTER)
    found.speedups["batch 8"] = {"suffix": Interval(1.4, 1.3, 1.5), "auto": Interval(1.5, 1.4, 1.6)}
    found.over_auto["batch 8"] = Interval(0.93, 0.9, 0.97)
    assert found.recommended == "auto"
    found.over_auto["batch 8"] = Interval(0.99, 0.9, 1.05)
    assert found.recommended == "suffix"


def test_where_every_drafter_is_slow_the_file_says_none(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real search."""
    for kind in (SuffixDrafter, NgramDrafter):
        slow_down(monkeypatch, kind)
    prompts = [BenchPrompt(f"{n}", "ab"[n % 2], ({"role": "user", "content": f"The quick {n}"},)) for n in range(8)]
    halving = Halving(lambda settings: LLM(tiny, speculate=None, drafters=settings), prompts, conditions(), 12)
    found = halving.search(["suffix", "ngram"], time.monotonic() + 8)
    save_profile(found, FACTS, tmp_path / "p.toml")
    written = read_profile(tmp_path / "p.toml").speculate
    assert written in ("none", "auto"), "auto, which does not draft then, may be as fast as plain decoding"
    assert written == "none" or found.speedups["batch 1"]["auto"].value > 1.0


def test_advice_is_plain() -> None:
    better = advice(finding("suffix", *BETTER), set())
    assert better[0] == "batch 1: suffix is 1.50x (1.40 to 1.60) as fast as plain decoding"
    assert "more than auto" in better[1]
    worse = advice(finding("suffix", Interval(0.9, 0.8, 0.95), Interval(1.0, 0.9, 1.1)), set())
    assert "nothing helps" in worse[0] and "no different from auto" in worse[1] and worse[-1].endswith("chat")


def test_what_to_train_is_what_was_measured() -> None:
    found = finding("suffix", *BETTER)
    found.methods = {
        "suffix": {"all": Interval(1.5, 1.4, 1.6), "chat": Interval(0.9), "code": Interval(2.0)},
        "eagle3": {"all": Interval(1.3, 1.2, 1.4), "chat": Interval(1.05, 1.0, 1.1), "code": Interval(1.6)},
        "medusa": {"all": Interval(1.1)},
    }
    gave, command = advice(found, {"eagle3", "medusa"}, "my/model")[-2:]
    assert gave == "eagle3 gave 1.30x (1.20 to 1.40) over all, least on chat: 1.05x (1.00 to 1.10)"
    assert command.endswith("slipstream train eagle3 -m my/model --init eagle3 --data captured/")
    gave, command = advice(found, set())[-2:]
    assert gave.startswith("no head was trained for this model; without one, suffix gave 1.50x (1.40 to 1.60) over all")
    assert gave.endswith(", least on chat: 0.90x")
    assert command.endswith("slipstream train eagle3")


def test_the_verb_writes_a_profile(tiny: str, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.jsonl", tmp_path / "p.toml"
    file.write_text("\n".join(json.dumps({"prompt": f"The quick {n}"}) for n in range(6)))
    line = ["tune", "-m", tiny, "--prompts", str(file), "--minutes", "0.3", "--tokens", "12", "-o", str(out)]
    began = time.monotonic()
    done = invoke(*line)
    assert done.exit_code == 0, done.output
    assert time.monotonic() - began < 45
    assert f"recommended: {read_profile(out).speculate}" in done.output and f"--profile {out}" in done.output
    assert re.search(r"\d+ answers, \d+ s left: \d+ settings", done.stderr), "it says every ten seconds how far it is"
    assert invoke("tune", "--budget", "3").exit_code == 2
