"""The command line: the verbs of `slipstream.commands` as typer sees them.

A verb is a plain function that describes its own parameters; here it becomes a command. Groups of options (dataclasses)
are spread out into options of their own and gathered again for the call. Errors become one line and an exit code.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any

import typer

from slipstream import __version__
from slipstream.commands.chat import chat
from slipstream.commands.check import check
from slipstream.commands.convert import export, import_
from slipstream.commands.corpus import build
from slipstream.commands.demo import demo
from slipstream.commands.drafters import drafters
from slipstream.commands.env import env
from slipstream.commands.options import Described, EngineSetup, ModelSetup, Sampling
from slipstream.commands.run import run
from slipstream.commands.synth import synth
from slipstream.commands.train import train
from slipstream.commands.tune import tune
from slipstream.errors import SlipstreamError

Verb = Callable[..., int | None]

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the latter two as shells count: 128 + signal

_PANELS: dict[type[Any], str] = {EngineSetup: "Model", ModelSetup: "Model", Sampling: "Sampling"}
_DEBUG = typer.Option("--debug", help="on an error, show where it came from")

app = typer.Typer(
    help="Speculative decoding: a language model answers faster and says the same.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
corpora = typer.Typer(help="Texts on disk that drafts are retrieved from.", no_args_is_help=True)
app.add_typer(corpora, name="corpus")


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that cannot be read or shown must not end a chat
    try:
        app()
    except KeyboardInterrupt:  # before a verb was reached
        sys.exit(INTERRUPTED)


def guarded(verb: Callable[[], int | None], *, debug: bool) -> int:
    """Run a verb; the exit code."""
    try:
        code = verb()
        sys.stdout.flush()  # a reader that went away is noticed here, not by the interpreter's last flush
        return code or 0
    except SlipstreamError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has nowhere to go; without this the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


class _Warnings(logging.Handler):
    """The engine's warnings, on whatever stderr is now."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    logger = logging.getLogger("slipstream")
    if not logger.handlers:
        logger.addHandler(_Warnings(logging.WARNING))
        logger.propagate = False


# -- from a plain function to a command -------------------------------------------------------------------------------


def _register(verb: Verb, parent: typer.Typer = app) -> None:
    hints = typing.get_type_hints(verb, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _group(hint)) is not None}

    def command(debug: bool, **given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: _settled(given.pop(f.name)) for f in dataclasses.fields(group)})
        raise typer.Exit(guarded(lambda: verb(**given), debug=debug))

    parameters = [*_parameters(verb, hints), _parameter("debug", Annotated[bool, _DEBUG], False)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    parent.command(verb.__name__.removesuffix("_"), help=verb.__doc__)(command)


def _group(hint: Any) -> type[Any] | None:
    """The dataclass behind `Group | None`."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)), None)


def _settled(value: Any) -> Any:
    """typer gives lists; our groups are frozen."""
    return tuple(value) if isinstance(value, list) else value


def _parameters(verb: Verb, hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(verb).parameters.values():
        group = _group(hints[parameter.name])
        if group is None:
            yield _parameter(parameter.name, _translated(parameter.name, hints[parameter.name]), parameter.default)
            continue
        inner = typing.get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            yield _parameter(field.name, _translated(field.name, inner[field.name], _PANELS[group]), field.default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    settled = list(default) if isinstance(default, tuple) else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=settled, annotation=annotation)


def _translated(name: str, hint: Any, panel: str | None = None) -> Any:
    """`Annotated[kind, Described(...)]` in typer's words."""
    kind, described = typing.get_args(hint)
    assert isinstance(described, Described)
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    if described.positional:
        return Annotated[kind, typer.Argument(help=described.help, metavar=described.metavar, show_default=False)]
    shown = kind is not bool and not isinstance(kind, UnionType)
    names = described.names or ("--" + name.replace("_", "-"),)  # said outright: else typer adds --no-... to switches
    return Annotated[
        kind,
        typer.Option(
            *names,
            help=described.help,
            metavar=described.metavar,
            rich_help_panel=panel,
            show_default=shown,
        ),
    ]


for _verb in (demo, run, chat, check, drafters, tune, synth, train, import_, export, env):
    _register(_verb)
_register(build, corpora)
