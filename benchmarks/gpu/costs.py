"""What rounds cost, as a table for `slipstream simulate`.

python -m benchmarks.gpu --parts costs --seconds 50 --costs slipstream/bench/costs/h200-8b.json
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.bench.cost_table import PLAIN, CostTable

_PLAIN = ((256, 1), (2048, 1), (256, 16), (256, 64), (2048, 16), (256, 4), (8192, 1), (256, 128), (1024, 64), (8192, 8))
_TREES = {  # by batch
    1: ("", ",nodes=15,depth=5", ",nodes=31", ",nodes=7,depth=4"),
    16: (",nodes=15,depth=5", ",nodes=7,depth=4"),
    4: ("", ",nodes=15,depth=5"),
    64: (",nodes=2,depth=2,branch=1",),
}
PACED = (1, 16)  # batches whose steps are timed by the clock too
_CONTEXT = 256
_PROMPT_ROWS = 8192  # in one step, the engine's default on a GPU

Found = Mapping[str, list[dict[str, Any]]]


def shapes(drafters: Mapping[str, str], joined: list[str]) -> Iterator[tuple[str, int, int]]:
    """Settings, contexts and batches, the most telling first: a run may end before the last."""
    trees = [*joined, *drafters.values()]
    for context, batch in _PLAIN[:4]:
        yield PLAIN, context, batch
    for spec in trees:
        yield spec, _CONTEXT, 1
    for batch, options in _TREES.items():
        for spec in trees[:2]:
            yield from ((f"{spec}{more}", _CONTEXT, batch) for more in options if (batch, more) != (1, ""))
    for context, batch in _PLAIN[4:]:
        yield PLAIN, context, batch
    for spec in trees[:1]:
        yield from ((spec, context, 1) for context in (2048, 8192))


def table_of(found: Found, machine: str, arguments: list[str]) -> CostTable:
    """The table. What a step of plain decoding takes beyond its round is the rest."""
    passes, drafts = [], dict[str, list[tuple[int, int, float]]]()
    for row in found["costs"]:
        batch, nodes = row["batch"], row["nodes"]
        passes.append((batch * (1 + nodes), batch, row["context"], round(row["verify_ms"], 4)))
        if row["draft_ms"]:
            drafts.setdefault(_name(row["drafter"]), []).append((nodes, batch, round(row["draft_ms"], 4)))
    rounds = CostTable(passes)
    paced = [(row["batch"], row["step_ms"]) for row in found.get("paced", ())]
    rests = [(batch, round(max(0.0, ms - rounds.a_pass(batch, batch, _CONTEXT)), 4)) for batch, ms in paced]
    command = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    return CostTable(passes, drafts, rests, machine, command, _PROMPT_ROWS, rounds=True)


def _name(spec: str) -> str:
    """The drafters of a spec, without options."""
    return "+".join(part.partition(":")[0] for part in spec.split("+"))
