"""A setting with trees of another size, whatever its drafter calls that."""

from __future__ import annotations

from dataclasses import replace

from slipstream.drafters.registry import DrafterSpec, parse_speculate

_NAMES = {"auto": "max_nodes"}  # where the option has another name than `nodes`
_CHAINS = "cascade"  # its draft is the chain of its last level


def sized(setting: str, nodes: int) -> str:
    """The setting with so many nodes at most: of a merged tree as a whole, and instead of a size that it has."""
    spec = parse_speculate(setting)
    if spec.method == _CHAINS:
        *below, last = spec.checked().levels  # type: ignore[attr-defined]
        kept = {name: value for name, value in last.options.items() if name != "nodes"}
        return str(DrafterSpec(_CHAINS, {"levels": (*below, replace(last, options={**kept, "depth": nodes}))}))
    name = _NAMES.get(spec.method, "nodes")
    # The size comes first: a list of drafters ends a setting, or what follows it would be read as its last one's.
    return str(DrafterSpec(spec.method, {name: nodes, **{n: v for n, v in spec.options.items() if n != name}}))
