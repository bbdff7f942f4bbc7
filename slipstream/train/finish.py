"""The end of a training: the best weights, in the smallest form without a measurable loss, figures and a report."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.drafters.heads.weight_codec import FEWEST
from slipstream.drafters.registry import drafter_class
from slipstream.train import report
from slipstream.train.evaluate import Examiner, Score
from slipstream.train.state import Record, Tensors

# Tolerated loss of tokens per step of a smaller form of storage: two dozen answers cannot resolve less.
LOSS = 0.03
TREES, BRANCH = (8, 16, 32, 64), 4  # nodes, and children per node, even if a method drafts chains by default


@dataclass(frozen=True)
class _Form:
    """A way to store weights."""

    name: str
    dtype: torch.dtype
    bits: int | None = None

    def save(self, place: Path, drafter: Trained, files: Mapping[str, str] | None = None) -> None:
        weights = {name: weight.to(self.dtype) for name, weight in drafter.weights.items()}
        head_checkpoint.save(place, replace(drafter, weights=weights), bits=self.bits, files=files)


# Smallest first.
FORMS = (
    _Form(f"{FEWEST} bits", torch.float32, bits=FEWEST),
    _Form("int8", torch.float32, bits=8),
    _Form("bfloat16", torch.bfloat16),
    _Form("float32", torch.float32),
)


SMALLEST = FORMS[0]


def score_weights(drafter: Trained, weights: Tensors, examiner: Examiner) -> Score:
    """Score weights during a training, quantized as in the smallest file."""
    with tempfile.TemporaryDirectory(prefix="slipstream-train-") as folder:
        place = Path(folder) / drafter.method
        SMALLEST.save(place, replace(drafter, weights=weights))
        return examiner.score(place)


def finish(out: Path, drafter: Trained, record: Record, examiner: Examiner) -> Trained:
    """Write the checkpoint `out` and its report atomically, replacing an older one."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-train-"))
    try:
        marks = {}
        for form in FORMS:
            form.save(folder / form.name, drafter)
            marks[form.name] = examiner.score(folder / form.name)
        least = (1 - LOSS) * marks["float32"].tokens_per_step
        form = next(form for form in FORMS if marks[form.name].tokens_per_step >= least)
        branch = max(BRANCH, drafter_class(drafter.method).options_type().branch)
        measured = _figures(folder / form.name, marks[form.name], examiner, branch)
        figures = {**drafter.figures, "stored_as": form.name, **measured}
        figures["stored"] = {name: score.tokens_per_step for name, score in marks.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finished = replace(drafter, figures=figures)
    form.save(out, finished, report.files(finished, record))
    return finished


def _figures(place: Path, default: Score, examiner: Examiner, branch: int) -> dict[str, Any]:
    """The figures of a checkpoint: with the method's default tree, as a chain, and as trees of several sizes."""
    chain = examiner.score(place, branch=1)
    trees = {str(nodes): examiner.score(place, nodes=nodes, branch=branch).tokens_per_step for nodes in TREES}
    return {
        "tokens_per_step": default.tokens_per_step,
        "accepted_by_depth": default.by_depth,
        "chain": {"tokens_per_step": chain.tokens_per_step, "accepted_by_depth": chain.by_depth},
        "nodes": trees,
        "answers": default.answers,
        "looping": default.looping,
    }


def provenance(arguments: Mapping[str, Any], data: Mapping[str, Any], device: str) -> dict[str, Any]:
    """How a drafter was made."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {
        "slipstream": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": name,
        "arguments": dict(arguments),
        "data": {name: data.get(name) for name in ("model", "created", "arguments", "counts")},
    }
