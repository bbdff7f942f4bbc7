"""The command line: the verbs of `slipstream.commands` as typer commands.

A verb is a plain function that describes its own parameters. Option groups (dataclasses) are expanded into single
options and gathered again for the call. Errors become one line and an exit code.
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
from typer.core import TyperCommand, TyperGroup

from slipstream import __version__
from slipstream.commands.batch.verb import batch
from slipstream.commands.bench.options import BenchModel, ServerLoad, Sweeps
from slipstream.commands.bench.verb import bench, compare
from slipstream.commands.chat import chat
from slipstream.commands.check.verb import check
from slipstream.commands.convert import export, import_
from slipstream.commands.corpus import build
from slipstream.commands.demo import demo
from slipstream.commands.drafters import drafters
from slipstream.commands.env import env
from slipstream.commands.run import run
from slipstream.commands.serve import serve
from slipstream.commands.shared.options import Described, EngineSetup, ModelSetup, Sampling
from slipstream.commands.simulate import simulate
from slipstream.commands.synth import synth
from slipstream.commands.train import train
from slipstream.commands.tune.verb import tune
from slipstream.errors import SlipstreamError

Verb = Callable[..., int | None]

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two in the shells' convention: 128 + signal

_PANELS: dict[type[Any], str] = {
    EngineSetup: "Model",
    ModelSetup: "Model",
    Sampling: "Sampling",
    BenchModel: "Model",
    Sweeps: "Sweeps",
    ServerLoad: "A server",
}
_DEBUG = typer.Option("--debug", help="show a traceback on errors", metavar="")
_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # typer's own click or the real one, by version


class _PlainHelp:
    """A mixin: `--help` is shown as a switch without a value."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class _Verb(_PlainHelp, TyperCommand):
    """A verb."""


class _Verbs(_PlainHelp, TyperGroup):
    """Verbs; errors in a command line are printed like all others."""

    def main(self, *arguments: Any, **more: Any) -> Any:
        try:
            code = super().main(*arguments, **{**more, "standalone_mode": False})
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                where = error.ctx.command_path if error.ctx is not None else "slipstream"
                _print_error(" ".join(error.format_message().split()), f"{where} --help")
            code = USAGE_ERROR
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Verbs,
    help="Speculative decoding: a language model answers faster, with the same text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
corpora = typer.Typer(cls=_Verbs, help="Texts on disk to retrieve drafts from.", no_args_is_help=True)
app.add_typer(corpora, name="corpus")
benches = typer.Typer(cls=_Verbs)
app.add_typer(benches, name="bench")


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an undecodable character must not end a chat
    try:
        app()
    except KeyboardInterrupt:  # before a verb started
        sys.exit(INTERRUPTED)


def guarded(verb: Callable[[], int | None], *, debug: bool) -> int:
    """Run a verb; returns the exit code."""
    try:
        code = verb()
        sys.stdout.flush()  # notice a closed pipe here, not in the interpreter's last flush
        return code or 0
    except SlipstreamError as error:
        if debug:
            traceback.print_exc()
        _print_error(error.message, error.hint)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The rest of the buffer has nowhere to go; without this the interpreter would complain on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _print_error(message: str, hint: str | None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


class _Messages(logging.Handler):
    """Prints the engine's warnings and progress messages to the current stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""  # clear a temporary line
        kind = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        print(f"{start}{kind}{record.getMessage()}", file=sys.stderr, flush=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="print the version")
    ] = False,
) -> None:
    logger = logging.getLogger("slipstream")
    if not logger.handlers:
        logger.addHandler(_Messages(logging.INFO))
        logger.setLevel(logging.INFO)
        logger.propagate = False


# -- from a plain function to a command -------------------------------------------------------------------------------


def _register(verb: Verb, parent: typer.Typer = app) -> None:
    command = _command(verb)
    parent.command(verb.__name__.removesuffix("_"), cls=_Verb, help=verb.__doc__)(command)


def _register_group(verb: Verb, group: typer.Typer) -> None:
    """A verb that has verbs of its own: it runs if none of them is named."""
    command = _command(verb)

    def unless_named(ctx: typer.Context, **given: Any) -> None:
        if ctx.invoked_subcommand is None:
            command(**given)

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    given = [*inspect.signature(command).parameters.values(), context]
    unless_named.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    unless_named.__annotations__ = {**command.__annotations__, "ctx": typer.Context}
    group.callback(cls=_Verbs, help=verb.__doc__, invoke_without_command=True)(unless_named)


def _command(verb: Verb) -> Callable[..., None]:
    """The verb as typer sees it: options of groups one by one."""
    hints = typing.get_type_hints(verb, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _group(hint)) is not None}

    def command(debug: bool, **given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: _settled(given.pop(f.name)) for f in dataclasses.fields(group)})
        raise typer.Exit(guarded(lambda: verb(**given), debug=debug))

    parameters = [*_parameters(verb, hints), _parameter("debug", Annotated[bool, _DEBUG], False)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _group(hint: Any) -> type[Any] | None:
    """The dataclass of `Group | None`."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(kind, type)), None)


def _settled(value: Any) -> Any:
    """typer gives lists; the groups are frozen."""
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
    """`Annotated[kind, Described(...)]` as a typer parameter."""
    kind, described = typing.get_args(hint)
    assert isinstance(described, Described)
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    if described.positional:
        return Annotated[kind, typer.Argument(help=described.help, metavar=described.metavar, show_default=False)]
    shown = kind is not bool and not isinstance(kind, UnionType)
    names = described.names or ("--" + name.replace("_", "-"),)  # explicit: otherwise typer adds --no-... to switches
    return Annotated[
        kind,
        typer.Option(
            *names,
            help=described.help,
            metavar="" if kind is bool else described.metavar,  # a switch takes no value
            rich_help_panel=panel,
            show_default=shown,
        ),
    ]


for _verb in (demo, run, chat, serve, batch, check, drafters, tune, simulate, synth, train, import_, export, env):
    _register(_verb)
_register(build, corpora)
_register_group(bench, benches)
_register(compare, benches)
