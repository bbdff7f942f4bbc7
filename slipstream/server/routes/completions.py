"""`POST /v1/completions`: texts or token ids, one prompt or several."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from slipstream.inputs import as_prompts
from slipstream.server import shapes
from slipstream.server.constraints import constraints, sent_form
from slipstream.server.failures import ApiError, naming
from slipstream.server.following import Follower
from slipstream.server.generation import Generation, prepared, sampling_params
from slipstream.server.service import Service
from slipstream.server.sse import EventStream, JsonResponse, event, unless_gone
from slipstream.server.wire.completions import CompletionBody
from slipstream.types import Completion, Delta, Logprobs, Output, SamplingParams

_MAX_TOKENS = 16  # OpenAI's default


def completion_routes(service: Service) -> APIRouter:
    """The completions route."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Continue prompts")
    async def completions(body: CompletionBody, request: Request) -> Response:
        call = CompletionCall(service, body)
        return await unless_gone(request.receive, call.respond())

    return router


class CompletionCall:
    """One call: a request per prompt, and the shape of its answers."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self._service = service
        self._body = body
        self._head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._head |= {"model": service.check_model(body.model)}
        self._echo = bool(body.echo)
        self._silent = body.max_tokens == 0  # the prompt alone; the engine gives one token, which is not shown
        if self._silent and not self._echo:
            raise ApiError(400, "max_tokens=0 needs echo=true", param="max_tokens")
        if body.stream and self._echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed", param="echo")

    async def respond(self) -> Response:
        """The whole answer, or the first event of a stream: what fails before it has an HTTP status."""
        service, body = self._service, self._body
        prompts = as_prompts(body.prompt, "prompt")
        if not prompts:
            raise ApiError(400, "prompt is empty", param="prompt")
        with naming(sent_form(body)):
            params = self._params()
            requests = [await service.off_loop(len(p), prepared, service, body, p, params) for p in prompts]
        generation = Generation(service, requests, streams=bool(body.stream or body.return_trees))
        follower = Follower(service, generation)
        with follower.ending():
            if body.stream:
                return EventStream(await follower.streamed(self._chunks(follower)))
            outputs = await follower.outputs()
            return JsonResponse(self._whole(outputs, follower))

    def _params(self) -> SamplingParams:
        body = self._body
        scored = body.prompt_logprobs
        if self._echo and body.logprobs is not None:
            scored = max(body.logprobs, scored or 0)
        return sampling_params(
            self._service,
            body,
            max_tokens=_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            structured_outputs=constraints(body),
            prediction=body.prediction,
        )

    # -- from the engine to the wire ----------------------------------------------------------------------------------

    def _whole(self, outputs: list[Output], follower: Follower) -> dict[str, Any]:
        choices = [
            self._choice(place, completion, output, follower)
            for place, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._head, "choices": choices, **follower.totals()}

    def _choice(self, place: int, completion: Completion, output: Output, follower: Follower) -> dict[str, Any]:
        body, prompt = self._body, follower.prompt_text(place) if self._echo else ""
        choice: dict[str, Any] = {
            "index": place * len(output.outputs) + completion.index,
            "text": prompt + ("" if self._silent else completion.text),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": None,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = self._logprobs(completion, output)
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shapes.prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice | follower.details(body, completion, place)

    def _logprobs(self, completion: Completion, output: Output) -> dict[str, Any]:
        tokens: list[int] = [] if self._silent else completion.token_ids
        entries: list[Logprobs | None] = [] if self._silent else [*(completion.logprobs or ())]
        if self._echo:
            tokens, entries = output.prompt_token_ids + tokens, (output.prompt_logprobs or []) + entries
        return shapes.completion_logprobs(tokens, entries, self._service.tokenizer, self._body.logprobs or 0, 0)

    async def _chunks(self, follower: Follower) -> AsyncGenerator[bytes, None]:
        options, n = self._body.stream_options, self._body.n or 1
        counts = options is not None and bool(options.continuous_usage_stats)
        shown: dict[int, int] = {}  # characters of each choice
        async for place, delta in follower.deltas():
            index = place * n + delta.index
            choice = self._chunk(place, delta, follower, shown.get(index))
            if choice is None:
                continue
            choice["index"] = index
            shown[index] = shown.get(index, 0) + len(choice["text"])
            chunk: dict[str, Any] = {**self._head, "choices": [choice]}
            if follower.over:
                chunk |= follower.counters()
            if options is not None and (options.include_usage or counts):
                chunk["usage"] = follower.usage() if counts else None
            yield event(chunk)
        if options is not None and options.include_usage:
            yield event({**self._head, "choices": [], **follower.totals()})

    def _chunk(self, place: int, delta: Delta, follower: Follower, shown: int | None) -> dict[str, Any] | None:
        """The choice of a chunk, or None if there is nothing to say yet; `shown`: characters so far, None at first."""
        body = self._body
        text = "" if self._silent else delta.text
        details = follower.details(body, delta, place)
        if delta.logprobs is not None:
            details["logprobs"] = shapes.completion_logprobs(
                delta.token_ids, delta.logprobs, self._service.tokenizer, body.logprobs or 0, shown or 0
            )
        if shown is None:
            if self._echo:
                text = follower.prompt_text(place) + text
            if body.return_token_ids:
                details["prompt_token_ids"] = follower.prompt_ids(place)
        if not text and not details and delta.finish_reason is None:
            return None
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": delta.finish_reason, **details}
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.completion.stop_reason if delta.completion is not None else None
        return choice
