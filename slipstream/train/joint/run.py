"""Joint training of a drafter and its target: more is accepted, and the target becomes another model.

First the head is trained alone, in an ordinary training. Then low-rank updates of the target's matrices are trained
with it, with a penalty on the distance from the original. At the end the updates are merged into the weights: a new
model is written, with its measured drift, and the head becomes an ordinary checkpoint for that model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream import checks
from slipstream.checks import Checked
from slipstream.drafters.heads.head import Head
from slipstream.drafters.heads.head_checkpoint import Trained
from slipstream.drafters.registry import make_options
from slipstream.errors import OptionError, SlipstreamError
from slipstream.folders import expanded
from slipstream.llm import LLM
from slipstream.models.decoder import Decoder
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.load import require_memory
from slipstream.models.model import Model
from slipstream.train.config import MINUTES
from slipstream.train.evaluate import Examiner, Score
from slipstream.train.finish import finish, score_weights
from slipstream.train.joint.drift import drift
from slipstream.train.joint.head import JointHead
from slipstream.train.joint.merged_model import MergedCheckpoint, require_writable, write_model
from slipstream.train.joint.model import TunedModel, require_tunable, updates_of
from slipstream.train.joint.notice import FACTS, Moved, summary, warning, write_notice
from slipstream.train.lessons import Texts
from slipstream.train.run import Training, TrainJob, learned_class, train
from slipstream.train.state import Record, Tensors
from slipstream.train.trainer import ProgressSink

_HEAD, _TUNED = "head.", "tuned."  # prefixes of the weights of the two in the state of a JointHead


@dataclass(frozen=True)
class JointSettings(Checked):
    """`rank`: of the updates. `tuned_layers`: how many of the last layers have them (0: all). `draft_weight`: weight of
    the head's loss against the distance from the original. `farthest`: weights with a larger mean KL divergence from
    the original on held-out text, in nats, are rejected, however well they draft: a model that always says the same is
    easy to guess. `warm_up`: share of the training in which the head is trained alone.
    """

    rank: int = 16
    tuned_layers: int = 0
    draft_weight: float = 0.2
    farthest: float = 0.1
    warm_up: float = 0.3

    def __post_init__(self) -> None:
        self.require(self.rank >= 1, "rank", "1 or more")
        self.require(self.tuned_layers >= 0, "tuned_layers", "0 or more")
        self.require(0.0 <= self.draft_weight < float("inf"), "draft_weight", "0 or more")
        self.require(self.farthest > 0.0, "farthest", "above 0")
        self.require(0.0 < self.warm_up < 1.0, "warm_up", "above 0, below 1")


def split_settings(method: str, given: Mapping[str, object]) -> tuple[JointSettings, dict[str, object]]:
    """Settings of a joint training, converted, and the rest for the method."""
    own = {field.name for field in fields(JointSettings)}
    ours = {name: value for name, value in given.items() if name in own}
    return make_options(method, JointSettings, ours), {name: given[name] for name in given if name not in own}


def require_places(joint: bool, out: object, model_out: object) -> None:
    """Refuse a joint training without an output directory, and a model directory without joint training."""
    if joint and out is None:
        raise OptionError("a joint training makes a new model and needs a directory for it", hint="-o DIR")
    if not joint and model_out is not None:
        raise OptionError("--model-out is for the model that a joint training makes", hint="give --joint, too")


def train_jointly(
    job: TrainJob, joint: JointSettings, sink: ProgressSink, model_out: Path | None = None
) -> tuple[Path, Path, Trained]:
    """Run a job, or continue it; returns the new model's place, the checkpoint's, and its content.

    Without `init` the head is first trained alone, into `out` with the suffix `-frozen`. The model goes to `out` with
    the suffix `-model`, unless `model_out` is given.
    """
    if job.resume or job.piece:
        raise OptionError("a joint training runs in one piece", hint="leave out --resume and --piece")
    require_places(True, job.out, model_out)
    assert job.out is not None
    _require_reading(job.method)
    out = expanded(job.out).resolve()
    place = out.with_name(f"{out.name}-model") if model_out is None else expanded(model_out).resolve()
    _require_free(place, out, expanded(job.model).resolve())
    source = open_checkpoint(job.model)
    require_tunable(source.config, source.name)
    require_writable(source)
    sink.tell(warning(source.name))
    begun = job if job.init else _warmed_up(replace(job, out=out), joint, sink)
    plan = partial(JointTraining, joint=joint, source=source, place=place, init=job.init)
    out, drafter = train(begun, sink, plan)
    _require_made(place, out, drafter)
    return place, out, drafter


def _require_reading(method: str) -> None:
    """Refuse a method that is not trained, and one whose head reads nothing of the target."""
    if getattr(learned_class(method).head_type, "taps", None) == ():
        raise OptionError(
            f"{method} reads nothing of the target, so tuning it would not help",
            hint="train it without --joint",
        )


def _require_made(place: Path, out: Path, drafter: Trained) -> None:
    """An existing checkpoint is usable only with its model."""
    facts = json.loads((place / FACTS).read_text(encoding="utf-8")) if (place / FACTS).is_file() else {}
    if facts.get("joint") != drafter.provenance["joint"]:
        name = drafter.target.name
        raise OptionError(f"{out} was made for {name!r}, which is not at {place}", hint="--restart makes both anew")


def _require_free(place: Path, out: Path, original: Path) -> None:
    """Refuse a directory for the model that holds something else or cannot be written."""
    if place in (out, original):
        what = "checkpoint" if place == out else "original"
        raise OptionError(f"{str(place)!r} cannot hold both the new model and the {what}", hint="name another place")
    if place.exists() and not (place / FACTS).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise OptionError(f"{str(place)!r} exists and was not made by a joint training", hint="name another place")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        probe = place.with_name(f".{place.name}-probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from error


def _warmed_up(job: TrainJob, joint: JointSettings, sink: ProgressSink) -> TrainJob:
    """Train the head alone; returns the job for the rest."""
    assert job.out is not None
    config, share = job.config, joint.warm_up
    steps, minutes = config.steps, 0.0 if config.steps else config.minutes or MINUTES
    checks.require(steps != 1, "steps", steps, "2 or more, some of them to warm up")
    alone = min(max(1, round(share * steps)), steps - 1) if steps else 0
    first = replace(config, steps=alone, minutes=share * minutes)
    sink.tell("first the head is trained alone")
    frozen, _ = train(replace(job, out=job.out.with_name(f"{job.out.name}-frozen"), config=first), sink)
    sink.tell("now the head and the target are trained together")
    rest = replace(config, steps=steps - alone, minutes=(1 - share) * minutes)
    return replace(job, init=str(frozen), config=rest)


class JointTraining(Training):
    """A training whose target is trained with the head. `init`: what the user asked to start from."""

    def __init__(self, *arguments: Any, joint: JointSettings, source: Checkpoint, place: Path, init: str) -> None:
        super().__init__(*arguments)
        self._joint = joint
        self._source = source
        self._place = place
        self._arguments |= {"init": init, **{f"joint {name}": value for name, value in asdict(joint).items()}}

    def _head(self, texts: Texts) -> Head:
        model, joint = self._llm.model, self._joint
        head = super()._head(texts)
        require_memory(f"a second copy of {model.name}", model.config, model.dtype, model.device)
        tuned = TunedModel(self._source, model.dtype, model.device, rank=joint.rank, layers=joint.tuned_layers)
        return JointHead(head, tuned, joint.draft_weight).to(model.device).train()

    def _merged(self, weights: Tensors) -> MergedCheckpoint:
        return MergedCheckpoint(self._source, updates_of(_part(weights, _TUNED)), self._llm.model.dtype)

    def _scoring(self, drafter: Trained, texts: Texts, examiner: Examiner) -> Callable[[Tensors], Score]:
        def score(weights: Tensors) -> Score:
            own = self._llm.model
            tuned = Decoder(self._merged(weights), own.dtype, own.device)
            away = drift(own, tuned, texts, most=self._config.prompts).kl
            if not away <= self._joint.farthest:
                self._sink.tell(f"{away:.4f} nats away from the original: too far, rejected")
                return Score(0.0, [], 0, 0)
            self._sink.tell(f"{away:.4f} nats away from the original")
            with _speaking(self._llm, tuned):
                return score_weights(_made_for(drafter, tuned), _part(weights, _HEAD), examiner)

        return score

    def _concluded(self, drafter: Trained, record: Record, texts: Texts, examiner: Examiner) -> Trained:
        """Write the model, load it as its users will, measure it, and only then give it its name."""
        assert self._start is not None
        frozen, original, job = self._start, self._llm.model, self._job
        if record.best_step == 0:
            raise SlipstreamError(
                f"tuning {original.name} found nothing better in {record.step} steps within "
                f"{self._joint.farthest:g} nats of the original, so no new model is written",
                hint="train longer or with a smaller --rate, with --restart; or use the head that was trained alone",
            )
        weights, head = drafter.weights, replace(drafter, weights=_part(drafter.weights, _HEAD))
        self._sink.tell("writing the new model and measuring how far it is from the original")
        before = score_weights(frozen, frozen.weights, examiner)
        folder = self._place.with_name(f".{self._place.name}-{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write_model(self._merged(weights), folder)
            length = self._llm.max_model_len
            llm = LLM(folder, speculate=None, dtype=job.dtype, device=job.device, max_model_len=length)
            _require_another(llm.model, original)
            head = _made_for(head, llm.model, self._place.name)
            _, examiner = self._examiners(texts, llm)
            now = score_weights(head, head.weights, examiner)
            moved = Moved(
                drift(original, llm.model, texts),
                frozen.target,
                head.target,
                before.tokens_per_step,
                now.tokens_per_step,
            )
            facts = moved.facts(asdict(self._joint))
            head = replace(head, provenance={**head.provenance, "joint": facts})
            write_notice(folder, moved, job.method, head.provenance)
            _replace(self._place, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._sink.tell(summary(facts))
        return finish(self._out, head, record, examiner)


def _replace(place: Path, new: Path) -> None:
    """Atomically put a directory in place of another one."""
    old = place.with_name(f".{place.name}-old-{os.getpid()}")
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _speaking(llm: LLM, model: Model) -> Iterator[None]:
    """Let an LLM run other weights of the same shape for a while."""
    own = llm.swap_model(model)
    try:
        yield
    finally:
        llm.swap_model(own)


def _made_for(drafter: Trained, model: Model, name: str = "") -> Trained:
    """The checkpoint, for another target of the same shape."""
    target = replace(drafter.target, fingerprint=model.fingerprint, name=name or drafter.target.name)
    return replace(drafter, target=target)


def _part(weights: Tensors, prefix: str) -> Tensors:
    """The weights with this prefix, without it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _require_another(model: Model, original: Model) -> None:
    """Refuse a model with the original's fingerprint: it would be mistaken for it."""
    if model.fingerprint == original.fingerprint:
        raise SlipstreamError(
            f"the updates of {original.name} are too small to distinguish the new model from it",
            hint="train longer or with a larger --rate, with --restart",
        )
