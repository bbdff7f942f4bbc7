"""Models that some drafters need beside the target, which a body has not got.

`draft_model:model=` and `cascade` need a model of the body's vocabulary. A user of an 8B would take one of 1B from the
same family, so it is that: the small model's distilled draft, which guesses as such a draft does and not always right,
in the body of Llama 3.2 1B. `foreign_draft` needs a model of another vocabulary, and that has to be given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream import LLM
from slipstream.bench.bodies import BodyCheckpoint
from slipstream.bench.body_shapes import BodyShape
from slipstream.models.hf import HFCheckpoint
from slipstream.train.foreign import write_foreign
from slipstream.train.interchange import HF_MODEL, export_drafter, load_for
from slipstream.train.merged_model import MergedCheckpoint, write_model

DRAFT = BodyShape(2048, 16, 32, 8, 64, 8192, 128_256)


def drafters(
    body: BodyCheckpoint, distilled: Path | None, foreign: str, folder: Path, shape: BodyShape = DRAFT
) -> list[str]:
    """Those that need such models, as `use` takes them, their models in `folder`.

    `distilled`: the checkpoint of the small model's draft. `foreign`: a model of another vocabulary. Either may be
    missing, and what needs it is.
    """
    found = []
    if distilled is not None:
        draft = write_draft(body, distilled, folder, shape)
        found += [f"draft_model:model={draft}", f"cascade:suffix+draft_model:model={draft}"]
    return [*found, f"foreign_draft:model={foreign}"] if foreign else found


def write_draft(body: BodyCheckpoint, distilled: Path, folder: Path, shape: BodyShape) -> Path:
    """A directory in `folder` with a draft of the body's vocabulary and context, for the body's device and dtype."""
    target = LLM(body.source, speculate=None, device="cpu", dtype="float32", quantize="none").engine.drafter.target
    small, large = folder / "135m", folder / "1b"
    write_foreign(small, export_drafter(load_for(HF_MODEL, distilled), distilled, HF_MODEL, target))
    shape, placing = replace(shape, vocab_size=body.config.vocab_size), body.placing
    draft = BodyCheckpoint(HFCheckpoint(small), "1b", shape, placing.device, placing.dtype)
    draft.config = replace(draft.config, context=body.config.context)
    large.mkdir()
    write_model(MergedCheckpoint(draft, {}, placing.dtype), large)
    return large
