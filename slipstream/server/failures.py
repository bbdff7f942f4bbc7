"""Errors on the wire, in OpenAI's shape, and which exception becomes which."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.exceptions import HTTPException

from slipstream.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineFailed,
    OptionError,
    PromptError,
    QueueFull,
    SlipstreamError,
)

log = logging.getLogger("slipstream")

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Our messages begin with the argument they name.
_OFFENDER = re.compile(r"^([a-z_]+)(?=[=:\[]| is | names | end with | needs? )")
_OF_DRAFTERS = re.compile(r"unknown (loaded )?drafter|unknown option of drafter|drafter '|a drafter's ")
_NO_PLACE = re.compile(r"chat template has no place for '(\w+)'")
_VARIABLES = ("tools", "documents", "reasoning_effort")  # fields that become variables of the template


class ApiError(HTTPException):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def wire(self) -> dict[str, object]:
        """The JSON object of a response or of an SSE `error` event."""
        kind = _KINDS.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """The error that a client sees. An internal error is logged, and described in general words only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = str(int(error.retry_after))
        return ApiError(429, f"the queue is full: {error}", code="queue_full", headers={"retry-after": wait})
    if isinstance(error, OptionError):
        code = "context_length_exceeded" if "the context holds" in error.message else None
        param, said = _offender(error), str(error)
        return ApiError(400, said if param is None or param in said else f"{param}: {said}", param=param, code=code)
    if isinstance(error, EngineFailed | EngineClosed):
        return ApiError(503, str(error), code="engine_failed", headers={"retry-after": "1"})
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="deadline_exceeded")
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    said = str(error) if isinstance(error, SlipstreamError) else "an internal error ended the request"
    return ApiError(500, said, code="internal_error")


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that were sent: `names` has them, by the parameters that they became."""
    try:
        yield
    except (ApiError, OptionError) as error:
        told = as_api_error(error)
        if told.param is None or told.param not in names:
            raise
        name = names[told.param]
        said = re.sub(rf"^{told.param}(?=[=: ])", name, told.detail)
        said = said if name in said else f"{name}: {said}"
        raise ApiError(told.status_code, said, param=name, code=told.code) from None


def _offender(error: OptionError) -> str | None:
    """The field that an error is about."""
    if found := _OFFENDER.match(error.message):
        return found[1]
    if found := _NO_PLACE.search(error.message):
        return found[1] if found[1] in _VARIABLES else "chat_template_kwargs"
    if _OF_DRAFTERS.match(error.message):
        return "speculate"
    return "prompt" if isinstance(error, PromptError) else None
