"""What a replica answers, passed on. If the replica is lost, the client is told to send the request again."""

from __future__ import annotations

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slipstream.server.failures import ApiError
from slipstream.server.ray.calls import Call
from slipstream.server.sse import DONE, JsonResponse, event


class Forwarded(Response):
    """The answer of whichever replica the router picks."""

    def __init__(self, replicas: DeploymentHandle, call: Call) -> None:
        super().__init__()
        self._replicas = replicas
        self._call = call
        self._type: bytes | None = None  # the content type, once the answer has begun
        self._events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._replicas.remote(self._call)
        try:
            async for messages in answer:
                for message in messages:
                    self._note(message)
                    await send(message)
        except (RayActorError, DeploymentUnavailableError):
            lost = ApiError(
                503,
                "the replica that ran the request is gone; send it again",
                code="replica_lost",
                headers={"retry-after": "1"},
            )
            await self._end(lost, scope, receive, send)
        except BackPressureError:
            full = ApiError(429, "all queues are full", code="queue_full", headers={"retry-after": "1"})
            await self._end(full, scope, receive, send)
        finally:
            answer.cancel()  # nothing, if it is over

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._type = dict(message["headers"]).get(b"content-type", b"")
        else:
            self._events += message.get("body", b"").count(b"\n\n")

    async def _end(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error as a response, or as the last event of a stream that has begun."""
        if self._type is None:
            await JsonResponse(error.wire, error.status_code, error.headers)(scope, receive, send)
        elif self._type.startswith(b"text/event-stream"):
            await send({"type": "http.response.body", "body": self._last_words(error), "more_body": False})
        else:
            raise error

    def _last_words(self, error: ApiError) -> bytes:
        if not self._call.scope["path"].endswith("/v1/responses"):
            return event(error.wire, "error") + DONE
        said = {"type": "error", "code": error.code, "message": error.detail, "param": None}
        return event({**said, **error.wire, "sequence_number": self._events}, "error")
