"""One training from beginning to end: what is asked for is checked, the target teaches, and a checkpoint is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.drafters import trained
from slipstream.drafters.head import Head, HeadSettings
from slipstream.drafters.learned import LearnedDrafter, frame_of, make_head, settings_of
from slipstream.drafters.registry import drafter_class, drafter_names, make_options
from slipstream.drafters.trained import Made, Trained
from slipstream.errors import OptionError, unknown_choice
from slipstream.folders import expanded
from slipstream.llm import LLM
from slipstream.models.adapter_checkpoint import AdapterCheckpoint
from slipstream.models.builtin import DEFAULT_MODEL
from slipstream.models.load import choose_device, choose_dtype
from slipstream.models.loader import open_model
from slipstream.train import report, state
from slipstream.train.course import Course
from slipstream.train.data import ChatData
from slipstream.train.evaluate import Examiner, Mark
from slipstream.train.finish import finish, mark_weights, provenance
from slipstream.train.lessons import Texts
from slipstream.train.remembered import remembered
from slipstream.train.state import Record, Tensors
from slipstream.train.teacher import Teacher
from slipstream.train.trainer import Trainer, Watch

BAD_BATCH = "bad-batch-"

_MULTIPLE = {"cpu": 1, "cuda": 64}  # lengths of batches, by kind of device


@dataclass(frozen=True)
class Order:
    """What to train, on what, where to. `data`: one data set or several. `init`: a checkpoint to start from, or a
    method, for the one that is found for it. `settings`: the method's, as texts or values. `restart`: forget what an
    interrupted training left in `out`.
    """

    method: str
    data: tuple[Path, ...]
    out: Path | None = None  # None: where `slipstream run --speculate METHOD` looks for it
    model: str = DEFAULT_MODEL
    init: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    course: Course = field(default_factory=Course)
    restart: bool = False
    device: str = "auto"
    dtype: str = "auto"


def learned_methods() -> list[str]:
    """The methods that can be trained."""
    return [name for name in drafter_names() if issubclass(drafter_class(name), LearnedDrafter)]


def learned_class(method: str) -> type[LearnedDrafter[Any]]:
    """The drafter of a method that can be trained; all others are refused."""
    if method not in drafter_names():
        raise unknown_choice("drafter", method, learned_methods())
    kind = drafter_class(method)
    if not issubclass(kind, LearnedDrafter):
        raise OptionError(f"{method} does not learn", hint=f"valid: {', '.join(learned_methods())}")
    return kind


def require_method(method: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings, converted; a method that does not learn, and settings that it does not have, are refused."""
    shaped = make_options(method, learned_class(method).settings_type, settings)
    return {name: getattr(shaped, name) for name in settings}


def train(order: Order, watch: Watch, plan: Callable[..., Training] | None = None) -> tuple[Path, Trained]:
    """Carry out an order, or go on with it; the checkpoint's place and what is in it.

    `plan`: makes a training of another kind than the usual from what the usual one is made of.
    """
    kind = learned_class(order.method)
    settings = make_options(order.method, kind.settings_type, order.settings)
    given = None if order.out is None else expanded(order.out).resolve()
    if given is not None:
        _require_ours(given)
    data = ChatData(*order.data)
    llm = _open(order)
    _require_written_by(llm, data, order.data[0])
    out = given or trained.directory(order.method, llm.model.fingerprint)
    _require_ours(out)
    try:
        _require_writable(out)
        return out, (plan or Training)(order, kind, settings, data, llm, out, watch).run()
    except OSError as error:
        raise OptionError(f"cannot write {str(out)!r}: {error.strerror or error}") from error


def require_possible(order: Order) -> None:
    """Refuse what can be refused before the data is there: writing it may take hours."""
    _require_wide(order)
    if isinstance(open_model(order.model), AdapterCheckpoint):
        raise OptionError(
            f"{order.model} runs through transformers, which gives no hidden states to learn from",
            hint="train for a model of a family that runs natively: docs/models.md",
        )
    if order.init and (start := trained.named(order.init, learned_methods())) is not None:
        trained.load(start)
    if order.out is not None:
        out = expanded(order.out).resolve()
        _require_ours(out)
        try:
            _require_writable(out)
        except OSError as error:
            raise OptionError(f"cannot write {str(out)!r}: {error.strerror or error}") from error


def _open(order: Order) -> LLM:
    """The target, with room for the texts and no more."""
    _require_wide(order)
    # Every batch has another shape; without this, memory is asked of the driver again and again.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    context = open_model(order.model).config.context
    length = min(context, order.course.longest + order.course.answer)
    return LLM(
        order.model,
        speculate=None,
        dtype=order.dtype,
        device=order.device,
        quantize="none",  # what is learnt is what the weights say
        max_model_len=length,
    )


def _require_wide(order: Order) -> None:
    """Refuse 16 bits on a CPU: they gain nothing there, and there are CPUs on which their gradients crash."""
    if choose_device(order.device) == "cpu" and choose_dtype(order.dtype, "cpu") != torch.float32:
        raise OptionError(f"dtype={order.dtype!r}: on a CPU drafters are trained in float32", hint="leave --dtype away")


def _require_ours(out: Path) -> None:
    """Refuse a place where something else lies: the finished checkpoint takes the place of all that is in it."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"{str(out)!r} is a file", hint="name a directory")
    known = {trained.DESCRIPTION, trained.WEIGHTS, report.NUMBERS, report.PAGE}
    for entry in sorted(out.iterdir()) if out.is_dir() else []:
        if not (entry.name in known or state.is_ours(entry.name) or entry.name.startswith(BAD_BATCH)):
            raise OptionError(
                f"{str(out)!r} has {entry.name!r}, which no training put there", hint="name another place"
            )


def _require_writable(out: Path) -> None:
    """Find out now: states are written into the directory, and the checkpoint beside it before it takes its place."""
    out.mkdir(parents=True, exist_ok=True)
    for probe in (out / ".state-probe", out.with_name(f".{out.name}-probe")):
        probe.touch()
        probe.unlink()


def _require_written_by(llm: LLM, data: ChatData, place: Path) -> None:
    if data.fingerprint != llm.model.fingerprint or data.vocab_size != llm.model.config.vocab_size:
        raise OptionError(
            f"{str(place)!r} was written by {data.description.get('model') or 'another model'} "
            f"({data.fingerprint}), not by {llm.model.name} ({llm.model.fingerprint})",
            hint="a drafter learns from what its own target wrote: slipstream synth -m MODEL",
        )


def _larger(wanted: int, former: int) -> bool:
    """Of sizes; 0 is all there are."""
    return former > 0 and (wanted == 0 or wanted > former)


class Training:
    """The parts of one training, put together."""

    def __init__(
        self,
        order: Order,
        kind: type[LearnedDrafter[Any]],
        settings: HeadSettings,
        data: ChatData,
        llm: LLM,
        out: Path,
        watch: Watch,
    ) -> None:
        self._order = order
        self._kind = kind
        self._llm = llm
        self._data = data
        self._out = out
        self._watch = watch
        self._teacher = Teacher(llm.model)
        self._course = order.course.on(llm.model.device)
        self._start = self._starting_point(settings)
        given = settings_of(settings)
        self._settings = (
            given if self._start is None else {**self._start.settings, **{n: given[n] for n in order.settings}}
        )
        counts = data.description["counts"]
        self._arguments: dict[str, Any] = {
            "method": order.method,
            "target": llm.model.fingerprint,
            "data": f"{counts['kept']} chats, {counts['tokens']} tokens, {data.description['created']}",
            "init": order.init,
            **{f"set {name}": value for name, value in self._settings.items()},
            **asdict(self._course),
        }

    def run(self) -> Trained:
        """Train, or say what was trained."""
        if self._order.restart:
            state.clear(self._out)
        former = state.load(self._out, self._arguments)
        if former is None and not self._order.restart and (self._out / trained.DESCRIPTION).exists():
            return self._already_there()
        texts = Texts(self._data, self._course.longest, _MULTIPLE[self._llm.model.device.partition(":")[0]])
        head = self._head(texts)
        drafter = self._drafter(head)
        during, after = self._examiners(texts, self._llm)
        mark = self._marking(drafter, texts, during)
        memory = remembered(head, texts)
        trainer = Trainer(head, self._teacher, texts, self._course, mark, self._out, self._watch, memory)
        self._introduce(head, texts)
        if former is not None:
            trainer.restore(former)
            self._watch.tell(f"going on at step {trainer.record.step:,}")
        begun = self._start is not None
        trainer.run(lambda: state.save(self._out, trainer.state, self._arguments), begun=begun)
        self._watch.tell(f"the best weights are those of step {trainer.record.best_step:,}; examining them")
        state.save(self._out, trainer.state, self._arguments)
        facts = trainer.facts()
        drafter = replace(drafter, weights=trainer.best, provenance=self._provenance(trainer.record), figures=facts)
        return self._concluded(drafter, trainer.record, texts, after)

    def _marking(self, drafter: Trained, texts: Texts, examiner: Examiner) -> Callable[[Tensors], Mark]:
        """How the trainer's weights are examined while it trains."""
        return lambda weights: mark_weights(drafter, weights, examiner)

    def _concluded(self, drafter: Trained, record: Record, texts: Texts, examiner: Examiner) -> Trained:
        """Write what was made of the best weights."""
        return finish(self._out, drafter, record, examiner)

    def _already_there(self) -> Trained:
        found = trained.load(self._out)
        state.require_same(self._out, found.provenance.get("arguments", {}), self._arguments)
        self._watch.tell(f"{self._out} has been trained already; --restart trains it anew")
        return found

    def _starting_point(self, settings: HeadSettings) -> Trained | None:
        """The checkpoint to start from. Its settings hold, but for those in which such a head can grow."""
        order = self._order
        if not order.init:
            return None
        fingerprint = self._llm.model.fingerprint
        place = trained.named(order.init, learned_methods()) or trained.own(order.init, fingerprint)
        start = trained.load(place)
        start.require(order.method, fingerprint, place)
        growing = self._kind.head_type.growing
        whole = {
            **settings_of(self._kind.settings_type()),
            **start.settings,
        }  # a setting may be newer than a checkpoint
        for name in order.settings:
            former, wanted = whole[name], getattr(settings, name)
            if former != wanted and not (name in growing and _larger(wanted, former)):
                more = f"; {' and '.join(growing)} can become larger"
                raise OptionError(
                    f"{place} has {name}={former!r}, which cannot become {wanted!r}",
                    hint=f"leave --set away, or train without --init{more}",
                )
        return start

    def _head(self, texts: Texts) -> Head:
        llm = self._llm
        size, start = int(self._settings["vocabulary"]), self._start
        if start is None or size != start.settings["vocabulary"]:
            known = [] if start is None else start.vocab.tolist()
            vocab = texts.vocabulary(size, [*llm.end_ids, *known])
        else:
            vocab = start.vocab
        torch.manual_seed(self._course.seed)
        frame = frame_of(llm.engine.drafter.target, vocab.to(llm.model.device))
        head = make_head(self._kind, self._settings, frame)
        head.begin()
        if start is not None:
            head.go_on(start.weights, start.vocab)
        return head.to(llm.model.device).float().train()

    def _drafter(self, head: Head) -> Trained:
        """The checkpoint to be, without what is still to be learnt."""
        config, model = self._llm.model.config, self._llm.model
        made = Made(model.fingerprint, Path(model.name).name, config.vocab_size, config.hidden_size, config.layers)
        return Trained(self._order.method, self._settings, made, head.frame.vocab.cpu(), {})

    def _examiners(self, texts: Texts, llm: LLM) -> tuple[Examiner, Examiner]:
        """For the examinations during the training, and for those after it: other prompts, if there are enough."""
        count, held_out = self._course.prompts, [texts.prompt(index) for index in texts.held_out]
        during, after = held_out[:count], held_out[count : 2 * count]
        method, answer = self._order.method, self._course.answer
        return (
            Examiner(llm, method, during, answer),
            Examiner(llm, method, after if len(after) == count else during, answer),
        )

    def _introduce(self, head: Head, texts: Texts) -> None:
        size = sum(weight.numel() for weight in head.parameters())
        self._watch.tell(
            f"{self._order.method} for {self._llm.model.name} on {self._llm.model.device}: {size / 1e6:.1f} M weights, "
            f"{len(head.frame.vocab):,} draft tokens, {len(texts.training):,} texts, {len(texts.held_out)} held out"
        )
        if texts.left_out:
            self._watch.tell(f"{texts.left_out:,} texts are left out: their prompts reach --longest")

    def _provenance(self, record: Record) -> dict[str, Any]:
        device = self._llm.model.device
        made = provenance(self._arguments, self._data.description, device)
        peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None
        training = {
            "steps": record.step,
            "best_step": record.best_step,
            "epochs": record.epoch,
            "tokens": record.tokens,
        }
        return {**made, "training": {**training, "minutes": round(record.seconds / 60, 2), "peak_memory_bytes": peak}}
