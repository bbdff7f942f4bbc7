"""One training from start to end: the job is checked, the head is trained, and a checkpoint is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Head, HeadSettings
from slipstream.drafters.heads.head_checkpoint import Made, Trained
from slipstream.drafters.heads.head_drafter import HeadDrafter, frame_of, make_head, settings_of
from slipstream.drafters.registry import drafter_class, drafter_names, make_options
from slipstream.errors import OptionError, unknown_choice
from slipstream.folders import expanded
from slipstream.llm import LLM
from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.resolve import open_model
from slipstream.models.load import choose_device, choose_dtype
from slipstream.train import report, state
from slipstream.train.config import TrainConfig
from slipstream.train.data import ChatData
from slipstream.train.evaluate import Examiner, Score
from slipstream.train.finish import finish, provenance, score_weights
from slipstream.train.lessons import Texts
from slipstream.train.pieces import bring_in, earlier_piece, reached, same, settings_in
from slipstream.train.remembered import remembered
from slipstream.train.state import Record, Tensors
from slipstream.train.teacher import Teacher
from slipstream.train.trainer import ProgressSink, Trainer

BAD_BATCH = "bad-batch-"

_MULTIPLE = {"cpu": 1, "cuda": 64}  # lengths of batches, by kind of device


@dataclass(frozen=True)
class TrainJob:
    """What to train, on what data, and where to. `data`: one or more data sets. `init`: a checkpoint to start from, or
    a method, for the one found for it. `settings`: the method's, as strings or values. `restart`: discard the state of
    an interrupted training in `out`. `piece`: leave a state in `out` that a later run continues. `resume`: be that
    later run; the data may have grown, and the length and the rate are those of this run.
    """

    method: str
    data: tuple[Path, ...]
    out: Path | None = None  # None: where `slipstream run --speculate METHOD` looks for it
    model: str = DEFAULT_MODEL
    init: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    config: TrainConfig = field(default_factory=TrainConfig)
    restart: bool = False
    device: str = "auto"
    dtype: str = "auto"
    resume: bool = False
    piece: bool = False

    def __post_init__(self) -> None:
        for name in ("restart", "init"):
            if self.resume and getattr(self, name):
                raise OptionError(f"give either --resume or --{name}, not both")


def learned_methods() -> list[str]:
    """The methods that can be trained."""
    return [name for name in drafter_names() if issubclass(drafter_class(name), HeadDrafter)]


def learned_class(method: str) -> type[HeadDrafter[Any]]:
    """The drafter of a trainable method; all others are refused."""
    if method not in drafter_names():
        raise unknown_choice("drafter", method, learned_methods())
    kind = drafter_class(method)
    if not issubclass(kind, HeadDrafter):
        raise OptionError(f"{method} cannot be trained", hint=f"valid: {', '.join(learned_methods())}")
    return kind


def require_method(method: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings, converted; methods that cannot be trained and unknown settings are refused."""
    shaped = make_options(method, learned_class(method).settings_type, settings)
    return {name: getattr(shaped, name) for name in settings}


def train(job: TrainJob, sink: ProgressSink, plan: Callable[..., Training] | None = None) -> tuple[Path, Trained]:
    """Run a job, or continue it; returns the checkpoint's place and its content.

    `plan`: makes a training of another kind from the same parts.
    """
    kind = learned_class(job.method)
    settings = make_options(job.method, kind.settings_type, job.settings)
    given = None if job.out is None else expanded(job.out).resolve()
    if given is not None:
        _require_ours(given)
    data = ChatData(*job.data)
    llm = _open(job)
    _require_written_by(llm, data, job.data[0])
    out = given or head_checkpoint.directory(job.method, llm.model.fingerprint)
    _require_ours(out)
    try:
        _require_writable(out)
        return out, (plan or Training)(job, kind, settings, data, llm, out, sink).run()
    except OSError as error:
        raise OptionError(f"cannot write {str(out)!r}: {error.strerror or error}") from error


def require_possible(job: TrainJob) -> None:
    """Refuse what can be refused before there is data: writing it may take hours."""
    _require_wide(job)
    if isinstance(open_model(job.model), AdapterCheckpoint):
        raise OptionError(
            f"{job.model} runs through transformers, which exposes no hidden states to learn from",
            hint="train for a model of a family that runs natively: docs/models.md",
        )
    if job.init and (start := head_checkpoint.named(job.init, learned_methods())) is not None:
        head_checkpoint.load(start)
    if job.out is not None:
        out = expanded(job.out).resolve()
        _require_ours(out)
        try:
            _require_writable(out)
        except OSError as error:
            raise OptionError(f"cannot write {str(out)!r}: {error.strerror or error}") from error


def _open(job: TrainJob) -> LLM:
    """The target, with room for the texts and no more."""
    _require_wide(job)
    # Every batch has another shape; without this the allocator would ask the driver for memory again and again.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    context = open_model(job.model).config.context
    length = min(context, job.config.longest + job.config.answer)
    return LLM(
        job.model,
        speculate=None,
        dtype=job.dtype,
        device=job.device,
        quantize="none",  # the head learns from the exact weights
        max_model_len=length,
    )


def _require_wide(job: TrainJob) -> None:
    """Refuse 16-bit types on a CPU: they gain nothing there, and on some CPUs their gradients crash."""
    if choose_device(job.device) == "cpu" and choose_dtype(job.dtype, "cpu") != torch.float32:
        raise OptionError(f"dtype={job.dtype!r}: on a CPU drafters are trained in float32", hint="leave out --dtype")


def _require_ours(out: Path) -> None:
    """Refuse a directory with other files in it: the finished checkpoint replaces its content."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"{str(out)!r} is a file", hint="name a directory")
    known = {head_checkpoint.DESCRIPTION, head_checkpoint.WEIGHTS, report.NUMBERS, report.PAGE}
    for entry in sorted(out.iterdir()) if out.is_dir() else []:
        if not (entry.name in known or state.is_ours(entry.name) or entry.name.startswith(BAD_BATCH)):
            raise OptionError(
                f"{str(out)!r} has {entry.name!r}, which is not from a training", hint="name another place"
            )


def _require_writable(out: Path) -> None:
    """Check now: states are written into the directory, and the checkpoint beside it before it is moved there."""
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
    """Compare sizes; 0 means all."""
    return former > 0 and (wanted == 0 or wanted > former)


class Training:
    """The parts of one training."""

    def __init__(
        self,
        job: TrainJob,
        kind: type[HeadDrafter[Any]],
        settings: HeadSettings,
        data: ChatData,
        llm: LLM,
        out: Path,
        sink: ProgressSink,
    ) -> None:
        self._job = job
        self._kind = kind
        self._llm = llm
        self._data = data
        self._out = out
        self._sink = sink
        self._teacher = Teacher(llm.model)
        self._config = job.config.on(llm.model.device)
        self._former = earlier_piece(out, job.method, llm.model.fingerprint, job.settings) if job.resume else None
        self._start = self._starting_point(settings)
        given = settings_of(settings)
        self._settings = (
            given if self._start is None else {**self._start.settings, **{n: given[n] for n in job.settings}}
        )
        if self._former is not None:
            self._settings = settings_in(self._former.arguments)
            data.begin_with(self._former.record.shards)
        counts = data.description["counts"]
        self._arguments: dict[str, Any] = {
            "method": job.method,
            "target": llm.model.fingerprint,
            "data": f"{counts['kept']} chats, {counts['tokens']} tokens, {data.description['created']}",
            "init": job.init if self._former is None else self._former.arguments["init"],
            **({"piece": True} if job.piece else {}),
            **{f"set {name}": value for name, value in self._settings.items()},
            **asdict(self._config),
        }

    def run(self) -> Trained:
        """Train, or return what was trained already."""
        if self._job.restart:
            state.clear(self._out)
        former = self._former or state.load(self._out, self._arguments)
        if former is None and not self._job.restart and (self._out / head_checkpoint.DESCRIPTION).exists():
            return self._already_there()
        kept = {} if self._former is None else self._former.fixed
        held_out = kept["held_out"].numpy() if kept else None
        texts = Texts(self._data, self._config.longest, _MULTIPLE[self._llm.model.device.partition(":")[0]], held_out)
        head = self._head(texts)
        fixed = kept or {"vocab": head.frame.vocab.cpu(), "held_out": torch.from_numpy(texts.held_out)}
        drafter = self._drafter(head)
        during, after = self._examiners(texts, self._llm)
        score = self._scoring(drafter, texts, during)
        memory = remembered(head, texts)
        trainer = Trainer(
            head, self._teacher, texts, self._config, score, self._out, self._sink, memory, piece=self._job.piece
        )

        def save() -> None:
            state.save(self._out, replace(trainer.state, fixed=fixed), self._arguments)

        self._introduce(head, texts)
        if former is not None:
            trainer.restore(former)
            self._sink.tell(f"continuing at step {trainer.record.step:,}")
            if self._former is not None and (trainer.progress() >= 1.0 or not same(former.arguments, self._arguments)):
                trainer.begin_piece()
        bring_in(trainer.record, self._data.shards)
        trainer.run(save, begun=self._start is not None)
        save()
        if self._job.piece:
            return replace(drafter, weights=trainer.best, figures=reached(trainer.record))
        self._sink.tell(f"the best weights are those of step {trainer.record.best_step:,}; evaluating them")
        facts = trainer.facts()
        drafter = replace(drafter, weights=trainer.best, provenance=self._provenance(trainer.record), figures=facts)
        return self._concluded(drafter, trainer.record, texts, after)

    def _scoring(self, drafter: Trained, texts: Texts, examiner: Examiner) -> Callable[[Tensors], Score]:
        """How the trainer's weights are scored during training."""
        return lambda weights: score_weights(drafter, weights, examiner)

    def _concluded(self, drafter: Trained, record: Record, texts: Texts, examiner: Examiner) -> Trained:
        """Write the best weights."""
        return finish(self._out, drafter, record, examiner)

    def _already_there(self) -> Trained:
        found = head_checkpoint.load(self._out)
        state.require_same(self._out, found.provenance.get("arguments", {}), self._arguments)
        self._sink.tell(f"{self._out} has been trained already; --restart trains it again")
        return found

    def _starting_point(self, settings: HeadSettings) -> Trained | None:
        """The checkpoint to start from. Its settings apply, except for those that may grow."""
        job = self._job
        if not job.init:
            return None
        fingerprint = self._llm.model.fingerprint
        place = head_checkpoint.named(job.init, learned_methods()) or head_checkpoint.own(job.init, fingerprint)
        start = head_checkpoint.load(place)
        start.require(job.method, fingerprint, place)
        growing = self._kind.head_type.growing
        whole = {
            **settings_of(self._kind.settings_type()),
            **start.settings,
        }  # a setting may be newer than a checkpoint
        for name in job.settings:
            former, wanted = whole[name], getattr(settings, name)
            if former != wanted and not (name in growing and _larger(wanted, former)):
                more = f"; {' and '.join(growing)} can become larger"
                raise OptionError(
                    f"{place} has {name}={former!r}, which cannot become {wanted!r}",
                    hint=f"leave out --set, or train without --init{more}",
                )
        return start

    def _head(self, texts: Texts) -> Head:
        llm = self._llm
        size, start = int(self._settings["vocabulary"]), self._start
        if self._former is not None:
            vocab = self._former.fixed["vocab"]
        elif start is None or size != start.settings["vocabulary"]:
            known = [] if start is None else start.vocab.tolist()
            vocab = texts.vocabulary(size, [*llm.end_ids, *known])
        else:
            vocab = start.vocab
        torch.manual_seed(self._config.seed)
        frame = frame_of(llm.target, vocab.to(llm.model.device))
        head = make_head(self._kind, self._settings, frame)
        head.begin()
        if start is not None:
            head.continue_from(start.weights, start.vocab)
        return head.to(llm.model.device).float().train()

    def _drafter(self, head: Head) -> Trained:
        """The checkpoint, without the trained weights."""
        config, model = self._llm.model.config, self._llm.model
        made = Made(model.fingerprint, Path(model.name).name, config.vocab_size, config.hidden_size, config.layers)
        return Trained(self._job.method, self._settings, made, head.frame.vocab.cpu(), {})

    def _examiners(self, texts: Texts, llm: LLM) -> tuple[Examiner, Examiner]:
        """For evaluations during and after the training: with different prompts, if there are enough."""
        count, held_out = self._config.prompts, [texts.prompt(index) for index in texts.held_out]
        during, after = held_out[:count], held_out[count : 2 * count]
        method, answer = self._job.method, self._config.answer
        return (
            Examiner(llm, method, during, answer),
            Examiner(llm, method, after if len(after) == count else during, answer),
        )

    def _introduce(self, head: Head, texts: Texts) -> None:
        size = sum(weight.numel() for weight in head.parameters())
        self._sink.tell(
            f"{self._job.method} for {self._llm.model.name} on {self._llm.model.device}: {size / 1e6:.1f} M weights, "
            f"{len(head.frame.vocab):,} draft tokens, {len(texts.training):,} texts, {len(texts.held_out)} held out"
        )
        if texts.left_out:
            self._sink.tell(f"{texts.left_out:,} texts are left out: their prompts reach --longest")

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
