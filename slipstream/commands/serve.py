"""`slipstream serve`: an OpenAI-compatible server, with a playground at `/`."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Annotated

from slipstream import checks
from slipstream.commands.shared.opening import open_async_llm
from slipstream.commands.shared.options import Described, EngineSetup
from slipstream.commands.shared.terminal import note
from slipstream.errors import OptionError
from slipstream.folders import expanded

if TYPE_CHECKING:
    from slipstream.async_llm import AsyncLLM
    from slipstream.server.capture import Capture

_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    setup: EngineSetup | None = None,
    host: Annotated[str, Described("the address to listen on; 0.0.0.0 is every network", metavar="HOST")] = "127.0.0.1",
    port: Annotated[int, Described("the port; 0 is any free one", metavar="PORT")] = 8000,
    drafters: Annotated[
        tuple[str, ...], Described("load one more drafter, for requests that name it (repeatable)", ("--drafter",))
    ] = (),
    served_model_name: Annotated[
        tuple[str, ...], Described("the model's name in requests (repeatable; default: MODEL)", metavar="NAME")
    ] = (),
    api_key: Annotated[
        tuple[str, ...], Described("refuse requests without one of these keys (repeatable)", metavar="KEY")
    ] = (),
    api_key_file: Annotated[str | None, Described("a file of keys, one a line", metavar="FILE")] = None,
    cors_origin: Annotated[
        tuple[str, ...], Described("let web pages of this origin ask (repeatable)", metavar="URL")
    ] = (),
    max_num_seqs: Annotated[int, Described("sequences that run at once")] = 64,
    max_queue: Annotated[int, Described("requests that may wait; further ones get 429")] = 1024,
    cache_tokens: Annotated[int | None, Described("size of the KV cache in tokens")] = None,
    max_body_mb: Annotated[float, Described("largest body of a request, in MB; larger ones get 413")] = 16.0,
    request_timeout: Annotated[
        float | None, Described("seconds after which a request ends with an error", metavar="SECONDS")
    ] = None,
    shutdown_timeout: Annotated[
        float, Described("seconds that running requests get after SIGTERM", metavar="SECONDS")
    ] = 30.0,
    tool_call_parser: Annotated[str, Described("how tool calls are found in answers; none: not at all")] = "auto",
    reasoning_parser: Annotated[str, Described("how reasoning is found in answers; none: not at all")] = "auto",
    capture: Annotated[
        str | None, Described("keep prompts and answers there, for bench, tune and train", metavar="DIR")
    ] = None,
    capture_mb: Annotated[float, Described("their size at most, in MB; the oldest are deleted")] = 256.0,
    capture_hook: Annotated[
        str | None, Described("a function that may change or drop each of them", metavar="MODULE:FUNCTION")
    ] = None,
    no_access_log: Annotated[bool, Described("no line per request")] = False,
    no_playground: Annotated[bool, Described("no page at /")] = False,
) -> None:
    """Serve the model over HTTP, with OpenAI's API."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"serve needs {', '.join(missing)}", hint="pip install 'slipstream[serve]'")
    from slipstream.server.config import ServerConfig, read_keys
    from slipstream.server.run import listen
    from slipstream.server.run import serve as run
    from slipstream.server.service import Service

    setup = setup or EngineSetup()
    config = ServerConfig(
        model=setup.model,
        served_names=served_model_name,
        api_keys=(*api_key, *read_keys(api_key_file)),
        cors_origins=cors_origin,
        max_body_bytes=int(2**20 * checks.number("max_body_mb", max_body_mb, 0.001, 1e6)),
        request_timeout=request_timeout,
        shutdown_timeout=checks.number("shutdown_timeout", shutdown_timeout, 0.0, 1e9),
        tool_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        access_log=not no_access_log,
        playground=not no_playground,
    )
    setup.drafter()  # refused before anything is loaded
    captured = _capture(capture, capture_mb, capture_hook)
    engine = {"drafters": drafters, "max_num_seqs": max_num_seqs, "max_queue": max_queue, "cache_tokens": cache_tokens}

    def opening() -> AsyncLLM:
        return open_async_llm(setup, **engine)

    try:
        listening = listen(host, checks.integer("port", port, 0, 65535))
    except OSError as error:
        raise OptionError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None
    shown = f"[{host}]" if ":" in host else host
    note(f"slipstream serves {config.names[0]} on http://{shown}:{listening.getsockname()[1]}", "bold")
    if capture is not None:
        note(f"prompts and answers are captured in {capture}, {capture_mb:g} MB at most", "bold")
    run(Service(config, opening, captured), listening)


def _capture(folder: str | None, most_mb: float, hook: str | None) -> Capture | None:
    """What captures requests, if a folder is given."""
    from slipstream.server.capture import Capture, load_hook

    most = int(2**20 * checks.number("capture_mb", most_mb, 0.1, 1e6))
    if folder is None:
        if hook is not None:
            raise OptionError("--capture-hook needs --capture DIR")
        return None
    return Capture(expanded(folder), most, None if hook is None else load_hook(hook))
