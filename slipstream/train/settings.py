"""Settings of a method in command-line syntax."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import OptionError


def parsed(settings: Iterable[str]) -> dict[str, object]:
    """`["unroll=4", "mlp=512"]` as names and values."""
    named: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise OptionError(f"--set {setting!r} is not NAME=VALUE", hint="as in --set unroll=4")
        if name in named:
            raise OptionError(f"--set names {name!r} twice")
        named[name] = value
    return named
