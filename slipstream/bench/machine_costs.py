"""Measures the costs of this machine: passes of all shapes alone, and real steps, by which they are scaled."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.attention import Segment
from slipstream.bench.cost_table import CostTable
from slipstream.bench.measure import Run
from slipstream.bench.real_steps import RealStep, real_steps, usual
from slipstream.bench.traces import TracedAnswer
from slipstream.cache import PageTable
from slipstream.llm import LLM
from slipstream.native.machine import cpu_model

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SEQUENCES = (1, 4, 16)
_CONTEXTS = (128, 1024)
_PASSES_SHARE = 0.3  # of the time, for passes alone
_LEAST_STEPS = 5  # of a setting with so many sequences, for a median
_LEAST_PACE = 0.2
_PROMPT_ROWS = 32  # and more: prompts that were not in the cache
_ROUNDS = 5  # the fastest half counts: other programs only slow a pass down


def measure_costs(run: Run, seconds: float) -> CostTable:
    """The table of this machine: passes alone for some of the time, then real steps, which say what they take there."""
    llm = run.llm
    passes = llm.on_engine(lambda: _passes(llm, _PASSES_SHARE * seconds))
    steps = real_steps(run, (1 - _PASSES_SHARE) * seconds)
    where = torch.cuda.get_device_name(llm.model.device) if llm.model.device != "cpu" else cpu_model()
    what = f"{llm.model.name}, {str(llm.model.dtype).removeprefix('torch.')}, {where}"
    rows = llm.engine.scheduler.prompt_rows
    table = CostTable(passes, drafts_of(steps, run.traces or []), [], what, "slipstream bench --trace", rows)
    return paced(table, steps)


def drafts_of(
    steps: Sequence[RealStep], traced: Sequence[TracedAnswer] = ()
) -> dict[str, list[tuple[int, int, float]]]:
    """Milliseconds of drafts by setting, nodes and sequences; of a setting that hardly drafted there, as traced."""
    groups: dict[tuple[str, int], list[RealStep]] = defaultdict(list)
    for step in steps:
        if step.drafting and not step.prompt_rows:
            groups[step.setting, step.sequences].append(step)
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for (setting, sequences), group in groups.items():
        if len(group) >= _LEAST_STEPS:
            nodes, ms = usual(group)
            found[setting].append((round(nodes), sequences, round(ms, 4)))
    known = set(found)
    for answer in traced:
        nodes_of = [len(step.parents) for step in answer.steps if step.parents]
        if nodes_of and answer.setting not in known:
            found[answer.setting].append((round(statistics.mean(nodes_of)), 1, round(answer.draft_ms, 4)))
    return dict(found)


def paced(table: CostTable, steps: Sequence[RealStep]) -> CostTable:
    """A table whose passes take as long as they do in real steps, with all of a step but its draft.

    A pass alone finds its weights in caches, its trees are chains, and its results are not verified or emitted. How
    much longer a step takes was measured by number of sequences, for the rows of each setting's steps, and is
    interpolated for others. Most rows of a prompt have no logits.
    """
    ratios: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        if not step.prompt_rows:
            alone = table.a_pass(step.rows, step.sequences, step.context)
            ratios[step.sequences][step.setting].append((step.rows, (step.ms - step.draft_ms) / alone))
    known = {
        sequences: [pairs for pairs in by_setting.values() if len(pairs) >= _LEAST_STEPS]
        for sequences, by_setting in sorted(ratios.items())
    }
    curves = {sequences: sorted(map(_middle, groups)) for sequences, groups in known.items() if groups}
    if not curves:
        return table
    found = replace(table, pass_ms=[(r, s, c, round(ms * _pace(curves, r, s), 4)) for r, s, c, ms in table.pass_ms])
    prompts = [
        step.ms / found.a_pass(step.rows, 1, step.rows / 2) for step in steps if step.prompt_rows >= _PROMPT_ROWS
    ]
    return replace(found, prompt_row=round(statistics.median(prompts), 4)) if prompts else found


def _middle(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    rows, ratios = zip(*pairs, strict=True)
    return statistics.median(rows), max(statistics.median(ratios), _LEAST_PACE)


def _pace(curves: Mapping[int, Sequence[tuple[float, float]]], rows: int, sequences: int) -> float:
    """The pace for so many sequences, interpolated between the nearest measured numbers of sequences."""
    known = [
        np.interp(math.log(rows), np.log([each for each, _ in curve]), [ratio for _, ratio in curve])
        for curve in curves.values()
    ]
    return float(np.interp(math.log(sequences), np.log(list(curves)), known))


def _passes(llm: LLM, seconds: float) -> list[tuple[int, int, int, float]]:
    """Medians of the fastest passes: [rows, sequences, context, ms]; all shapes in turns."""
    target = llm.target
    shapes = [
        (rows, sequences, context)
        for rows in _ROWS
        for sequences in _SEQUENCES
        for context in _CONTEXTS
        if rows >= sequences and context + rows < llm.max_model_len
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
