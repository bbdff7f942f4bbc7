"""Reads streamed answers from the raw bytes that a client kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.serve.client import Response


@dataclass
class Served:
    """One answer as the client saw it. Times are in seconds; names are those of vLLM's bench."""

    started: float
    prompt: str = ""
    category: str = ""
    success: bool = False
    error: str = ""
    ttft: float = 0.0  # until the first chunk with text
    itl: list[float] = field(default_factory=list)  # gaps between later chunks
    latency: float = 0.0  # until the last chunk with text
    prompt_len: int = 0
    output_len: int = 0
    text: str = ""


def read_answer(response: Response) -> Served:
    """The answer of a streamed response, or its error."""
    served = Served(response.sent)
    if response.error is not None or response.status != 200:
        served.error = response.error or f"HTTP {response.status}: {_message(response)}"
        return served
    last, chunks = response.sent, 0
    for when, event in _events(response):
        if "error" in event:
            served.error = str(event["error"])
            return served
        usage = event.get("usage")
        if isinstance(usage, dict):
            served.prompt_len = int(usage.get("prompt_tokens") or 0)
            served.output_len = int(usage.get("completion_tokens") or 0)
        said = _said(event)
        if said is None:
            continue
        served.text += said
        chunks += 1
        if chunks == 1:
            served.ttft = when - response.sent
        else:
            served.itl.append(when - last)
        last = when
    served.latency = last - response.sent
    served.output_len = served.output_len or chunks
    served.success = chunks > 0
    served.error = "" if chunks else "the answer has no text"
    return served


def read_json(response: Response) -> Any:
    """The body of a plain response; None if it is not JSON."""
    try:
        return json.loads(b"".join(piece for _, piece in _payload(response)))
    except ValueError:
        return None


def _said(event: dict[str, Any]) -> str | None:
    """The text of a chunk; None if it has none (roles, usage, ends). Reasoning and calls of tools are text."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if choice.get("text"):
        return str(choice["text"])
    delta = choice.get("delta") or {}
    said = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    if said:
        return str(said)
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    called = "".join(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls)
    return called or None


def _events(response: Response) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events, each with the time at which its end arrived."""
    waiting = b""
    for when, piece in _payload(response):
        waiting = (waiting + piece).replace(b"\r\n", b"\n")
        *whole, waiting = waiting.split(b"\n\n")
        for event in whole:
            data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data and data != b"[DONE]":
                try:
                    found = json.loads(data)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield when, found


def _payload(response: Response) -> Iterator[tuple[float, bytes]]:
    """The body without its head and, if it was sent in chunks, without their sizes."""
    waiting, in_body, chunked, size = b"", False, False, -1
    for when, piece in response.pieces:
        waiting += piece
        if not in_body:
            head, end, rest = waiting.partition(b"\r\n\r\n")
            if not end:
                continue
            in_body, waiting = True, rest
            chunked = b"transfer-encoding: chunked" in head.lower()
        if not chunked:
            yield when, waiting
            waiting = b""
            continue
        found = b""
        while True:
            if size < 0:
                line, end, rest = waiting.partition(b"\r\n")
                if not end:
                    break
                waiting, size = rest, int(line.split(b";")[0] or b"0", 16)
            if size == 0 or len(waiting) < size + 2:
                break
            found += waiting[:size]
            waiting, size = waiting[size + 2 :], -1
        if found:
            yield when, found


def _message(response: Response) -> str:
    body = read_json(response)
    if isinstance(body, dict):
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return b"".join(piece for _, piece in _payload(response)).decode("utf-8", "replace")[:200].strip()
