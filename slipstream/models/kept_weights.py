"""A cache of quantised weights, as the kernels read them: a large model is converted once and memory-mapped later.

A file is a line of JSON and then the tensors of every GEMM, in the order in which the decoder makes them. It is used
only if complete: the line has its own hash, and a sum for every tensor. Its `key` has everything that the result
depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slipstream.folders import cache_directory
from slipstream.native.linear import Packed
from slipstream.native.machine import machine

FOLDER = "weights"  # of the cache folder
MOST_BYTES = 8 << 30  # size of all files together; the newest one always stays

_STALE = 3600  # age in seconds from which on a temporary file is abandoned
_ALIGNED = 64  # bytes: the alignment of tensors
_SAMPLES, _SAMPLE = 64, 4096  # samples of a model's file that identify it, and bytes of each


@dataclass(frozen=True)
class KeptPart:
    """One tensor of a GEMM, and its place in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the end of the header
    sum: int  # of its 64-bit words

    @property
    def size(self) -> int:
        """Bytes, padded to the alignment."""
        size = prod(self.shape) * self.type.itemsize
        return size - size % -_ALIGNED

    @property
    def type(self) -> torch.dtype:
        """The torch dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class KeptWeights:
    """All GEMMs of a model, in the order in which the decoder makes them."""

    fingerprint: str
    products: Sequence[Packed]


class WeightsFile:
    """The cached weights of one model in one mode."""

    def __init__(self, files: Sequence[Path], mode: str) -> None:
        """`files`: the files of the model."""
        content, ages = _identity(files)
        self.file = cache_directory() / FOLDER / f"{content[:24]}-{mode}"
        self._key = hashlib.sha256(repr((content, ages, mode, machine(), _sources())).encode()).hexdigest()

    def load(self) -> KeptWeights | None:
        """The cached weights, memory-mapped; None if there are none, or if they are incomplete or outdated."""
        try:
            with self.file.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch requires writable memory
            kept = self._parse(mapped)
            os.utime(self.file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return kept

    def _parse(self, mapped: mmap.mmap) -> KeptWeights:
        digest, line = mapped.readline().split(b" ", 1)
        if hashlib.sha256(line).hexdigest().encode() != digest:
            raise ValueError("the header is incomplete")
        header = json.loads(line)
        if header["key"] != self._key:
            raise ValueError("made from another model, or by another version")
        begin = mapped.tell() - mapped.tell() % -_ALIGNED

        def tensor(described: dict[str, Any]) -> torch.Tensor:
            part = KeptPart(**described)
            whole = torch.frombuffer(mapped, dtype=torch.uint8, offset=begin + part.start, count=part.size)
            if _sum(whole) != part.sum:
                raise ValueError("a tensor has another sum")
            return whole.view(part.type)[: prod(part.shape)].view(*part.shape)

        products = [Packed(tensor(p["codes"]), tensor(p["scales"]), p["paired"]) for p in header["products"]]
        return KeptWeights(header["fingerprint"], products)

    def keep(self, weights: KeptWeights) -> None:
        """Write the weights, all or nothing; if that fails, they are converted again at every start."""
        with contextlib.suppress(OSError):
            folder = self.file.parent
            folder.mkdir(parents=True, exist_ok=True)
            parts = [part for product in weights.products for part in (product.codes, product.scales)]
            if shutil.disk_usage(folder).free < 2 * sum(part.nbytes for part in parts):
                return
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
                try:
                    self._write(file, weights)
                    Path(file.name).replace(self.file)
                except BaseException:
                    Path(file.name).unlink()
                    raise
            _make_room(folder, self.file)

    def _write(self, file: BinaryIO | tempfile._TemporaryFileWrapper[bytes], weights: KeptWeights) -> None:
        place, described = 0, []
        for product in weights.products:
            entry: dict[str, Any] = {"paired": product.paired}
            for name in ("codes", "scales"):
                tensor: torch.Tensor = getattr(product, name)
                part = KeptPart(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place, _sum(tensor))
                entry[name] = asdict(part)
                place += part.size
            described.append(entry)
        header = {"key": self._key, "fingerprint": weights.fingerprint, "products": described}
        line = json.dumps(header).encode() + b"\n"
        file.write(hashlib.sha256(line).hexdigest().encode() + b" " + line)
        for product in weights.products:
            for tensor in (product.codes, product.scales):
                file.write(bytes(-file.tell() % _ALIGNED))
                file.write(_bytes(tensor).numpy().data)
        file.write(bytes(-file.tell() % _ALIGNED))
        file.flush()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _sum(tensor: torch.Tensor) -> int:
    """The sum of the 64-bit words, with overflow: as fast as memory is read."""
    content = _bytes(tensor)
    whole = len(content) - len(content) % 8
    rest = int.from_bytes(content[whole:].numpy().tobytes(), "little", signed=False)
    total = int(content[:whole].view(torch.int64).sum()) + rest
    return total & (1 << 64) - 1


def _identity(files: Sequence[Path]) -> tuple[str, list[int]]:
    """A digest of samples of the files, wherever they are, and their modification times."""
    digest, ages = hashlib.sha256(), []
    for path in files:
        facts = path.stat()
        ages.append(facts.st_mtime_ns)
        digest.update(f"{facts.st_size} ".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * facts.st_size // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest(), ages


def _sources() -> str:
    """The source code that decides the layout of weights."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parents[1] / "native"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def kept_files() -> list[Path]:
    """The cached files, least recently used first."""
    found = (cache_directory() / FOLDER).glob("[!.]*")
    return sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_mtime_ns)


def _make_room(folder: Path, newest: Path) -> None:
    """Remove the least recently used files until the rest fits, and temporary files of killed writers."""
    for left in folder.glob(".*"):
        if time.time() - left.stat().st_mtime > _STALE:
            left.unlink(missing_ok=True)
    files = [path for path in kept_files() if path != newest]
    total = sum(path.stat().st_size for path in (*files, newest))
    for path in files:
        if total <= MOST_BYTES:
            return
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
