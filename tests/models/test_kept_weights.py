"""Quantised weights in the cache folder: the same bits as a new conversion, or a new conversion."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models import kept_weights, load, weights
from slipstream.models.decoder import Decoder
from slipstream.models.formats.gguf_file import GGUFCheckpoint
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.kept_weights import FOLDER, WeightsFile, kept_files
from slipstream.models.layers.linear import int8_kernels_work
from slipstream.models.layers.quantized import packed_of
from tests.gguf_files import Q, write_dense
from tests.models.test_families import build
from tests.tiny import tiny_directory

pytestmark = pytest.mark.skipif(not int8_kernels_work(), reason="no kernels for 8-bit products")
MODES = ("int8", "int4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder; models are worth keeping however small they are."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_WORTH_KEEPING", 0)
    return tmp_path / "cache" / FOLDER


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The matrices that were read."""
    names: list[str] = []
    for kind in (HFCheckpoint, GGUFCheckpoint):
        original = kind.weight

        def weight(self: object, name: str, original: Callable[..., torch.Tensor] = original) -> torch.Tensor:
            found = original(self, name)
            if found.dim() > 1 and not name.endswith("router"):
                names.append(name)
            return found

        monkeypatch.setattr(kind, "weight", weight)
    return names


def loaded(path: Path, mode: str = "int8") -> Decoder:
    model, _ = load.load_model(path, dtype="float32", device="cpu", quantize=mode)
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder) -> torch.Tensor:
    cache = PagedCache(4)
    model.add_store(cache, "kv")
    table = cache.open([])
    cache.reserve(table, 200)
    with torch.inference_mode():
        return model.forward(cache, "kv", [tree_segment(table, 0, [i % 30 for i in range(40)], None)]).logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3", "mixtral", "gemma2"])
def test_a_second_start_reads_no_matrix_and_has_the_same_bits(
    family: str, mode: str, tmp_path: Path, reads: list[str]
) -> None:
    build(family, tmp_path / "model", hidden_size=64, intermediate_size=128)
    made = loaded(tmp_path / "model", mode)
    assert reads
    reads.clear()
    again = loaded(tmp_path / "model", mode)
    assert not reads
    assert again.fingerprint == made.fingerprint
    assert torch.equal(logits(again), logits(made))
    assert torch.equal(again.embed(torch.arange(30)), made.embed(torch.arange(30)))
    for one, other in zip(made.layers, again.layers, strict=True):
        first, second = packed_of(one.qkv), packed_of(other.qkv)
        assert first is not None and second is not None
        assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)


def test_a_conversion_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(weights.log, "info", lambda text, *facts: said.append(text % facts))
    for _ in range(2):
        loaded(tiny_directory(seed=11), "int4")
    assert len(said) == 1 and re.match(r"converting \S+ to int4 \(cached for later starts, about \d+ s\)", said[0])


def test_a_gguf_file_wherever_it_lies(tmp_path: Path, reads: list[str], folder: Path) -> None:
    path = write_dense(tmp_path / "one.gguf", kind=Q.Q4_0).close()
    made = loaded(path)
    moved = path.rename(tmp_path / "two.gguf")
    reads.clear()
    assert torch.equal(logits(loaded(moved)), logits(made))
    assert not reads
    os.utime(moved, (1, 1))  # it may have been modified
    loaded(moved)
    assert reads
    assert len(list(folder.iterdir())) == 1, "what is of no use any more is replaced"


@pytest.mark.parametrize("damage", ["cut", "header", "codes", "empty", "zeros", "text"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path, reads: list[str], folder: Path) -> None:
    build("llama2", tmp_path / "model", hidden_size=64, intermediate_size=128)
    made = loaded(tmp_path / "model")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    half = len(whole) // 2
    file.write_bytes(
        {
            "cut": whole[:half],
            "header": whole[:80] + b"x" + whole[81:],
            "codes": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
            "empty": b"",
            "zeros": bytes(len(whole)),
            "text": b"nothing of the kind\n",
        }[damage]
    )
    reads.clear()
    assert torch.equal(logits(loaded(tmp_path / "model")), logits(made))
    assert reads
    assert file.read_bytes() == whole


def test_every_length_is_reported(tmp_path: Path, folder: Path) -> None:
    path = write_dense(tmp_path / "one.gguf", kind=Q.Q4_0).close()
    loaded(path)
    (file,) = folder.iterdir()
    whole, weights_file = file.read_bytes(), WeightsFile([path], "int8")
    assert weights_file.load() is not None
    for length in range(0, len(whole), len(whole) // 50):
        file.write_bytes(whole[:length])
        assert weights_file.load() is None, length


def test_where_nothing_can_be_kept(tmp_path: Path, folder: Path) -> None:
    build("llama2", tmp_path / "model", hidden_size=64, intermediate_size=128)
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    first, second = logits(loaded(tmp_path / "model")), logits(loaded(tmp_path / "model"))
    assert torch.equal(first, second)


def test_no_room_no_file(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama2", tmp_path / "model", hidden_size=64, intermediate_size=128)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(kept_weights.shutil, "disk_usage", lambda folder: usage)
    loaded(tmp_path / "model")
    assert not list(folder.iterdir())


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama2", tmp_path / "model", hidden_size=64, intermediate_size=128)

    def interrupt(tensor: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kept_weights, "_sum", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loaded(tmp_path / "model")
    assert not list(folder.iterdir())


def test_what_is_kept_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tiny_directory(seed=number) for number in range(3)]
    loaded(paths[0])
    size = kept_files()[0].stat().st_size
    monkeypatch.setattr(kept_weights, "MOST_BYTES", 2 * size + 1000)
    loaded(paths[1])
    first, second = kept_files()
    now = time.time()
    os.utime(first, (now, now))  # used since
    os.utime(second, (now - 9, now - 9))
    (folder / ".killed").write_text("half a file")
    os.utime(folder / ".killed", (1, 1))
    loaded(paths[2])
    assert len(kept_files()) == 2 and first in kept_files() and second not in kept_files()
    assert not (folder / ".killed").exists()


def test_small_models_are_not_kept(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    build("llama2", tmp_path / "model", hidden_size=64, intermediate_size=128)
    loaded(tmp_path / "model")
    assert not folder.exists()
