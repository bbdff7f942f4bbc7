"""Trained drafters that are brought in: from a directory, a URL and the hub; what is refused; list and removal."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.drafters.composites.auto import available
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import DESCRIPTION, HASH, WEIGHTS
from slipstream.drafters.heads.installed import add, installed, remove
from slipstream.errors import CorruptFile, ModelNotFound, OptionError, SlipstreamError
from tests.heads import random_head
from tests.invoking import invoke
from tests.tiny import tiny_directory, tiny_llm


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder, empty."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafters"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A checkpoint of the tiny target, to be damaged at will."""
    return Path(shutil.copytree(random_head("eagle3"), tmp_path / "head"))


@pytest.fixture
def served(head: Path) -> Iterator[str]:
    """The URL of a directory with it."""
    handler = functools.partial(_Quiet, directory=str(head.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/head"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


def described(place: Path, **changes: Any) -> None:
    """Change what a checkpoint says of itself."""
    told = json.loads((place / DESCRIPTION).read_text())
    (place / DESCRIPTION).write_text(json.dumps({**told, **changes}))


def own() -> list[str]:
    return [drafter.name for drafter in installed() if drafter.own]


def test_a_directory_is_copied_and_found_by_name_and_by_auto(head: Path, folder: Path) -> None:
    llm = tiny_llm(context=300, characters=True)
    name = f"eagle3-{llm.model.fingerprint}"
    assert "eagle3" not in [spec.method for spec in available(llm.target)]
    added = add(str(head))
    assert added.place == folder / name and own() == [name]
    assert sorted(entry.name for entry in folder.iterdir()) == [name], "nothing half done is left"
    shutil.rmtree(head)
    assert "eagle3" in [spec.method for spec in available(llm.target)]
    llm.use("eagle3")
    assert llm.generate([[5, 9, 17]])[0].stats.drafting_steps > 0
    other = LLM(tiny_directory(1, context=300, characters=True), speculate=None)
    assert "eagle3" not in [spec.method for spec in available(other.target)]
    with pytest.raises(OptionError, match="no eagle3 drafter has been trained for this target"):
        other.use("eagle3")
    with pytest.raises(OptionError, match="this target is another"):
        other.use(f"eagle3:checkpoint={added.place}")


def test_a_list_says_where_a_drafter_came_from(head: Path) -> None:
    name = add(str(head)).name
    listed = json.loads(invoke("drafters", "--json").stdout)["trained"]
    assert listed[0]["name"] == name
    assert listed[0]["from"] == str(head) and listed[0]["target"] == "tiny" and listed[0]["method"] == "eagle3"
    assert {drafter["from"] for drafter in listed[1:]} == {"the package"}
    told = json.loads((installed()[0].place / DESCRIPTION).read_text())["added"]
    assert told["sha256"] == hashlib.sha256((head / WEIGHTS).read_bytes()).hexdigest()
    shown = invoke("drafters", "eagle3").stdout
    assert name in shown and str(head)[:20] in shown
    assert name not in invoke("drafters", "medusa").stdout


def test_the_command_adds_and_removes(head: Path) -> None:
    added = invoke("drafters", "add", str(head))
    assert added.exit_code == 0 and "--speculate eagle3" in added.stdout
    (name,) = own()
    again = invoke("drafters", "add", str(head))
    assert again.exit_code == 2 and "is there already" in again.stderr and f"remove {name}" in again.stderr
    assert invoke("drafters", "remove", name).exit_code == 0 and own() == []
    gone = invoke("drafters", "remove", name)
    assert gone.exit_code == 2 and "of your own" in gone.stderr
    for words in (["add"], ["remove", "a", "b"], ["eagle3", "medusa"]):
        assert invoke("drafters", *words).exit_code == 2


def test_what_came_with_the_package_is_not_removed() -> None:
    shipped = [drafter.name for drafter in installed() if not drafter.own]
    assert shipped
    with pytest.raises(OptionError, match="of your own"):
        remove(shipped[0])
    with pytest.raises(OptionError, match="of your own"):
        remove("../..")


def test_a_url_names_the_folder_of_both_files(served: str, folder: Path) -> None:
    added = add(served + "/")
    assert own() == [added.name] and added.summary()["from"] == served + "/"
    assert sorted(entry.name for entry in added.place.iterdir()) == [DESCRIPTION, WEIGHTS]
    assert head_checkpoint.load(added.place).method == "eagle3"


def test_a_url_without_the_files_is_refused_in_one_line(served: str) -> None:
    with pytest.raises(ModelNotFound, match="404"):
        add(served + "/no")
    with pytest.raises(ModelNotFound, match="cannot be fetched"):
        add("http://127.0.0.1:9/head")
    assert own() == []


def test_over_a_network_a_hash_is_wanted(served: str, head: Path) -> None:
    described(head, **{HASH: None})
    with pytest.raises(CorruptFile, match="names no weights_sha256"):
        add(served)
    assert add(str(head)).summary()["from"] == str(head), "of an earlier version, and on this machine"


def test_a_hub_id_is_fetched(head: Path, tmp_path: Path) -> None:
    """The real client resolves a cache offline; in a process of its own, since it reads its settings on import."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--owner--head"
    shutil.copytree(head, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings
    command = [sys.executable, "-m", "slipstream", "drafters", "add"]
    for given, code in (("owner/head", 0), ("owner/none", 2)):
        done = subprocess.run([*command, given], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
    assert [drafter.summary()["from"] for drafter in installed() if drafter.own] == ["owner/head"]


def rewritten(place: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other weights, with the right hash."""
    stored = load_file(place / WEIGHTS)
    change(stored)
    save_file(stored, place / WEIGHTS)
    described(place, **{HASH: hashlib.sha256((place / WEIGHTS).read_bytes()).hexdigest()})


def other_target(place: Path, **changes: Any) -> None:
    target = json.loads((place / DESCRIPTION).read_text())["target"]
    described(place, target={**target, **changes})


def flipped(place: Path) -> None:
    content = bytearray((place / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (place / WEIGHTS).write_bytes(content)


def nan(stored: dict[str, torch.Tensor]) -> None:
    stored["norm"][0] = float("nan")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of the weights": (flipped, "SHA-256"),
    "no weights": (lambda place: (place / WEIGHTS).unlink(), "cannot be read"),
    "another version": (lambda place: described(place, version=99), "format version 99"),
    "another format": (lambda place: described(place, format="thing"), "does not describe a drafter"),
    "no JSON": (lambda place: (place / DESCRIPTION).write_text("{"), "cannot be read"),
    "an unknown method": (lambda place: described(place, method="eagle9"), "none that is trained"),
    "a method without weights": (lambda place: described(place, method="suffix"), "none that is trained"),
    "an unknown setting": (lambda place: described(place, settings={"depths": 3}), "depths"),
    "a setting out of range": (lambda place: described(place, settings={"unroll": 0}), "unroll"),
    "a path as a fingerprint": (lambda place: other_target(place, fingerprint="../../escaped"), "no fingerprint"),
    "a smaller vocabulary": (lambda place: other_target(place, vocab_size=50), "not tokens of tiny"),
    "another number of draft tokens": (lambda place: described(place, draft_tokens=7), "not tokens of tiny"),
    "weights that are no numbers": (lambda place: rewritten(place, nan), "norm is not finite"),
    "a head of another project": (lambda place: (place / DESCRIPTION).unlink(), "slipstream import"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_a_sound_checkpoint_is_refused(damage: str, head: Path, folder: Path) -> None:
    change, words = DAMAGES[damage]
    change(head)
    with pytest.raises(SlipstreamError) as refused:
        add(str(head))
    assert words in f"{refused.value.message} {refused.value.hint}"
    assert not folder.exists() or not list(folder.iterdir())


def test_what_is_no_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no"):
        add(str(tmp_path / "nowhere"))
