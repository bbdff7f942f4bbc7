"""From the fields of a body to requests, and from the engine to the answers of one call: a stream per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from slipstream.async_llm import AsyncStream
from slipstream.checks import require
from slipstream.sequence import Request
from slipstream.server.failures import ApiError
from slipstream.server.service import Service
from slipstream.server.wire.common import SamplingBody
from slipstream.types import Delta, Output, SamplingParams

_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "prompt_logprobs", "bad_words",
    "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "speculate",
)  # fmt: skip


def sampling_params(service: Service, body: SamplingBody, **settled: Any) -> SamplingParams:
    """The engine's parameters; `settled`: those that a route decides itself."""
    body.refuse_inert()
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.stream_options is not None:
        body.stream_options.refuse_inert()
        if not body.stream:
            raise ApiError(400, "stream_options need stream=true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    params = SamplingParams(**given | {name: value for name, value in settled.items() if value is not None})
    most = service.llm.max_num_seqs
    require(params.n <= most, "n", params.n, f"1 to {most}, the sequences that run at once")
    return params


def prepared(service: Service, body: SamplingBody, prompt: str | list[int], params: SamplingParams) -> Request:
    """A checked request of the engine."""
    return service.llm.request(
        prompt,
        params,
        trace=bool(body.return_trees),
        priority=body.priority or 0,
        timeout=service.config.request_timeout,
    )


class Generation:
    """The answers of one call. Closing it cancels what still runs."""

    def __init__(self, service: Service, requests: Sequence[Request], *, streams: bool) -> None:
        self.requests = requests
        self._streams: list[AsyncStream] = []
        try:
            for request in requests:
                self._streams.append(service.llm.submit(request, streams=streams))
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> list[Output]:
        """All answers, in order."""
        return [await stream.output() for stream in self._streams]

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What each step added, with the number of its prompt, as it comes."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        waiting = {asyncio.ensure_future(_next(s)): place for place, s in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place, found = waiting.pop(task), task.result()
                    if found is not None:
                        waiting[asyncio.ensure_future(_next(self._streams[place]))] = place
                        yield place, found
        finally:
            for task in waiting:
                task.cancel()

    def close(self) -> None:
        """Cancel the requests that still run."""
        for stream in self._streams:
            stream.close()


async def _next(stream: AsyncStream) -> Delta | None:
    return await anext(stream, None)
