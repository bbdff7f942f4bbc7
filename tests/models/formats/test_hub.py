"""The hub: what a reference means, which file it picks, and one line when the hub refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.errors import ModelNotFound
from slipstream.models.formats import hub
from slipstream.models.formats.resolve import open_checkpoint
from tests.checkpoints import refused


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("owner/name", ("owner/name", None, None, None)),
        ("owner/name@refs/pr/1", ("owner/name", None, None, "refs/pr/1")),
        ("owner/name:Q4_K_M", ("owner/name", None, "Q4_K_M", None)),
        ("owner/name/sub/x.gguf@main", ("owner/name", "sub/x.gguf", None, "main")),
    ],
)
def test_references(text: str, parts: tuple[str | None, ...]) -> None:
    found = hub.parse(text)
    assert (found.repository, found.file, found.quant, found.revision) == parts


@pytest.mark.parametrize("text", ["name", "a/b/c", "a/b/c.txt", "/a/b", "../b", "a//b", "a/b:", "a/b@", "", "a b/c"])
def test_what_is_no_reference(text: str) -> None:
    assert not hub.is_reference(text)
    with refused(ModelNotFound, repr(text)):
        hub.parse(text)
    with refused(ModelNotFound, repr(text), "smollm2-135m"):
        open_checkpoint(text)


def hub_error(name: str) -> Exception:
    import huggingface_hub.errors as errors

    kind = getattr(errors, name)
    if not issubclass(kind, errors.HfHubHTTPError):
        return kind("a long\nstory")
    return kind("a long\nstory", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", ["check the name", "log in"]),
        ("GatedRepoError", ["gated", "log in"]),
        ("RevisionNotFoundError", ["revision"]),
        ("LocalEntryNotFoundError", ["cannot be reached", "path"]),
        ("OfflineModeIsEnabled", ["HF_HUB_OFFLINE"]),
        ("RemoteEntryNotFoundError", ["no such file"]),
        ("HfHubHTTPError", ["HfHubHTTPError", "a long story"]),
        ("HFValidationError", ["HFValidationError"]),
    ],
)
def test_errors_of_the_hub_are_one_line(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> None:
        raise hub_error(name)

    for function in ("snapshot_download", "hf_hub_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, function, fail)
    for reference in ("owner/name", "owner/name/x.gguf"):
        with refused(ModelNotFound, reference, *words):
            open_checkpoint(reference)
    with refused(ModelNotFound, "owner/name"):
        open_checkpoint("owner/name:Q4_0")


def test_the_hub_client_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(ModelNotFound, "pip install huggingface_hub"):
        open_checkpoint("owner/name")


def test_picking_a_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    files = ["README.md", "m-Q4_K_M.gguf", "m.q8_0.gguf", "m-f16.gguf", "other-f16.gguf", "m-IQ4_K_M.gguf"]
    asked = []

    def one(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.download("owner/name:q4_k_m@v1") == tmp_path / "m-Q4_K_M.gguf"
    assert hub.download("owner/name:Q8_0", revision="v2") == tmp_path / "m.q8_0.gguf"
    assert asked == [("owner/name", "m-Q4_K_M.gguf", "v1"), ("owner/name", "m.q8_0.gguf", "v2")]
    with refused(ModelNotFound, "more than one", "other-f16.gguf"):
        hub.download("owner/name:F16")
    with refused(ModelNotFound, "no GGUF file for Q2_K", "m-Q4_K_M.gguf"):
        hub.download("owner/name:Q2_K")
    with refused(ModelNotFound, "no config.json", "owner/name/m-IQ4_K_M.gguf"):
        hub.download("owner/name")


def test_a_hub_cache_is_enough(llama: Path, small_gguf: Path, tmp_path: Path) -> None:
    """The real client resolves a cache offline; in a process of its own, since it reads its settings on import."""
    for repository, files in (("models--owner--tiny", llama.iterdir()), ("models--owner--gg", [small_gguf])):
        commit = "0123456789abcdef0123456789abcdef01234567"
        folder = tmp_path / "hub" / repository
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        for file in files:
            shutil.copy(file, snapshot / file.name.replace("small", "small-Q4_0"))
    script = (
        "from slipstream.errors import ModelNotFound\n"
        "from slipstream.models.formats.resolve import open_checkpoint\n"
        "import sys\n"
        "for model in sys.argv[1:]:\n"
        "    try:\n"
        "        print(open_checkpoint(model).name, 'opened')\n"
        "    except ModelNotFound as error:\n"
        "        print(error)\n"
    )
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings
    models = ["owner/tiny", "owner/gg:q4_0", "owner/gg/small-Q4_0.gguf", "owner/gg", "owner/absent", "owner/absent:F16"]
    command = [sys.executable, "-c", script, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["owner/tiny opened", "owner/gg:q4_0 opened", "owner/gg/small-Q4_0.gguf opened"]
    assert "no config.json" in lines[3] and "owner/gg/small-Q4_0.gguf" in lines[3]
    assert all(re.search("not in the local cache", line) for line in lines[4:])
    assert len(lines) == 6
