"""From a server to a profile and back: `serve --profile --capture`, then `tune --prompts captured/`."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx

from slipstream import LLM
from slipstream.bench.intervals import Interval
from slipstream.bench.prompts import read_file
from slipstream.bench.tune.halving import Finding
from slipstream.bench.tune.profile import save_profile
from slipstream.profiles import read_profile
from tests.invoking import invoke
from tests.server.test_shutdown import CHAT, process


def profile_of(model: str, path: Path) -> Path:
    """A profile that recommends `suffix:nodes=8`."""
    with LLM(model, speculate=None) as llm:
        facts = {"model": llm.model.name, "fingerprint": llm.model.fingerprint}
    best, speed = "suffix:nodes=8", Interval(1.5, 1.4, 1.6)
    speeds = {"batch 1": {best: speed, "auto": Interval(1.2)}}
    save_profile(Finding(best, speeds, {"batch 1": Interval(1.25, 1.1, 1.4)}, {"chat": speed}), facts, path)
    return path


def test_a_server_takes_a_profile_and_what_it_captures_is_tuned_on(tiny: str, tmp_path: Path) -> None:
    kept, profile = tmp_path / "captured", profile_of(tiny, tmp_path / "p.toml")
    with process(tiny, "--profile", str(profile), "--capture", str(kept), "--capture-mb", "5") as (running, url):
        assert running.stderr is not None
        assert running.stderr.readline().strip() == f"prompts and answers are captured in {kept}, 5 MB at most"
        for number in range(6):
            said = {"role": "user", "content": f"The quick {number}"}
            body = {"messages": [said], "max_tokens": 10, "temperature": 0}
            answer = httpx.post(url + CHAT, json={**body, "speculate": "suffix:nodes=8"}, timeout=60)
            assert answer.status_code == 200, answer.text
        other = httpx.post(url + CHAT, json={**body, "speculate": "ngram"}, timeout=60)
        assert other.status_code == 400 and "suffix:nodes=8" in other.text, "the profile's drafter is the loaded one"
        running.send_signal(signal.SIGTERM)
        running.wait(30)
    prompts = read_file(kept)
    assert len(prompts) == 6 and all(prompt.ids and prompt.category == "captured" for prompt in prompts)
    out = tmp_path / "tuned.toml"
    done = invoke("tune", "-m", tiny, "--prompts", str(kept), "--minutes", "0.15", "--tokens", "10", "-o", str(out))
    assert done.exit_code == 0, done.output
    found = read_profile(out)
    with LLM(tiny, profile=out) as llm:
        assert llm.model.fingerprint == found.fingerprint
    assert f"recommended: {found.speculate}" in done.output


def test_a_server_refuses_the_profile_of_another_model(tiny: str, tmp_path: Path) -> None:
    path = profile_of(tiny, tmp_path / "p.toml")
    path.write_text(path.read_text().replace('fingerprint = "', 'fingerprint = "x'))
    done = invoke("serve", "-m", tiny, "--port", "0", "--profile", str(path))
    assert done.exit_code != 0 and "the profile was made for" in done.stderr
    both = invoke("serve", "-m", tiny, "--port", "0", "--profile", str(path), "--speculate", "ngram")
    assert both.exit_code == 2 and "either --profile or a drafter" in both.stderr
