"""Models from the Hugging Face hub.

A reference is `owner/name`, `owner/name/file.gguf` or `owner/name:QUANT` (the one GGUF file of that quantisation), each
with an optional `@revision` at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import ModelNotFound

Result = TypeVar("Result")

# Every file that a loader may read, and no second copy of the weights in another format.
WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
]
UNWANTED = ["*/*", "consolidated*.safetensors"]

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
PATTERN = re.compile(
    rf"(?P<repository>{WORD}/{WORD})(?:/(?P<file>[^@:]+\.gguf)|:(?P<quant>[A-Za-z0-9_]+))?(?:@(?P<revision>.+))?"
)


@dataclass(frozen=True)
class Reference:
    """A parsed reference."""

    repository: str
    file: str | None
    quant: str | None
    revision: str | None


def is_reference(text: str) -> bool:
    """Whether `text` has the form of a reference; it need not exist."""
    return PATTERN.fullmatch(text) is not None


def parse(text: str) -> Reference:
    """The parts of a reference; ModelNotFound if `text` is not one."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ModelNotFound(
            f"{text!r} is not a hub id", hint="write owner/name, owner/name/file.gguf or owner/name:QUANT"
        )
    return Reference(**match.groupdict())


def download(repo_id: str, revision: str | None = None) -> Path:
    """The local directory or GGUF file of a reference, from the hub's cache if it is complete there."""
    reference = parse(repo_id)
    revision = revision or reference.revision
    hub = _hub()
    file = reference.file
    if reference.quant:
        file = _pick(reference, _gguf_files(hub, reference.repository, revision))
    if file:
        return Path(_ask(repo_id, hub.hf_hub_download, reference.repository, file, revision=revision))
    folder = fetch(repo_id, WANTED, revision)
    if not (folder / "config.json").exists():
        files = _gguf_files(hub, reference.repository, revision)
        cure = f"name one of its files: {reference.repository}/{files[0]}" if files else "check the name"
        raise ModelNotFound(f"{repo_id} on the hub has no config.json", hint=cure)
    return folder


def fetch(repo_id: str, wanted: list[str], revision: str | None = None) -> Path:
    """The local directory with the files of a repository's top folder that have one of these names."""
    reference, hub = parse(repo_id), _hub()
    options = {"revision": revision or reference.revision, "allow_patterns": wanted, "ignore_patterns": UNWANTED}
    return Path(_ask(repo_id, hub.snapshot_download, reference.repository, **options))


def _gguf_files(hub: Any, repository: str, revision: str | None) -> list[str]:
    """The GGUF files of a repository; those in the cache if the hub cannot be reached."""
    try:
        files: list[str] = hub.list_repo_files(repository, revision=revision)
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        raise _explain(repository, error) from error
    except Exception:  # offline by choice or by accident; the exception depends on the client's transport
        # No patterns: the folder is needed, even if little of the repository is in it.
        options: dict[str, Any] = {"revision": revision, "local_files_only": True, "allow_patterns": []}
        folder = Path(_ask(repository, hub.snapshot_download, repository, **options))
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    return sorted(file for file in files if file.endswith(".gguf"))


def _pick(reference: Reference, files: list[str]) -> str:
    """The one file whose name ends in the requested quantisation."""
    ending = re.compile(rf"(?:^|[-._/]){re.escape(str(reference.quant))}\.gguf", re.IGNORECASE)
    matching = [file for file in files if ending.search(file)]
    if len(matching) == 1:
        return matching[0]
    count = "no" if not matching else "more than one"
    choices = ", ".join(matching or files) or "none"
    raise ModelNotFound(
        f"{reference.repository} has {count} GGUF file for {reference.quant}", hint=f"GGUF files: {choices}"
    )


def _ask(reference: str, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Calls a function of the hub's client; any exception becomes one line."""
    try:
        return function(*args, **options)
    except Exception as error:
        # Its transport's exceptions changed twice (requests, httpx, a fork), so they are not named.
        raise _explain(reference, error) from error


def _explain(reference: str, error: Exception) -> ModelNotFound:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelNotFound(f"{reference} is gated", hint="ask for access on its page and log in with `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFound(
            f"there is no {reference} on the hub, or it is private",
            hint="check the name, or log in with `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{reference}: no such revision on the hub", hint="check the part after the @")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return ModelNotFound(
            f"{reference} is not in the local cache and the hub cannot be reached",
            hint="check the network and HF_HUB_OFFLINE, or give the path of a model",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFound(f"{reference}: no such file in that repository", hint="check the file's name")
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ModelNotFound(f"cannot download {reference}: {cause}", hint="try again, or give the path of a model")


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise ModelNotFound(
            "models from the hub need the huggingface_hub package",
            hint="pip install huggingface_hub, or give the path of a model",
        ) from None
    return huggingface_hub
