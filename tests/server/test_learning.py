"""From a server's traffic to a drafter that drafts it better: capture, train, bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.server.capture import Capture
from slipstream.server.config import ServerConfig
from slipstream.train import finish as finish_module
from slipstream.train.run import train
from slipstream.train.trainer import ProgressSink
from tests.chats import order, target
from tests.invoking import invoke
from tests.serving import served


def asked(number: int) -> dict[str, object]:
    """Requests of one kind."""
    return {"prompt": f"Order {number * 7919 % 1000}: ", "max_tokens": 32, "temperature": 0, "ignore_eos": True}


def test_a_drafter_learns_from_what_a_server_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were not captured are drafted better by a drafter that goes on from the one before."""
    monkeypatch.setattr(finish_module, "FORMS", finish_module.FORMS[-1:])
    monkeypatch.setattr(finish_module, "TREES", finish_module.TREES[:1])
    model, captured, quiet = str(target()), tmp_path / "captured", ProgressSink()
    with served(model, ServerConfig(model=model), Capture(captured, 10**8)) as server:
        for number in range(48):
            server.answer("/v1/completions", asked(number))
    before, _ = train(order("eagle3", tmp_path / "before"), quiet)
    course = {"steps": 60, "evaluate": 60, "save": 60, "answer": 16}
    how = {"data": (captured,), "init": str(before), "settings": {}}
    after, drafter = train(order("eagle3", tmp_path / "after", course, **how), quiet)
    assert drafter.provenance["data"]["arguments"] == {"captured": True}

    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(json.dumps({**asked(number), "model": "tiny"}) for number in range(48, 60)))
    settings = [f"eagle3:checkpoint={place}" for place in (before, after)]
    for prompts in (held_out, captured):
        out = tmp_path / f"results-{prompts.stem}"
        line = ["bench", "-m", model, "--prompts", str(prompts), "--minutes", "0.15", "-o", str(out)]
        done = invoke(*line, *(word for setting in settings for word in ("--speculate", setting)))
        assert done.exit_code == 0, done.output
        figures = json.loads((out / "results.json").read_text())["conditions"][0]["figures"]
        first, second = ((figures[name]["all"] or figures[name]["looping"])["tokens_per_step"] for name in settings)
        assert second > 1.1 * first, prompts
