"""Streams that step the engine themselves, on the reader's thread: nothing runs between two deltas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.tree import TokenTree
from slipstream.types import Delta


def stepped(llm: LLM, prompt: Any, how: SamplingParams, *, trace: bool = False) -> Iterator[Delta]:
    """`LLM.stream` for a request of one choice, without the loop. Others may step the engine in between."""
    (sequence,) = llm.sequences(prompt, how, trace=trace)
    llm.engine.scheduler.add([sequence])
    given = shown = 0
    trees: list[TokenTree] = []
    try:
        while not sequence.finished or given < len(sequence.output_ids):
            if given == len(sequence.output_ids):
                trees += [tree for item in llm.engine.step() if item.sequence is sequence for tree in item.trees]
                continue
            start, given = given, len(sequence.output_ids)
            before, shown = shown, len(sequence.text)
            yield Delta(
                0,
                sequence.text[before:shown],
                sequence.output_ids[start:given],
                sequence.stats.origins[start:given],
                sequence.finish_reason,
                sequence.completion() if sequence.finished else None,
                trees,
            )
            trees = []
    finally:
        llm.engine.cancel(sequence)
