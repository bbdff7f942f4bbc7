"""Models that some drafters need beside the target, and that a body does not have.

`draft_model:model=` and `cascade` need a model of the body's vocabulary. A user of an 8B would take a 1B of the same
family, so it is the small model's distilled draft, which is as often wrong as such a draft, in the body of Llama 3.2
1B. `foreign_draft` needs a model of another vocabulary, which must be given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.bodies.bodies import BodyCheckpoint
from benchmarks.bodies.shapes import BodyShape
from slipstream import LLM
from slipstream.drafters.interchange.foreign import write_foreign
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.train.interchange.export import HF_MODEL, export_drafter, load_for
from slipstream.train.joint.merged_model import MergedCheckpoint, write_model

DRAFT = BodyShape(2048, 16, 32, 8, 64, 8192, 128_256)


def drafters(
    body: BodyCheckpoint, distilled: Path | None, foreign: str, folder: Path, shape: BodyShape = DRAFT
) -> list[str]:
    """The drafters that need such models, as `use` takes them, with their models in `folder`.

    `distilled`: the checkpoint of the small model's draft. `foreign`: a model of another vocabulary. Without one of
    them the drafters that need it are left out.
    """
    found = []
    if distilled is not None:
        draft = write_draft(body, distilled, folder, shape)
        found += [f"draft_model:model={draft}", f"cascade:suffix+draft_model:model={draft}"]
    return [*found, f"foreign_draft:model={foreign}"] if foreign else found


def write_draft(body: BodyCheckpoint, distilled: Path, folder: Path, shape: BodyShape) -> Path:
    """A directory in `folder` with a draft of the body's vocabulary and context, for the body's device and dtype."""
    target = LLM(body.source, speculate=None, device="cpu", dtype="float32", quantize="none").target
    small, large = folder / "135m", folder / "1b"
    write_foreign(small, export_drafter(load_for(HF_MODEL, distilled), distilled, HF_MODEL, target))
    shape, placing = replace(shape, vocab_size=body.config.vocab_size), body.placing
    draft = BodyCheckpoint(HFCheckpoint(small), "1b", shape, placing.device, placing.dtype)
    draft.config = replace(draft.config, context=body.config.context)
    large.mkdir()
    write_model(MergedCheckpoint(draft, {}, placing.dtype), large)
    return large
