"""Follows the answers of one call: counts tokens, keeps what the last chunk tells, and reports to the metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from slipstream.drafters.prediction import PredictionDrafter
from slipstream.server import shapes
from slipstream.server.generation import Generation
from slipstream.server.service import Service
from slipstream.server.shapes import Traced
from slipstream.server.wire.common import SamplingBody
from slipstream.types import Completion, Delta, Output


class Follower:
    """The deltas or outputs of a call on their way to the client."""

    def __init__(self, service: Service, generation: Generation) -> None:
        self._service = service
        self._generation = generation
        self._completions: list[Completion] = []
        self._tokens = 0
        self._traces: defaultdict[tuple[int, int], list[Traced]] = defaultdict(list)
        self._choices = sum(request.params.n for request in generation.requests)

    async def outputs(self) -> list[Output]:
        """All answers, in order."""
        if any(request.trace for request in self._generation.requests):  # only deltas carry trees
            async for place, delta in self._generation.deltas():
                self._traces[place, delta.index] += _traced(delta)
        outputs = await self._generation.outputs()
        for place, output in enumerate(outputs):
            for completion in output.outputs:
                self._end(place, completion)
        return outputs

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas as they come, with the number of their prompt."""
        before: dict[tuple[int, int], float] = {}
        async for place, delta in self._generation.deltas():
            now = time.perf_counter()
            if (place, delta.index) in before and delta.token_ids:
                self._service.metrics.chunk(now - before[place, delta.index], len(delta.token_ids))
            before[place, delta.index] = now
            self._tokens += len(delta.token_ids)
            if delta.completion is not None:
                self._end(place, delta.completion, counted=True)
            yield place, delta

    def _end(self, place: int, completion: Completion, *, counted: bool = False) -> None:
        self._completions.append(completion)
        self._tokens += 0 if counted else len(completion.token_ids)
        request, capture = self._generation.requests[place], self._service.capture
        self._service.metrics.ended(completion, len(request.prompt_ids))
        if capture is not None:
            capture.add(request, completion)

    def prompt_ids(self, place: int) -> list[int]:
        """The token ids of a prompt."""
        return self._generation.requests[place].prompt_ids

    def prompt_text(self, place: int) -> str:
        """A prompt as text."""
        request = self._generation.requests[place]
        return self._service.tokenizer.decode(request.prompt_ids) if request.prompt is None else request.prompt

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return len(self._completions) == self._choices

    @contextmanager
    def ending(self) -> Iterator[None]:
        """If the body ends by an error, or because the client left: cancel what still runs, and count it."""
        try:
            yield
        except BaseException as error:
            self._generation.close()
            self._service.metrics.interrupted("error" if isinstance(error, Exception) else "cancelled")
            raise

    async def streamed(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The chunks, once there is a first one."""
        first = await anext(chunks, None)

        async def rest() -> AsyncGenerator[bytes, None]:
            with self.ending():
                async with aclosing(chunks):
                    if first is not None:
                        yield first
                    async for chunk in chunks:
                        yield chunk

        return rest()

    # -- what the wire tells ------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        details = {}
        if any(request.prediction for request in self._generation.requests):
            counts = [one.stats.outcome_of(PredictionDrafter.name) for one in self._completions]
            details["accepted_prediction_tokens"] = sum(accepted for accepted, _ in counts)
            details["rejected_prediction_tokens"] = sum(rejected for _, rejected in counts)
        return shapes.usage(self._prompt_tokens, self._tokens, self._cached_tokens, **details)

    def counters(self) -> dict[str, Any]:
        """`metrics` and `timings`, once all choices have ended."""
        return shapes.counters(self._completions, self._prompt_tokens, self._cached_tokens)

    def totals(self) -> dict[str, Any]:
        """Usage and counters."""
        return {"usage": self.usage(), **self.counters()}

    def details(self, body: SamplingBody, said: Delta | Completion, place: int = 0) -> dict[str, Any]:
        """The details of tokens that the client asked for: their ids, drafters and trees."""
        found: dict[str, Any] = {}
        if body.return_token_ids or body.return_origins:
            found["token_ids"] = said.token_ids
        if body.return_origins:
            found["origins"] = said.origins if isinstance(said, Delta) else said.stats.origins
        if body.return_trees:
            traced = _traced(said) if isinstance(said, Delta) else self._traces[place, said.index]
            tokenizer = self._service.llm.tokenizer
            found["trees"] = shapes.drawn_trees(traced, said.token_ids, tokenizer)
        return found

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self._generation.requests)

    @property
    def _cached_tokens(self) -> int:
        # The choices of a prompt share what was found for it.
        return sum(one.cached_tokens for one in self._completions if one.index == 0)


def _traced(delta: Delta) -> list[Traced]:
    return list(zip(delta.trees, delta.decisions, strict=True))
