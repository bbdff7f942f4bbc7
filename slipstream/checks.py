"""Arguments as users give them: a check returns the value in Python's own type or refuses it by name, in one line."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from slipstream.errors import OptionError


def require(ok: bool, name: str, value: object, valid: str) -> None:
    """Refuse a value that is out of range."""
    if not ok:
        raise OptionError(f"{name}={shown(value)} is out of range", hint=f"valid: {valid}")


class Checked:
    """A dataclass of options whose `__post_init__` refuses those that are out of range."""

    def require(self, ok: bool, name: str, valid: str) -> None:
        """Refuse the option of that name unless `ok`."""
        require(ok, name, getattr(self, name), valid)


def integer(name: str, value: object, low: int, high: int | None = None, *, valid: str | None = None) -> int:
    """`value` as an int from `low` to `high`; numpy's integers are integers, bools and whole floats are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise OptionError(f"{name}={shown(value)} is not an integer", hint=f"valid: {valid or _span(low, high)}")
    given = int(value)
    require(given >= low and (high is None or given <= high), name, value, valid or _span(low, high))
    return given


def number(name: str, value: object, low: float, high: float, *, valid: str | None = None) -> float:
    """`value` as a float from `low` to `high`; NaN is never in range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name}={shown(value)} is not a number", hint=f"valid: {valid or _span(low, high)}")
    try:
        given = float(value)
    except OverflowError:
        given = math.inf
    require(low <= given <= high, name, value, valid or _span(low, high))
    return given


def flag(name: str, value: object) -> bool:
    """`value`, which is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={shown(value)} is not a bool", hint="valid: True or False")
    return value


def text(name: str, value: object) -> str:
    """`value`, which is a string with more than white space in it."""
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"{name}={shown(value)} is not a name", hint="valid: a string that is not empty")
    return value


def listed(name: str, value: object, what: str) -> list[object]:
    """The elements of a list, a tuple, an array, ...; a single string, bytes and mappings are refused."""
    try:
        if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
            raise TypeError
        return list(value)
    except TypeError:  # also of an array that has no dimension
        raise OptionError(f"{name}={shown(value)} is not a list of {what}") from None


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """The token ids in a list."""
    return tuple(integer(f"{name}[{i}]", v, 0) for i, v in enumerate(listed(name, value, "token ids")))


def strings(name: str, value: object) -> tuple[str, ...]:
    """The strings in a list, none of them empty."""
    found = listed(name, value, "strings")
    for i, item in enumerate(found):
        require(isinstance(item, str) and item != "", f"{name}[{i}]", item, "non-empty strings")
    return tuple(str(item) for item in found)


def shown(value: object) -> str:
    """A value for an error message: short, and in one line."""
    return " ".join(reprlib.repr(value).split())


def _span(low: float, high: float | None) -> str:
    return f"{low:g} or more" if high is None else f"{low:g} to {high:g}"
