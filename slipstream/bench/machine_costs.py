"""Measures the costs of this machine: passes directly, drafts and the rest from the counters of measured answers."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.attention import Segment
from slipstream.bench.cost_table import CostTable
from slipstream.bench.measure import Answer
from slipstream.bench.schedule import PLAIN, Condition
from slipstream.cache import PageTable
from slipstream.llm import LLM
from slipstream.native.machine import cpu_model

_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_SEQUENCES = (1, 4, 16)
_CONTEXTS = (128, 1024)
_PROMPTS = "prompts"  # beside the names of settings
_LEAST_PACE = 0.2
_ROUNDS = 5  # the fastest half counts: other programs only slow a pass down


def measure_costs(llm: LLM, answers: Sequence[Answer], conditions: Sequence[Condition], seconds: float) -> CostTable:
    """The table of this machine. Passes are measured for at most about `seconds`, each at least twice."""
    passes = llm.on_engine(lambda: _passes(llm, seconds))
    drafts, others = _counted(answers, conditions)
    where = torch.cuda.get_device_name(llm.model.device) if llm.model.device != "cpu" else cpu_model()
    what = f"{llm.model.name}, {str(llm.model.dtype).removeprefix('torch.')}, {where}"
    table = CostTable(passes, drafts, others, what, "slipstream bench --trace")
    alone = [answer for answer in answers if conditions[answer.condition].batch == 1]
    return replace(table, pass_ms=paced(table, alone))


def paced(table: CostTable, answers: Sequence[Answer]) -> list[tuple[int, int, int, float]]:
    """The passes of a table, as long as they take in the real steps of answers at batch 1.

    Alone, a pass finds its weights still in caches, and nobody reads what it gives. How much longer it takes in a step
    is known for the rows of plain steps, of each setting's trees and of prompts, and taken in between for the others.
    """
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for answer in answers:
        stats, prompt = answer.stats, answer.prompt_tokens
        if stats.prefill_ms > 0:
            ratios[_PROMPTS].append((prompt, stats.prefill_ms / table.a_pass(prompt, 1, prompt / 2)))
        if stats.steps > 1:
            rows, context = 1 + stats.drafted / stats.steps, prompt + len(answer.token_ids) / 2
            ms = (stats.decode_ms - stats.draft_ms) / (stats.steps - 1) - table.other(1)
            ratios[answer.setting].append((rows, ms / table.a_pass(rows, 1, context)))
    found = sorted(tuple(map(statistics.median, zip(*each, strict=True))) for each in ratios.values())
    if not found:
        return table.pass_ms
    known, times = np.log([rows for rows, _ in found]), [max(ratio, _LEAST_PACE) for _, ratio in found]
    pace = np.interp([math.log(rows) for rows, *_ in table.pass_ms], known, times).tolist()
    return [(*shape[:3], round(by * shape[3], 4)) for shape, by in zip(table.pass_ms, pace, strict=True)]


def _passes(llm: LLM, seconds: float) -> list[tuple[int, int, int, float]]:
    """Medians of the fastest passes: [rows, sequences, context, ms]; all shapes in turns."""
    target = llm.target
    shapes = [
        (rows, sequences, context)
        for rows in _ROWS
        for sequences in _SEQUENCES
        for context in _CONTEXTS
        if rows >= sequences and (sequences == 1 or rows < _ROWS[-1]) and context + rows < llm.max_model_len
    ]
    tables = [PageTable() for _ in range(max(_SEQUENCES))]
    room = max(context + rows // sequences for rows, sequences, context in shapes)
    times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    began = time.perf_counter()
    try:
        for table in tables:
            target.cache.reserve(table, room + 1)
        for turn in range(_ROUNDS + 1):
            if turn > 2 and time.perf_counter() - began > seconds * turn / (turn + 1):
                break
            for shape in shapes:
                started = time.perf_counter()
                _run(llm, tables, *shape)
                if turn:  # the first turn is the warm-up
                    times[shape].append(1000 * (time.perf_counter() - started))
    finally:
        for table in tables:
            target.cache.release(table)
    return [(*shape, round(_usual(found), 4)) for shape, found in times.items()]


def _run(llm: LLM, tables: Sequence[PageTable], rows: int, sequences: int, context: int) -> None:
    """A pass over `rows` rows, spread over the sequences, each after `context` rows of any content."""
    segments = []
    for number in range(sequences):
        count = rows // sequences + (number < rows % sequences)
        positions = np.arange(context, context + count, dtype=np.int64)
        tokens = [(7 * number + row) % llm.model.config.vocab_size for row in range(count)]
        visible = np.tri(count, dtype=np.bool_)
        segments.append(Segment(tables[number], context, tokens, positions, visible, 0))
    with torch.inference_mode():
        output = llm.target.run(segments, range(llm.model.config.layers))
        output.logits.argmax(dim=1).tolist()  # synchronises with the device


def _usual(times: Sequence[float]) -> float:
    return statistics.median(sorted(times)[: (len(times) + 1) // 2])


def _counted(
    answers: Sequence[Answer], conditions: Sequence[Condition]
) -> tuple[dict[str, list[tuple[int, int, float]]], list[tuple[int, float]]]:
    """Milliseconds of drafts by drafter, nodes and sequences, and of the rest of a step by sequences: medians."""
    drafts: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    others: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        condition, stats = conditions[answer.condition], answer.stats
        batch = condition.batch
        if stats.steps > 1:
            others[batch].append(batch * stats.other_ms / stats.steps)  # counters have a sequence's share of a step
        if answer.setting != PLAIN and stats.drafting_steps:
            key = answer.setting, condition.nodes or 0, batch
            drafts[key].append((stats.drafted / stats.drafting_steps, batch * stats.draft_ms / stats.drafting_steps))
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for (name, _, batch), pairs in drafts.items():
        nodes, ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        found[name].append((round(nodes), batch, round(ms, 4)))
    return dict(found), [(batch, round(statistics.median(each), 4)) for batch, each in sorted(others.items())]
