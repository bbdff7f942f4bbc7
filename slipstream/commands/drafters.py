"""`slipstream drafters`: lists drafters, their options and trained heads; brings heads in, and removes them."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import print_json, say, show_table
from slipstream.errors import OptionError
from slipstream.types import Plan

_CHANGES = {"add": "directory, URL or hub id", "remove": "name of a trained drafter"}


def drafters(
    words: Annotated[
        tuple[str, ...],
        Described(
            "a drafter to show; or a trained one to add (a directory, the URL of one, a hub id) or to remove",
            metavar="[NAME | add PLACE | remove NAME]",
            positional=True,
        ),
    ] = (),
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> None:
    """List the drafters and their options; add and remove trained ones."""
    from slipstream.drafters import drafter_class, drafter_names
    from slipstream.drafters.heads.installed import installed
    from slipstream.drafters.registry import DEFAULT

    if words and words[0] in _CHANGES:
        _change(words, as_json)
        return
    if len(words) > 1:
        raise OptionError(f"what is {words[1]!r}?", hint="slipstream drafters [NAME | add PLACE | remove NAME]")
    name = words[0] if words else None
    if name is not None:
        described = [_describe(name, drafter_class(name))]
    else:
        described = [_describe_safely(known) for known in drafter_names()]
    trained = [drafter.summary() for drafter in installed() if name in (None, drafter.description.get("method"))]
    if as_json:
        everything = {"default": DEFAULT, "drafters": described, "trained": trained}
        print_json(described[0] if name is not None else everything, indent=2)
        return
    for drafter in described:
        _print(drafter, is_default=drafter["name"] == DEFAULT)
    _print_trained(trained)
    if name is None:
        say("Options are given as in --speculate suffix:depth=8,branch=2", "dim")


def _change(words: tuple[str, ...], as_json: bool) -> None:
    """Add or remove a trained drafter."""
    from slipstream.drafters.heads.installed import add, remove

    if len(words) != 2:
        raise OptionError(f"slipstream drafters {words[0]} takes one {_CHANGES[words[0]]}")
    if words[0] == "remove":
        removed = str(remove(words[1]))
        if as_json:
            print_json({"removed": removed})
        else:
            say(f"removed {removed}")
        return
    summary = add(words[1]).summary()
    if as_json:
        print_json(summary, indent=2)
        return
    say(f"added {summary['name']}, trained for {summary['target']}")
    say(f"with that model it is found by --speculate {summary['method']}, and by auto")


def _print_trained(trained: list[dict[str, Any]]) -> None:
    """A table of trained drafters."""
    if trained:
        say("Trained drafters, each found by the fingerprint of its target", "title")
        columns = ("name", "target", "tokens_per_step", "from")
        rows = [[_shown(drafter[column]) for column in columns] for drafter in trained]
        show_table(["name", "target", "tokens per step", "from"], rows, right=[2])
        say()


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


def _describe_safely(name: str) -> dict[str, Any]:
    """A broken drafter of another package must not break the list."""
    from slipstream.drafters import drafter_class

    try:
        return _describe(name, drafter_class(name))
    except Exception as error:
        return {"name": name, "error": f"cannot be loaded: {type(error).__name__}: {error}"}


def _describe(name: str, kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind.options_type)
    alone = _left_alone(kind.options_type)
    options = [
        {"name": field.name, "type": _type_name(hints[field.name]), "default": _default(field, alone is not None)}
        for field in dataclasses.fields(kind.options_type)
    ]
    if alone is not None:
        _add_usual(options, kind.usual(alone, on_cpu=True), kind.usual(alone, on_cpu=False))
    notes = " ".join((kind.options_type.__doc__ or "").split())
    texts = {fact: getattr(kind, fact, None) for fact in ("summary", "helps", "cost", "needs")}
    return {"name": name, **texts, "notes": notes, "options": options}


def _left_alone(options: type[Any]) -> Any:
    """The default options; None if the drafter needs some from the user."""
    try:
        return options()
    except (OptionError, TypeError):
        return None


def _add_usual(options: list[dict[str, Any]], cpu: Plan, gpu: Plan) -> None:
    """Add what the defaults of the common options mean on a CPU and on a GPU."""
    for option in options:
        if hasattr(cpu, option["name"]):
            option |= {"cpu": getattr(cpu, option["name"]), "gpu": getattr(gpu, option["name"])}


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "list of drafters"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _default(field: dataclasses.Field[Any], complete: bool) -> Any:
    """A JSON value; None if the option is required."""
    missing = field.default is dataclasses.MISSING or (not complete and field.default in ("", ()))
    return None if missing else field.default


def _print(drafter: dict[str, Any], *, is_default: bool) -> None:
    say(drafter["name"] + (" (default)" if is_default else ""), "title")
    if "error" in drafter:
        say(f"  {drafter['error']}\n", "bad")
        return
    say(f"  {drafter['summary']}")
    for fact in ("helps", "cost", "needs"):
        if drafter[fact] is not None:
            say(f"  {fact}: {drafter[fact]}")
    say(f"  {drafter['notes']}", "dim")
    rows = []
    for option in drafter["options"]:
        default = "(required)" if option["default"] is None else str(option["default"]) or "(none)"
        meant = {option.get(device, option["default"]) for device in ("cpu", "gpu")}
        per_device = [str(option["cpu"]), str(option["gpu"])] if meant != {option["default"]} else ["", ""]
        rows.append([f"  {option['name']}", option["type"], default, *per_device])
    shown = 5 if any(row[3] for row in rows) else 3
    show_table(["  option", "type", "default", "on a CPU", "on a GPU"][:shown], [row[:shown] for row in rows])
    say()
