"""Where in a JSON schema an error is, found by compiling its parts: llguidance often names only the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

_TRIES = 400  # parts that are compiled at most
_SHARED = ("$schema", "$defs", "definitions", "$id")  # of the whole schema: parts may refer to them
# Keywords that hold schemas: a mapping of them, a list, or one. Definitions first: an error is where it is written.
_MAPPINGS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")

Schema = dict[str, object]


def bad_place(schema: object, message: str, error_of: Callable[[Schema], str]) -> str:
    """The path of the smallest part with the same error, as in ` at /properties/a`; empty for the whole schema."""
    shared = {name: schema[name] for name in _SHARED if name in schema} if isinstance(schema, dict) else {}
    tries = count()

    def same(part: Schema) -> bool:
        return next(tries) < _TRIES and error_of({**shared, **part}) == message

    place = ""
    part: object = schema
    while (found := next(((name, child) for name, child in _parts(part) if same(child)), None)) is not None:
        place, part = f"{place}/{found[0]}", found[1]
    return f" at {place}" if place else ""


def _parts(schema: object) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside a schema, with their paths."""
    if not isinstance(schema, dict):
        return
    for keyword in _MAPPINGS:
        if isinstance(children := schema.get(keyword), dict):
            yield from ((f"{keyword}/{key}", child) for key, child in children.items() if isinstance(child, dict))
    for keyword in _LISTS:
        if isinstance(children := schema.get(keyword), list):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(children) if isinstance(child, dict))
    for keyword in _ONE:
        if isinstance(child := schema.get(keyword), dict):
            yield keyword, child
