"""The state of a server: its engine from loading to draining, and what every route needs of it."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from slipstream.async_llm import AsyncLLM
from slipstream.server.capture import Capture
from slipstream.server.config import ServerConfig
from slipstream.server.failures import ApiError
from slipstream.server.metrics import Metrics
from slipstream.server.parsing import Parsing, parser_factory
from slipstream.text import Tokenizer

log = logging.getLogger("slipstream")
T = TypeVar("T")
P = ParamSpec("P")

_LARGE = 20_000  # characters (or tokens) of a prompt that take long enough to keep them off the event loop
_POLL_S = 0.05


class Service:
    """One engine and the requests to it. `opening` loads the engine; it is called once, in a thread of its own."""

    def __init__(self, config: ServerConfig, opening: Callable[[], AsyncLLM], capture: Capture | None = None) -> None:
        self.config = config
        self.capture = capture
        self.metrics = Metrics(config.names[0])
        self.created = int(time.time())
        self.failure: BaseException | None = None  # of loading
        self.draining = False
        self.active = 0  # requests that are being answered
        self._opening = opening
        self._llm: AsyncLLM | None = None
        self._parsing: Parsing | None = None

    async def load(self) -> None:
        """Load the engine in the background; until then requests are refused with a time to retry."""
        try:
            await asyncio.to_thread(self.open)
        except BaseException as error:
            self.failure = error

    def open(self) -> None:
        """Load the engine and warm it up."""
        llm = self._opening()
        template = llm.tokenizer.chat_template if llm.tokenizer is not None else None
        self._parsing = parser_factory(self.config.tool_parser, self.config.reasoning_parser, template)
        llm.warm_up()
        if self.capture is not None:
            self.capture.start(llm)
        # Objects made so far are kept. A full garbage collection would scan them and stop all streams for 100 ms.
        gc.collect()
        gc.freeze()
        self._llm = llm

    # -- what routes ask for ------------------------------------------------------------------------------------------

    @property
    def llm(self) -> AsyncLLM:
        """The engine; refused before it is warm, while the server shuts down, and once the engine is beyond repair."""
        if self._llm is None:
            raise ApiError(503, "the model is being loaded", code="loading", headers={"retry-after": "1"})
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "1"})
        if not self._llm.alive:
            raise ApiError(503, "the engine has failed", code="engine_failed")
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine once it is loaded, in whatever state."""
        return self._llm

    @property
    def parsing(self) -> Parsing:
        """What makes the parser of each choice of a chat."""
        assert self._parsing is not None, "requests come after loading"
        return self._parsing

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; a model without one is served by token ids alone."""
        return self.llm.get_tokenizer()

    def check_model(self, name: str | None) -> str:
        """The served name; another name is not found."""
        if name is None or name in self.config.names:
            return name or self.config.names[0]
        served = ", ".join(self.config.names)
        raise ApiError(404, f"there is no model {name!r} (served: {served})", param="model", code="model_not_found")

    async def off_loop(self, size: int, action: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run an action, in another thread if its input is large: other streams must not wait for it."""
        if size < _LARGE:
            return action(*args, **named)
        return await asyncio.to_thread(functools.partial(action, *args, **named))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request from the first byte to the last."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    # -- the end ------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Accept nothing more, and wait until all requests are answered; what takes too long ends with an error."""
        self.draining = True
        until = time.monotonic() + self.config.shutdown_timeout
        while self.active and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        if self.active:
            log.warning("%d requests did not end within --shutdown-timeout and are ended", self.active)
        self.close()
        while self.active and time.monotonic() < until + 5.0:  # their last events are on the way
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """End the engine, and with it all requests."""
        if self._llm is not None:
            self._llm.close()
            gc.unfreeze()
        if self.capture is not None:
            self.capture.close()
