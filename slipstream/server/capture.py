"""Captures what was asked and answered, for `bench`, `tune` and `train`: off the request path, in a thread of its own.

Requests hand a record over and go on. Where the disk or the hook is slower than the traffic, records are dropped.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from slipstream.async_llm import AsyncLLM
from slipstream.drafters.retrieval.corpus import fingerprint
from slipstream.errors import OptionError
from slipstream.sequence import Request
from slipstream.text import Tokenizer
from slipstream.train.captures import CaptureStore, Record, open_captures, record_of
from slipstream.types import Completion

log = logging.getLogger("slipstream")

Hook = Callable[[Record], Record | None]

_WAITING = 1024  # records that may wait for the disk
_POLL_S = 1.0
_TEXTS = {"prompt": "prompt_token_ids", "answer": "token_ids"}


def load_hook(name: str) -> Hook:
    """The function that `package.module:function` names; the working directory is searched too."""
    module, _, function = name.partition(":")
    hint = "as in --capture-hook package.module:function"
    sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a user's module raises
        raise OptionError(f"--capture-hook {name!r} cannot be loaded: {error}", hint=hint) from None
    finally:
        sys.path.pop()
    if not callable(found):
        raise OptionError(f"--capture-hook {name!r} is not a function", hint=hint)
    hook: Hook = found
    return hook


class Capture:
    """Writes the answered requests of one server into a folder. OptionError if that cannot be written."""

    def __init__(self, folder: Path, most_bytes: int, hook: Hook | None = None) -> None:
        self._folder = folder
        self._most = most_bytes
        self._hook = hook
        self._lock: IO[str] = open_captures(folder)
        self._records: queue.Queue[Record | None] = queue.Queue(_WAITING)
        self._warned: set[str] = set()
        self._tokenizer: Tokenizer | None = None
        self._vocab_size = 0
        self._thread: threading.Thread | None = None

    def start(self, llm: AsyncLLM) -> None:
        """Begin to write. OptionError if the folder has the answers of another model."""
        self._tokenizer, self._vocab_size = llm.tokenizer, llm.model.config.vocab_size
        store = CaptureStore(
            self._folder,
            self._most,
            model=llm.model.name,
            fingerprint=llm.model.fingerprint,
            vocab_size=self._vocab_size,
            tokenizer=fingerprint(llm.tokenizer, self._vocab_size),
        )
        self._thread = threading.Thread(target=self._write, args=[store], name="slipstream-capture", daemon=True)
        self._thread.start()

    def add(self, request: Request, completion: Completion) -> None:
        """Hand over an answer that came to its end. Returns at once, whatever the disk does."""
        if not completion.token_ids:
            return
        record = record_of(request.prompt_ids, request.params.temperature, completion)
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._warn("queue", "capture: records are dropped, the disk or the hook is too slow")

    def close(self) -> None:
        """Write the records that wait, and end the thread."""
        if self._thread is not None:
            with suppress(queue.Full):
                self._records.put(None, timeout=5.0)
            self._thread.join(10.0)
            self._thread = None
        self._lock.close()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _write(self, store: CaptureStore) -> None:
        while True:
            try:
                record = self._records.get(timeout=_POLL_S)
            except queue.Empty:
                if store.due:
                    self._try(store.commit)
                continue
            if record is None:
                self._try(store.close)
                return
            kept = record if self._hook is None else self._redacted(record, self._hook)
            if kept is not None:
                self._try(store.add, kept)

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except OSError as error:
            self._warn("disk", f"capture: {self._folder} cannot be written: {error.strerror or error}")

    def _redacted(self, record: Record, hook: Hook) -> Record | None:
        """The record that the hook returns, as token ids; None drops it."""
        tokenizer, shown = self._tokenizer, copy.deepcopy(record)
        texts = {}
        if tokenizer is not None:
            texts = {text: tokenizer.decode(record[ids], skip_special=False) for text, ids in _TEXTS.items()}
        try:
            found = hook({**shown, **texts})
            if found is None:
                return None
            for text, before in texts.items():
                if tokenizer is not None and found[text] != before:
                    found[_TEXTS[text]] = tokenizer.encode(found[text], add_special=False)
            return _checked({name: value for name, value in found.items() if name not in texts}, self._vocab_size)
        except Exception as error:  # whatever a user's function does, the record alone is lost
            self._warn("hook", f"capture: the hook failed, and the record is dropped: {error!r}")
            return None

    def _warn(self, kind: str, text: str) -> None:
        """Log a warning once per kind of failure."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


def _checked(record: Record, vocab_size: int) -> Record:
    """A record of a hook; ValueError for what the files have no place for."""
    for name in _TEXTS.values():
        ids = record[name]
        if not ids or not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            raise ValueError(f"{name} is not a list of token ids")
    if not isinstance(record.get("category", ""), str):
        raise ValueError("category is not a string")
    record["temperature"] = float(record["temperature"])
    json.dumps(record)
    return record
