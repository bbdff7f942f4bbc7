"""`slipstream drafters`, `check` and `env`: drafters, memory, and the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import slipstream
from slipstream.cache import PAGE_SIZE
from slipstream.commands.shared.options import ModelSetup
from slipstream.errors import OptionError
from slipstream.models.formats import builtin, hub
from tests.invoking import invoke


def test_drafters() -> None:
    listed = json.loads(invoke("drafters", "--json").stdout)
    assert {"none", "ngram", "suffix", "draft_model"} <= {drafter["name"] for drafter in listed["drafters"]}
    assert all(drafter[fact] for drafter in listed["drafters"] for fact in ("summary", "helps", "cost", "needs"))
    one = json.loads(invoke("drafters", "ngram", "--json").stdout)
    assert {"name": "max_n", "type": "int", "default": 4} in one["options"]
    assert "auto (default)" in invoke("drafters").stdout
    assert invoke("drafters", "nope").exit_code == 2


def test_defaults_are_reported_for_both_runners() -> None:
    """What the default of an option means: on the host with a CPU, and in device rounds with a GPU."""

    def knobs(name: str) -> dict[str, tuple[object, object, object]]:
        options = json.loads(invoke("drafters", name, "--json").stdout)["options"]
        return {knob["name"]: (knob["default"], knob["cpu"], knob["gpu"]) for knob in options if "cpu" in knob}

    learned = {"depth": (0, 8, 6), "nodes": (0, 16, 63), "branch": (4, 4, 4), "min_confidence": (0.0, 0.07, 0.0)}
    assert knobs("eagle3") == learned
    assert knobs("medusa")["depth"] == (5, 5, 5) and knobs("medusa")["nodes"] == (0, 16, 63)
    assert knobs("suffix")["branch"] == (3, 3, 1) and knobs("suffix")["min_confidence"] == (0.2, 0.2, 0.0)
    assert knobs("draft_model")["nodes"] == (0, 5, 5)
    assert knobs("merge") == {}
    lines = invoke("drafters", "eagle3").stdout.splitlines()
    assert any(line.split() == ["depth", "int", "0", "8", "6"] for line in lines)
    assert any(line.split() == ["draw", "str", "auto"] for line in lines)
    assert "on a GPU" not in invoke("drafters", "ngram").stdout, "nothing differs there"


def test_a_broken_plugin_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from slipstream.drafters import registry

    broken = EntryPoint("broken", "no_such_module:Drafter", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    done = invoke("drafters")
    assert done.exit_code == 0
    assert "cannot be loaded: ModuleNotFoundError" in done.stdout and "auto (default)" in done.stdout


def test_check_plans_memory(tiny: str) -> None:
    done = invoke("check", "-m", tiny, "--max-model-len", "128")
    assert done.exit_code == 0
    assert done.stdout.rstrip().endswith("fits") and "K/V for 128 tokens" in done.stdout
    found = json.loads(invoke("check", "-m", tiny, "--max-model-len", "128", "--json").stdout)
    # two layers, K and V, two heads of 8, float32, and two pages to spare
    assert found["memory_bytes"]["kv"] == (128 + 2 * PAGE_SIZE) * 2 * 2 * 2 * 8 * 4
    assert found["ok"] and found["fits"] and found["drafts"] == []
    assert found["architecture"]["layers"] == 2 and found["dtype"] == "float32"


def test_check_loads_no_weights(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models.formats.hf import HFCheckpoint

    def refuse(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(HFCheckpoint, "weight", refuse)
    assert invoke("check", "-m", tiny, "--speculate", f"draft_model:model={tiny}").exit_code == 0


def test_check_compares_vocabularies(tiny: str, other: str) -> None:
    same = invoke("check", "-m", tiny, "--speculate", f"draft_model:model={tiny}")
    assert same.exit_code == 0 and "same vocabulary" in same.stdout and "draft K/V" in same.stdout
    differing = invoke("check", "-m", tiny, "--speculate", f"draft_model:model={other}")
    assert differing.exit_code == 2
    assert "token 3 is '<|extra|>' in the draft" in differing.stdout
    found = json.loads(invoke("check", "-m", tiny, "--json", "--speculate", f"draft_model:model={other}").stdout)
    assert found["drafts"][0]["vocabulary"]["difference"][0] == 3 and not found["ok"] and found["fits"]


def test_every_model_of_a_composed_drafter_is_checked(tiny: str, other: str) -> None:
    stack = f"cascade:suffix+draft_model:model={tiny}+draft_model:model={other}"
    found = json.loads(invoke("check", "-m", tiny, "--json", "--speculate", stack).stdout)
    assert [draft["model"] for draft in found["drafts"]] == [tiny, other]
    assert [draft["vocabulary"]["same"] for draft in found["drafts"]] == [True, False]
    assert found["memory_bytes"]["draft_kv"] == sum(draft["kv_bytes"] for draft in found["drafts"]) > 0
    assert len(found["problems"]) == 1 and found["speculate"] == stack


def test_check_refuses_what_does_not_fit(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.commands.check.verb.available_bytes", lambda device: 300_000)
    done = invoke("check", "-m", tiny)
    assert done.exit_code == 2
    length = re.search(r"--max-model-len (\d+) would fit", done.stdout)
    assert length
    assert invoke("check", "-m", tiny, "--max-model-len", length[1]).exit_code == 0
    assert invoke("check", "-m", tiny, "--max-model-len", "9999").exit_code == 2
    with pytest.raises(OptionError):
        ModelSetup(speculate="nope").drafter()


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "nobody/has-this", "nobody/has-this:Q4_K_M"])
def test_check_downloads_nothing_unasked(name: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise AssertionError("a download")

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "fetch", refuse)
    monkeypatch.setattr(hub, "download", refuse)
    for options in (["-m", name], ["-m", tiny, "--speculate", f"draft_model:model={name}"]):
        done = invoke("check", *options)
        assert done.exit_code == 2 and f"unknown: {name} is not here" in done.stdout and "--fetch" in done.stdout
        assert ("1,042.2 MiB to download" in done.stdout) == (name in builtin.MODELS)
        found = json.loads(invoke("check", *options, "--json").stdout)
        assert [entry["model"] for entry in found["missing"]] == [name]
        assert (found["ok"], found["fits"]) == (False, None) and len(found["problems"]) == 1
    assert not (tmp_path / "cache").exists()


def test_check_downloads_what_is_asked_for(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "fetch", lambda name, progress=None: Path(tiny))
    done = invoke("check", "--fetch")
    assert done.exit_code == 0 and done.stdout.rstrip().endswith("fits") and "downloading" in done.stderr


def test_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models.layers.linear import native_works

    native_works()  # compiles kernels when it is first asked; they shall not lie in the cache that is measured here
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "file").write_bytes(b"x" * 2**19)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "one").write_bytes(b"x" * 2**19)
    report = json.loads(invoke("env", "--json").stdout)
    assert report["versions"]["slipstream"] == slipstream.__version__ and report["versions"]["torch"]
    assert report["cpu"]["torch threads"] >= 1 and isinstance(report["cpu"]["MKL packed products"], bool)
    assert report["cache"]["directory"] == str(tmp_path) and report["cache"]["size"] == "1.0 MiB"
    assert report["cache"]["packed weights"].startswith("1 models, 0.5 MiB")
    assert report["cache"][builtin.DEFAULT_MODEL].startswith("not downloaded yet")
    assert report["environment"]["SLIPSTREAM_CACHE"] == str(tmp_path)
    done = invoke("env")
    assert done.exit_code == 0 and "capability" in done.stdout and "secret" not in done.stdout
