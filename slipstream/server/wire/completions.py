"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slipstream.server.wire.common import SamplingBody


class CompletionBody(SamplingBody):
    """One prompt or several, as texts or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    prediction: str | list[int] | None = None  # what is expected to follow each prompt; it becomes a drafter
    echo: bool | None = None  # the prompt comes before the answer
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None

    inert: ClassVar[Mapping[str, tuple[Any, ...]]] = {**SamplingBody.inert, "suffix": (), "add_special_tokens": (True,)}
