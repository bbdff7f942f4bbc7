"""A drafter and its target, trained together: more is accepted, and the target becomes another model.

First the head learns alone, in an ordinary training of its own. Then low-rank updates of the target's matrices learn
with it, held to what the original says. In the end the updates are merged into the weights: a new model is written,
with how far it is from the original, and the head becomes an ordinary checkpoint for that model.
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

from slipstream.drafters.head import Head
from slipstream.drafters.registry import make_options
from slipstream.drafters.trained import Trained
from slipstream.errors import OptionError, SlipstreamError
from slipstream.folders import expanded
from slipstream.llm import LLM
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.load import require_memory
from slipstream.models.loader import open_checkpoint
from slipstream.models.model import Model
from slipstream.train.course import MINUTES
from slipstream.train.drift import drift
from slipstream.train.evaluate import Examiner, Mark
from slipstream.train.finish import finish, mark_weights
from slipstream.train.joint_head import JointHead
from slipstream.train.joint_model import TunedModel, require_tunable, updates_of
from slipstream.train.joint_notice import FACTS, Moved, summary, warning, write_notice
from slipstream.train.lessons import Texts
from slipstream.train.merged_model import MergedCheckpoint, require_writable, write_model
from slipstream.train.run import Order, Training, learned_class, train
from slipstream.train.state import Record, Tensors
from slipstream.train.trainer import Watch

_HEAD, _TUNED = "head.", "tuned."  # how the weights of the two begin in the state of a JointHead


@dataclass(frozen=True)
class JointSettings:
    """`rank`: of the updates. `tuned_layers`: how many of the last layers have them (0: all). `draft_weight`: what the
    head's losses count against the distance from the original. `farthest`: weights that are more nats than that away
    from the original, on average over held-out text, are not taken, however well they draft: a model that always says
    the same is easy to guess. `warm_up`: the share of the course in which the head learns alone.
    """

    rank: int = 16
    tuned_layers: int = 0
    draft_weight: float = 0.2
    farthest: float = 0.1
    warm_up: float = 0.3

    def __post_init__(self) -> None:
        self._require(self.rank >= 1, "rank", "1 or more")
        self._require(self.tuned_layers >= 0, "tuned_layers", "0 or more")
        self._require(0.0 <= self.draft_weight < float("inf"), "draft_weight", "0 or more")
        self._require(self.farthest > 0.0, "farthest", "above 0")
        self._require(0.0 < self.warm_up < 1.0, "warm_up", "above 0, below 1")

    def _require(self, ok: bool, name: str, valid: str) -> None:
        if not ok:
            raise OptionError(f"{name}={getattr(self, name)!r} is out of range", hint=f"valid: {valid}")


def split_settings(method: str, given: Mapping[str, object]) -> tuple[JointSettings, dict[str, object]]:
    """Settings of a joint training, converted, and those that are left for the method."""
    own = {field.name for field in fields(JointSettings)}
    ours = {name: value for name, value in given.items() if name in own}
    return make_options(method, JointSettings, ours), {name: given[name] for name in given if name not in own}


def require_places(joint: bool, out: object, model_out: object) -> None:
    """Refuse a joint training that does not know where to, and a place for a model where none is made."""
    if joint and out is None:
        raise OptionError("a joint training makes a new model, and has to be told where to put it", hint="-o DIR")
    if not joint and model_out is not None:
        raise OptionError("--model-out is for the model that a joint training makes", hint="give --joint, too")


def train_jointly(
    order: Order, joint: JointSettings, watch: Watch, model_out: Path | None = None
) -> tuple[Path, Path, Trained]:
    """Carry out an order, or go on with it: the new model's place, the checkpoint's, and what is in that.

    Without `order.init` the head is trained alone first, beside `order.out` under its name and `-frozen`. The model
    lies beside it, too, under its name and `-model`, unless `model_out` is given.
    """
    require_places(True, order.out, model_out)
    assert order.out is not None
    _require_reading(order.method)
    out = expanded(order.out).resolve()
    place = out.with_name(f"{out.name}-model") if model_out is None else expanded(model_out).resolve()
    _require_free(place, out, expanded(order.model).resolve())
    source = open_checkpoint(order.model)
    require_tunable(source.config, source.name)
    require_writable(source)
    watch.tell(warning(source.name))
    begun = order if order.init else _warmed_up(replace(order, out=out), joint, watch)
    plan = partial(JointTraining, joint=joint, source=source, place=place, init=order.init)
    out, drafter = train(begun, watch, plan)
    _require_made(place, out, drafter)
    return place, out, drafter


def _require_reading(method: str) -> None:
    """Refuse a method that does not learn, and one whose head would have nothing of a tuned target."""
    if getattr(learned_class(method).head_type, "taps", None) == ():
        raise OptionError(f"{method} reads nothing of the target: tuned in vain", hint="train it without --joint")


def _require_made(place: Path, out: Path, drafter: Trained) -> None:
    """A checkpoint that was there already is of use only with its model."""
    facts = json.loads((place / FACTS).read_text(encoding="utf-8")) if (place / FACTS).is_file() else {}
    if facts.get("joint") != drafter.provenance["joint"]:
        name = drafter.target.name
        raise OptionError(f"{out} was made for {name!r}, which is not at {place}", hint="--restart makes both anew")


def _require_free(place: Path, out: Path, original: Path) -> None:
    """Refuse a place for the model where something else lies, or where nothing can be written."""
    if place in (out, original):
        what = "checkpoint" if place == out else "original"
        raise OptionError(f"{str(place)!r} cannot hold both the new model and the {what}", hint="name another place")
    if place.exists() and not (place / FACTS).is_file() and not (place.is_dir() and not any(place.iterdir())):
        raise OptionError(f"{str(place)!r} is there, and no joint training made it", hint="name another place")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        probe = place.with_name(f".{place.name}-probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from error


def _warmed_up(order: Order, joint: JointSettings, watch: Watch) -> Order:
    """Train the head alone; the order for what is left of the course."""
    assert order.out is not None
    course, share = order.course, joint.warm_up
    steps, minutes = course.steps, 0.0 if course.steps else course.minutes or MINUTES
    if steps == 1:
        raise OptionError("steps=1 is out of range", hint="valid: 2 or more, some of them to warm up")
    alone = min(max(1, round(share * steps)), steps - 1) if steps else 0
    first = replace(course, steps=alone, minutes=share * minutes)
    watch.tell("first the head learns alone")
    frozen, _ = train(replace(order, out=order.out.with_name(f"{order.out.name}-frozen"), course=first), watch)
    watch.tell("now the head and the target learn together")
    rest = replace(course, steps=steps - alone, minutes=(1 - share) * minutes)
    return replace(order, init=str(frozen), course=rest)


class JointTraining(Training):
    """A training whose head has a target that learns with it. `init`: what the user asked to start from."""

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

    def _marking(self, drafter: Trained, texts: Texts, examiner: Examiner) -> Callable[[Tensors], Mark]:
        def mark(weights: Tensors) -> Mark:
            own = self._llm.model
            tuned = Decoder(self._merged(weights), own.dtype, own.device)
            away = drift(own, tuned, texts, most=self._course.prompts).kl
            if not away <= self._joint.farthest:
                self._watch.tell(f"{away:.4f} nats away from the original: too far to be taken")
                return Mark(0.0, [], 0, 0)
            self._watch.tell(f"{away:.4f} nats away from the original")
            with _speaking(self._llm, tuned):
                return mark_weights(_made_for(drafter, tuned), _part(weights, _HEAD), examiner)

        return mark

    def _concluded(self, drafter: Trained, record: Record, texts: Texts, examiner: Examiner) -> Trained:
        """Write the model, read it as its users will, measure it, and only then give it its name."""
        assert self._start is not None
        frozen, original, order = self._start, self._llm.model, self._order
        if record.best_step == 0:
            raise SlipstreamError(
                f"tuning {original.name} made nothing better in {record.step} steps that is not farther away than "
                f"{self._joint.farthest:g} nats, so no new model is written",
                hint="train longer or with a smaller --rate, with --restart; or use the head that learnt alone",
            )
        weights, head = drafter.weights, replace(drafter, weights=_part(drafter.weights, _HEAD))
        self._watch.tell("writing the new model and measuring how far it is from the original")
        before = mark_weights(frozen, frozen.weights, examiner)
        folder = self._place.with_name(f".{self._place.name}-{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            write_model(self._merged(weights), folder)
            length = self._llm.max_model_len
            llm = LLM(folder, speculate=None, dtype=order.dtype, device=order.device, max_model_len=length)
            _require_another(llm.model, original)
            head = _made_for(head, llm.model, self._place.name)
            _, examiner = self._examiners(texts, llm)
            now = mark_weights(head, head.weights, examiner)
            moved = Moved(
                drift(original, llm.model, texts),
                frozen.target,
                head.target,
                before.tokens_per_step,
                now.tokens_per_step,
            )
            facts = moved.facts(asdict(self._joint))
            head = replace(head, provenance={**head.provenance, "joint": facts})
            write_notice(folder, moved, order.method, head.provenance)
            _replace(self._place, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._watch.tell(summary(facts))
        return finish(self._out, head, record, examiner)


def _replace(place: Path, new: Path) -> None:
    """Put a directory where another one may lie; at no moment is there half of one."""
    old = place.with_name(f".{place.name}-old-{os.getpid()}")
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _speaking(llm: LLM, model: Model) -> Iterator[None]:
    """Let an LLM answer with other weights of the same shape for a while."""
    own, llm.model = llm.model, model
    try:
        yield
    finally:
        llm.model = own
        llm.use(None)


def _made_for(drafter: Trained, model: Model, name: str = "") -> Trained:
    """A checkpoint to be, for another target of the same shape."""
    target = replace(drafter.target, fingerprint=model.fingerprint, name=name or drafter.target.name)
    return replace(drafter, target=target)


def _part(weights: Tensors, prefix: str) -> Tensors:
    """The weights whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _require_another(model: Model, original: Model) -> None:
    """Two models with one fingerprint would be taken for each other."""
    if model.fingerprint == original.fingerprint:
        raise SlipstreamError(
            f"the updates of {original.name} are too small to tell the new model from it",
            hint="train longer or with a larger --rate, with --restart",
        )
