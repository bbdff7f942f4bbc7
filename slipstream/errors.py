"""Every exception a user can meet, in one tree.

SlipstreamError
├── OptionError            an option or parameter that does not exist or cannot be honoured (also a ValueError)
│   └── PromptError        a prompt that cannot be served (empty, or longer than the context)
├── ModelError             a model that cannot be found or loaded
│   ├── ModelNotFound      no such file, directory, built-in name or hub repository
│   ├── CorruptFile        truncated, garbled, or not the format it claims to be
│   ├── HashMismatch       the bytes are not those that were expected
│   ├── UnsupportedModel   an architecture, quantisation or feature that we do not run
│   ├── ShapeMismatch      weights that do not fit their own configuration
│   └── NotEnoughMemory    raised before loading, not after
├── DraftMismatch          a drafter or draft model that does not fit its target
├── DraftFault             a drafter that raised, hung or returned nonsense (the engine drops it; the request goes on)
├── CacheFull              no page is left (the scheduler handles it; a request too large for the cache is refused)
├── EngineClosed           the engine was closed, or stopped in the middle of a request
├── EngineFailed           the engine failed in the middle of a request, and was made anew
├── QueueFull              too many requests are waiting: `retry_after` says in how many seconds to try again
├── DeadlineExceeded       a request was not finished in the time it was given
├── ServerFailed           a server that is measured cannot be reached, or does not answer
└── WriterFailed           one of several processes that write training data failed, or is gone

Each message is one line that names the offender; `hint`, if given, says what to do.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every error raised on purpose by this package."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class OptionError(SlipstreamError, ValueError):
    """An option that is unknown, out of range, or cannot be honoured together with another."""


class PromptError(OptionError):
    """A prompt that is empty or does not fit into the context."""


class ModelError(SlipstreamError):
    """A model that cannot be found or loaded."""


class ModelNotFound(ModelError):
    """No such file, directory, built-in name or hub repository."""


class CorruptFile(ModelError):
    """A file that is truncated, garbled or of another format."""


class HashMismatch(ModelError):
    """A download or file whose bytes are not those expected."""


class UnsupportedModel(ModelError):
    """An architecture, quantisation or feature that is refused by name."""


class ShapeMismatch(ModelError):
    """Weights that do not fit their configuration."""


class NotEnoughMemory(ModelError):
    """The weights or the cache would not fit; raised before they are made."""


class DraftMismatch(SlipstreamError):
    """A drafter that does not fit its target (another vocabulary, another model's checkpoint)."""


class DraftFault(SlipstreamError):
    """A drafter raised, hung, or returned a tree that breaks the contract."""


class CacheFull(SlipstreamError):
    """The cache has no free page left."""


class EngineClosed(SlipstreamError):
    """The engine was closed, or was stopped while a request was running."""


class EngineFailed(SlipstreamError):
    """The engine failed while a request was running, through no fault of the request's own."""


class QueueFull(SlipstreamError):
    """The queue of waiting requests is full."""

    def __init__(self, message: str, *, hint: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after  # seconds, by how fast requests have ended lately


class DeadlineExceeded(SlipstreamError):
    """A request that was not finished in time."""


class ServerFailed(SlipstreamError):
    """A server that is measured from outside cannot be reached, or does not answer."""


class WriterFailed(SlipstreamError):
    """A process that wrote training data beside others failed or ended."""


def unknown_choice(kind: str, offender: str, valid: list[str]) -> OptionError:
    """The one message for an unknown name: it has the offender and all valid choices."""
    import difflib

    close = difflib.get_close_matches(offender, valid, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return OptionError(f"unknown {kind} {offender!r}", hint=f"{guess}valid: {', '.join(sorted(valid)) or 'none'}")
