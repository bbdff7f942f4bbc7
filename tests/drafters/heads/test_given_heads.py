"""A head of another project, given as a checkpoint: recognised by its layout, converted, and cached."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_drafter import HeadDrafter
from slipstream.drafters.interchange import import_drafter
from slipstream.drafters.interchange.foreign import read_foreign
from slipstream.errors import ModelNotFound, OptionError, SlipstreamError, UnsupportedModel
from tests.foreign_heads import (
    eagle_weights,
    folder,
    medusa_weights,
    original_config,
    speculators_config,
    target_directory,
    target_llm,
    target_view,
)
from tests.heads import random_head
from tests.invoking import invoke
from tests.tiny import tiny_llm

HOW = SamplingParams(max_tokens=10, seed=4, ignore_eos=True)
PROMPTS = [[5, 9, 17, 3] * 10, [44]]
LAYOUTS: dict[str, tuple[str, dict[str, Any] | None, dict[str, torch.Tensor], str]] = {
    "original": ("eagle3", original_config(), eagle_weights("midlayer."), "pytorch_model.bin"),
    "speculators": ("eagle3", speculators_config(), eagle_weights(), ""),
    "published": ("medusa", {"medusa_num_heads": 3}, medusa_weights(), "medusa_lm_head.pt"),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "drafters"


def laid_out(layout: str) -> tuple[str, Path]:
    """The method, and a directory as the other project would have written it."""
    method, config, weights, pickled = LAYOUTS[layout]
    return method, folder(config, weights, pickled)


def checkpoint_of(llm: LLM) -> head_checkpoint.Trained:
    assert isinstance(llm.drafter, HeadDrafter)
    return llm.drafter.trained


@each_layout
def test_it_drafts_what_it_drafts_after_an_import(layout: str, tmp_path: Path, own_cache: Path) -> None:
    method, place = laid_out(layout)
    head_checkpoint.save(tmp_path / "ours", import_drafter(read_foreign(place), target_view(), "tiny"))
    drafted = []
    for given in (place, tmp_path / "ours"):
        llm = LLM(target_directory(), speculate={"method": method, "model": str(given), "num_speculative_tokens": 3})
        outputs = llm.generate(PROMPTS, HOW)
        assert llm.engine.draft_faults == 0
        drafted.append([(o.token_ids, o.stats.drafted, o.stats.accepted) for o in outputs])
    assert drafted[0] == drafted[1] and drafted[0][0][1] > 0
    assert len(list(own_cache.iterdir())) == 1


def test_the_second_start_finds_it_and_other_content_is_another(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, place = laid_out("speculators")
    first = checkpoint_of(target_llm(f"eagle3:checkpoint={place}"))
    copy = folder(*LAYOUTS["speculators"][1:3])
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.drafters.interchange.given.read_foreign", lambda place: pytest.fail("read again"))
        again = checkpoint_of(target_llm(f"eagle3:checkpoint={copy}"))
    assert all(torch.equal(first.weights[name], weight) for name, weight in again.weights.items())
    weights = LAYOUTS["speculators"][2]
    save_file({**weights, "norm.weight": weights["norm.weight"] + 1}, copy / "model.safetensors")
    other = checkpoint_of(target_llm(f"eagle3:checkpoint={copy}"))
    assert torch.equal(other.weights["norm"], first.weights["norm"] + 1)
    assert len(list(own_cache.iterdir())) == 2


def test_what_cannot_be_read_is_one_line_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    def refused(kind: type[SlipstreamError], given: object, *words: str, method: str = "eagle3") -> None:
        with pytest.raises(kind) as caught:
            target_llm(f"{method}:checkpoint={given}")
        text = str(caught.value)
        assert "\n" not in text and all(word in text for word in words), text
        assert not own_cache.exists() or not list(own_cache.iterdir())

    refused(ModelNotFound, tmp_path / "nowhere", "nowhere holds no trained drafter", "EAGLE-3")
    refused(ModelNotFound, tmp_path, "holds no trained drafter")
    refused(ModelNotFound, "owner/name:Q4_0", "holds no trained drafter")
    _, heads = laid_out("published")
    refused(OptionError, heads, str(heads), "'medusa', not 'eagle3'")
    refused(OptionError, heads, "'medusa', not 'mtp'", method="mtp")
    refused(UnsupportedModel, folder({}, {"x": torch.zeros(2)}), "not a known drafter")
    _, place = laid_out("speculators")
    with pytest.raises(SlipstreamError, match=f"{place}: d2t names tokens outside the target's 50"):
        tiny_llm(vocab_size=50, speculate=f"eagle3:checkpoint={place}")
    target_llm(f"eagle3:checkpoint={place}")
    with pytest.raises(OptionError, match=f"{place} holds a drafter of kind 'eagle3', not 'medusa'"):
        target_llm(f"medusa:checkpoint={place}")
    shutil.rmtree(own_cache.parent)
    (tmp_path / "cache").write_text("a file where a folder has to be")
    with pytest.raises(OptionError, match="cannot keep"):
        target_llm(f"eagle3:checkpoint={place}")


def test_a_check_says_that_it_is_read_later() -> None:
    _, place = laid_out("speculators")
    model = str(target_directory())
    later = invoke("check", "-m", model, "--speculate", f"eagle3:checkpoint={place}")
    assert later.exit_code == 0 and "its memory is not counted here" in later.stdout


def in_hub_cache(home: Path, name: str, source: Path) -> None:
    """Let the hub's client find the files of a directory as those of `owner/name`."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = home / "hub" / f"models--owner--{name}"
    shutil.copytree(source, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_a_hub_id_is_fetched(tmp_path: Path) -> None:
    """The real client resolves a cache offline; in a process of its own, since it reads its settings on import."""
    for name, layout in (("eagle", "original"), ("spec", "speculators"), ("heads", "published")):
        in_hub_cache(tmp_path, name, laid_out(layout)[1])
    ours = tmp_path / "ours"
    head_checkpoint.save(ours, import_drafter(read_foreign(laid_out("speculators")[1]), target_view(), "tiny"))
    in_hub_cache(tmp_path, "ours", ours)
    script = (
        "import sys\n"
        "from slipstream import LLM\n"
        "from slipstream.errors import SlipstreamError\n"
        "for given in sys.argv[2:]:\n"
        "    method, _, head = given.partition('=')\n"
        "    try:\n"
        "        llm = LLM(sys.argv[1], speculative_config={'method': method, 'model': head})\n"
        "        print(llm.drafter.name, len(llm.drafter.vocab))\n"
        "    except SlipstreamError as error:\n"
        "        print(error)\n"
    )
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "SLIPSTREAM_CACHE": str(tmp_path / "cache")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings
    given = [
        "eagle3=owner/eagle",
        "eagle3=owner/spec@main",
        "medusa=owner/heads",
        "eagle3=owner/ours",
        "eagle3=owner/no",
    ]
    command = [sys.executable, "-c", script, str(target_directory()), *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["eagle3 61", "eagle3 61", "medusa 97", "eagle3 61"], done.stderr
    assert len(lines) == 5 and re.search("owner/no is not in the local cache", lines[4])


def test_our_own_checkpoint_is_used_where_it_lies(own_cache: Path) -> None:
    place = random_head("eagle3")
    llm = tiny_llm(context=300, characters=True, speculate={"method": "eagle3", "model": str(place)})
    assert checkpoint_of(llm).method == "eagle3" and not own_cache.exists()
