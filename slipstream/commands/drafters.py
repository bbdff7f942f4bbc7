"""`slipstream drafters`: lists the installed drafters and their options."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

from slipstream.commands.shared.options import Described
from slipstream.commands.shared.terminal import print_json, say, show_table
from slipstream.errors import OptionError
from slipstream.types import Plan


def drafters(
    name: Annotated[str | None, Described("show only this drafter", metavar="[NAME]", positional=True)] = None,
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> None:
    """List the drafters and their options."""
    from slipstream.drafters import drafter_class, drafter_names
    from slipstream.drafters.registry import DEFAULT

    if name is not None:
        described = [_describe(name, drafter_class(name))]
    else:
        described = [_describe_safely(known) for known in drafter_names()]
    if as_json:
        print_json(described[0] if name is not None else {"default": DEFAULT, "drafters": described}, indent=2)
        return
    for drafter in described:
        _print(drafter, is_default=drafter["name"] == DEFAULT)
    if name is None:
        say("Options are given as in --speculate suffix:depth=8,branch=2", "dim")


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
