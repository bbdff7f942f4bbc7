"""The public interface for asyncio: the engine of `LLM`, with streams that are awaited."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Self

from slipstream import checks, inputs
from slipstream.engine import EngineLoop
from slipstream.engine.mailbox import Message, Unread
from slipstream.engine.status import EngineStatus
from slipstream.errors import OptionError
from slipstream.inputs import Prompt
from slipstream.llm import EngineClient
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.sequence import Request
from slipstream.types import Delta, Output, SamplingParams


class AsyncLLM(EngineClient):
    """A model, drafters and a verifier, with `generate` and `chat` as asynchronous streams of deltas.

    The arguments are those of `LLM`. `max_queue`: how many requests may wait beside `max_num_seqs` that run; further
    ones are refused with QueueFull. Usable from several threads, each with an event loop of its own.
    """

    def __init__(
        self, model: str | Path | Checkpoint = DEFAULT_MODEL, *, max_queue: int | None = None, **options: Any
    ) -> None:
        room = None if max_queue is None else checks.integer("max_queue", max_queue, 0)
        super().__init__(model, **options)
        self._limit = None if room is None else room + self.max_num_seqs
        self._posts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = weakref.WeakKeyDictionary()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        trace: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Answer one prompt: a stream of what each step added. Closing the stream cancels the request.

        What cannot be honoured is refused here, before the first delta. `priority`: lower runs earlier. `timeout`: in
        seconds; a request that still runs then ends with DeadlineExceeded. `trace`: deltas carry the drafted trees.
        """
        (params,) = inputs.as_params(sampling_params, 1)
        return self.submit(self.request(prompt, params, trace=trace, priority=priority, timeout=timeout))

    def chat(
        self,
        messages: Iterable[inputs.Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        trace: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Answer a conversation by the model's own chat template; the arguments are those of `LLM.chat`."""
        prompts = self.chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        if len(prompts) != 1:
            raise OptionError(f"messages has {len(prompts)} conversations", hint="give one; streams run side by side")
        return self.generate(prompts[0], sampling_params, trace=trace, priority=priority, timeout=timeout)

    # -- in two steps: what can take long may run in another thread ----------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        trace: bool = False,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Request:
        """A checked request, not yet submitted."""
        checks.integer("priority", priority, -(2**31), 2**31 - 1)
        if timeout is not None:
            timeout = time.perf_counter() + checks.number("timeout", timeout, 0.0, 1e9)
        return self._request(prompt, params, trace=trace, priority=priority, deadline=timeout)

    def submit(self, request: Request, *, streams: bool = True) -> AsyncStream:
        """Queue a request. With `streams` false there are no deltas, only `output` at the end."""
        loop = asyncio.get_running_loop()
        post = self._posts.get(loop)
        if post is None:
            post = self._posts[loop] = _Post(loop)
        return AsyncStream(request, self._loop, post, streams, self._limit)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once; the others wait."""
        return self._core.config.max_num_seqs

    # -- for dashboards -----------------------------------------------------------------------------------------------

    async def status(self) -> EngineStatus:
        """The engine's totals and what it holds, between two steps."""
        return await asyncio.to_thread(self._loop.status)

    @property
    def under_way(self) -> int:
        """Requests that run or wait."""
        return self._loop.under_way

    @property
    def alive(self) -> bool:
        """Whether requests are accepted; False once the engine has failed for good or was closed."""
        return self._loop.alive


class AsyncStream:
    """The deltas of one request. Closing it, or dropping the last reference to it, cancels the request.

    `async for delta in stream`, or `async with stream:` where the loop may be left early. `output()` waits for the end.
    """

    def __init__(self, request: Request, engine: EngineLoop, post: _Post, streams: bool, limit: int | None) -> None:
        self.request = request
        self._engine = engine
        self._unread = Unread()
        self._ready: deque[Message] = deque()
        self._woken = asyncio.Event()
        self._last: Message | None = None
        self._ticket: int | None = None
        (self._ticket,) = engine.submit([request], post, streams=streams, limit=limit)
        post.streams[self._ticket] = self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        message = await self._next()
        if message.delta is not None:
            return message.delta
        if message.error is not None:
            raise message.error
        raise StopAsyncIteration

    async def output(self) -> Output:
        """The whole result, once all choices have ended; deltas that were not read are dropped."""
        while (message := await self._next()).delta is not None:
            pass
        if message.error is not None:
            raise message.error
        assert message.completions is not None
        request = self.request
        return Output(request.id, request.prompt, request.prompt_ids, message.completions, message.prompt_logprobs)

    async def _next(self) -> Message:
        """The next message; after the last message, that one again at every call."""
        while not self._ready and self._last is None:
            await self._woken.wait()
            self._woken.clear()
            self._ready.extend(self._unread.take())
        if self._last is not None:
            return self._last
        message = self._ready.popleft()
        if message.delta is None:
            self._last = message
        return message

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._last is None:
            self._engine.cancel(ticket, wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def take(self, message: Message) -> None:
        """Keep a message until it is read; on the event loop's thread."""
        self._unread.add(message)
        self._woken.set()


class _Post:
    """The outbox of all streams of one event loop: the engine wakes that loop once per step, however many streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._unread = Unread()
        self.streams: weakref.WeakValueDictionary[int, AsyncStream] = weakref.WeakValueDictionary()

    def deliver(self, messages: list[Message]) -> None:
        """Take the messages of one step, on the engine's thread."""
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        with self._lock:
            asleep = not self._unread
            for message in messages:
                self._unread.add(message)
        if asleep:
            loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        """Hand the messages to their streams, on the event loop's thread."""
        with self._lock:
            messages = self._unread.take()
        for message in messages:
            stream = self.streams.get(message.ticket)
            if stream is not None:  # else it was closed
                stream.take(message)
