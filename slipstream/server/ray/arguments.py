"""What `serve run slipstream.server.ray:app` and a Serve configuration's `args` may say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from slipstream.drafters.registry import parse_speculate
from slipstream.errors import OptionError
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.server.config import ServerConfig, read_keys


def _listed(value: object) -> object:
    """A list in a file is a list; on a command line it is JSON, or one element."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("[") else [value]


def _mapped(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


def _drafter(value: object) -> object:
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


_ENGINE = ("drafters", "verifier", "dtype", "device", "quantize", "exact", "max_model_len")
_LIMITS = ("max_num_seqs", "max_queue", "cache_tokens")
_Strings = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Arguments(BaseModel):
    """The engine of each replica, its limits, and how many there are."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = DEFAULT_MODEL
    speculate: Annotated[str | dict[str, Any] | None, BeforeValidator(_drafter)] = None
    drafters: _Strings = ()
    verifier: str = "match"
    dtype: str = "auto"
    device: str = "auto"
    quantize: str = "auto"
    exact: bool = False
    max_model_len: int | None = Field(None, ge=1)
    max_num_seqs: int = Field(64, ge=1)
    max_queue: int = Field(1024, ge=0)
    cache_tokens: int | None = Field(None, ge=1)

    served_model_name: _Strings = ()
    api_key_file: Path | None = None
    cors_origin: _Strings = ()
    max_body_mb: float = Field(16.0, gt=0)
    request_timeout: float | None = Field(None, gt=0)
    shutdown_timeout: float = Field(30.0, ge=0)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    playground: bool = True

    replicas: int = Field(1, ge=1)
    autoscaling: Annotated[dict[str, Any] | None, BeforeValidator(_mapped)] = None  # instead: as Ray Serve has it
    cpus: float = Field(1.0, ge=0)  # of a replica; its threads are as many
    gpus: float = Field(0.0, ge=0)
    fronts: int = Field(1, ge=1)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Check everything; raises OptionError, in one line, before anything is loaded."""
        try:
            found = cls.model_validate(dict(given))
        except (ValidationError, json.JSONDecodeError) as error:
            wrong = error.errors() if isinstance(error, ValidationError) else []
            said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in wrong) or str(error)
            raise OptionError(said, hint=f"valid: {', '.join(cls.model_fields)}") from None
        if found.autoscaling is not None and "replicas" in found.model_fields_set:
            raise OptionError("give either replicas or autoscaling, not both")
        for drafter in (found.speculate, *found.drafters):
            if drafter is not None:
                parse_speculate(drafter)
        return found

    @property
    def engine(self) -> dict[str, Any]:
        """The arguments of `AsyncLLM`."""
        given = {name: getattr(self, name) for name in (*_ENGINE, *_LIMITS)}
        return given if self.speculate is None else {**given, "speculate": self.speculate}

    @property
    def server(self) -> ServerConfig:
        """What the application of a replica is told. Ray Serve has an access log of its own, without prompts."""
        return ServerConfig(
            model=self.model,
            served_names=self.served_model_name,
            api_keys=tuple(read_keys(self.api_key_file)),
            cors_origins=self.cors_origin,
            max_body_bytes=self.max_body_bytes,
            request_timeout=self.request_timeout,
            shutdown_timeout=self.shutdown_timeout,
            tool_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            access_log=False,
            playground=self.playground,
        )

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request."""
        return int(2**20 * self.max_body_mb)
