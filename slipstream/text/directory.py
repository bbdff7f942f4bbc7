"""Reads the tokenizer of a Hugging Face model directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptFile, ModelNotFound, UnsupportedModel
from slipstream.text.chat import one_line
from slipstream.text.tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "tekken.json")


def tokenizer_from_directory(path: str | os.PathLike[str]) -> Tokenizer:
    """See `Tokenizer.from_directory`.

    tokenizer.json's post-processor decides whether a text begins with BOS; `add_bos_token` in tokenizer_config.json
    often contradicts it and is ignored, as in transformers.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelNotFound(f"no directory {str(directory)!r}")
    settings = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    backend, implied = _read_backend(directory)
    settings = {**implied, **settings}
    named = {name: content for name in _NAMED if (content := _content(settings.get(name)))}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, Mapping):  # named tokens, which templates may use
        named |= {str(name): content for name, value in extra.items() if (content := _content(value))}
    _declare_added(backend, settings, named)

    configs = [_read_json(directory / "generation_config.json"), _read_json(directory / "config.json")]
    configs += [text for config in configs if isinstance(text := config.get("text_config"), dict)]
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    if bos is None:
        bos = next((id for config in configs for id in _ids(config.get("bos_token_id"))), None)
    eos = [id for config in configs for id in _ids(config.get("eos_token_id"))]
    endings = [content for name in ("eos_token", "eot_token") if (content := _content(settings.get(name)))]
    eos += [id for content in endings if (id := backend.token_to_id(content)) is not None]
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=eos,
        chat_template=_chat_template(directory, settings),
        special_tokens=named,
    )


def _read_backend(directory: Path) -> tuple[Any, Mapping[str, str]]:
    """The backend, and the special tokens that its class implies if the files do not name them."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _convert_slow(directory)
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(file.read_text(encoding="utf-8")), {}
    except Exception as error:  # the library raises bare exceptions
        raise CorruptFile(f"{str(file)!r} is not a tokenizer: {one_line(error)}") from error


def _convert_slow(directory: Path) -> tuple[Any, Mapping[str, str]]:
    """Older formats (SentencePiece models, vocab and merges), converted by transformers."""
    hint = "save it once with transformers' AutoTokenizer, which writes tokenizer.json"
    if not any((directory / name).is_file() for name in SLOW_FILES):
        raise ModelNotFound(f"no tokenizer in {str(directory)!r}", hint="a model directory has a tokenizer.json")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        what = f"the tokenizer in {str(directory)!r} is of an older format, which needs the transformers package"
        raise UnsupportedModel(what, hint="pip install 'slipstream[hf]'") from None
    try:
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return converted.backend_tokenizer, converted.special_tokens_map
    except Exception as error:  # anything: a missing config, a garbled file
        what = f"the tokenizer in {str(directory)!r} cannot be converted: {one_line(error)}"
        raise CorruptFile(what, hint=hint) from error


def _declare_added(backend: Any, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Make the backend agree with tokenizer_config.json on which tokens are matched whole and which are special."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    # In the order of their ids: a token that the backend lacks gets the next free id.
    backend.add_tokens([token for id, token in sorted(_declared(settings).items()) if known.get(id) != token])
    extra = [*_list(settings.get("additional_special_tokens")), *_list(settings.get("extra_special_tokens"))]
    contents = [*named.values(), *filter(None, map(_content, extra))]
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [content for content in dict.fromkeys(contents) if content not in present]
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def _declared(settings: Mapping[str, Any]) -> dict[int, Any]:
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        return {
            int(id): AddedToken(fields["content"], **{flag: fields[flag] for flag in flags if flag in fields})
            for id, fields in (settings.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"tokenizer_config.json has a bad added_tokens_decoder: {one_line(error)}") from error


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template; a file of its own wins over tokenizer_config.json. Of several named ones, "default"."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CorruptFile(f"{str(file)!r} cannot be read: {one_line(error)}") from error
    template = _read_json(directory / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{str(file)!r} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{str(file)!r} should hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with its flags."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) and content else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _ids(value: Any) -> Iterable[int]:
    """An id is written as a number, as a list of numbers, or as null."""
    return [id for id in (value if isinstance(value, list) else [value]) if type(id) is int and id >= 0]
