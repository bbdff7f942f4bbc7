"""The training loop: a batch, the target's outputs, the head's losses, a step; evaluations in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.drafters.heads.head import Head, Lesson, Rows
from slipstream.drafters.heads.head_checkpoint import write_tensors
from slipstream.drafters.heads.weight_codec import rounded
from slipstream.errors import NotEnoughMemory, SlipstreamError
from slipstream.train.config import TrainConfig, rate
from slipstream.train.evaluate import Score
from slipstream.train.lessons import Page, Texts
from slipstream.train.optimiser import Optimiser
from slipstream.train.remembered import Remembered
from slipstream.train.state import Record, State, Tensors
from slipstream.train.teacher import Teacher, own_words

_CLIP = 1.0  # maximum of the gradient norm
_HELD_OUT_BATCH = 8  # texts per held-out lesson
_SMOOTHED = 10  # steps averaged in one entry of the record's losses
# Evaluations during and after the training, and the largest share of the minutes for either.
_EVALUATIONS, _EVALUATIONS_SHARE = 20, 0.2
_LAST_EVALUATIONS, _LAST_SHARE = 8, 0.3
# The last part of a training uses weights quantized as in the smallest file, to compensate for the rounding.
_ROUNDED_FROM = 0.8
_SOONER = 0.5  # of the first evaluation's time: a trained drafter needs fewer steps


@dataclass(frozen=True)
class ProgressSink:
    """Receives progress: `tell` gets lines that stay, `show` a line that replaces the last one."""

    tell: Callable[[str], None] = lambda line: None
    show: Callable[[str], None] = lambda line: None


class Trainer:
    """Trains one head. The results are in `head`, `best` and `record`."""

    def __init__(
        self,
        head: Head,
        teacher: Teacher,
        texts: Texts,
        config: TrainConfig,
        score: Callable[[Tensors], Score],
        folder: Path,
        sink: ProgressSink,
        remembered: Remembered | None = None,
        *,
        piece: bool = False,
    ) -> None:
        """`piece`: a later run continues this one, so the learning rate does not decay."""
        self.head = head
        self.record = Record()
        self.best: Tensors = {}
        self.device = str(head.frame.vocab.device)
        self._teacher = teacher
        self._texts = texts
        self._config = config
        self._score = score
        self._folder = folder
        self._sink = sink
        self._remembered = remembered
        self._piece = piece
        self._optimiser = Optimiser(head, config.rate, fused=self.device.startswith("cuda"))
        self._batches: tuple[int, list[Any]] = (-1, [])
        self._reading: _Reading | None = None
        self._recent: list[list[float]] = []
        self._came_with = 0.0  # seconds of earlier runs
        self._began = time.perf_counter()

    # -- resuming
    # -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The current state."""
        return State(self.record, dict(self.head.state_dict()), self.best, self._optimiser.memory)

    def restore(self, state: State) -> None:
        """Resume from the state of an earlier run."""
        self.record, self.best = state.record, state.best
        self.head.load_state_dict(state.weights)
        self._optimiser.restore(state.memory)
        self._came_with = state.record.seconds

    def begin_piece(self) -> None:
        """Count steps, minutes and patience from here."""
        self.record.begun_step, self.record.begun_seconds = self.record.step, self.record.seconds

    def facts(self) -> dict[str, Any]:
        """The head's facts (`Head.facts`) with its best weights, from held-out texts."""
        self.head.load_state_dict(self.best)
        with torch.no_grad(), self._types():
            return self.head.facts(self._held_out())

    def _held_out(self) -> Iterator[Lesson]:
        """Lessons of the held-out texts."""
        for start in range(0, len(self._texts.held_out), _HELD_OUT_BATCH):
            yield self._lesson(self._texts.page(self._texts.held_out[start : start + _HELD_OUT_BATCH]))

    def _types(self) -> torch.autocast:
        """GEMMs run in bfloat16 if the target's dtype, which its hidden states have, is 16 bits wide."""
        narrow = self.head.frame.rows.dtype != torch.float32
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=narrow)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, save: Callable[[], None], *, begun: bool = False) -> None:
        """Train to the end; `save` is called where a later run may resume.

        `begun`: the head has been trained before and is evaluated first. A new head is not: it would accept nothing,
        and an evaluation with one token per step is the slowest.
        """
        config, record = self._config, self.record
        self._began = time.perf_counter()
        if begun and not record.marks:
            self._examine()
        self._first, self._before, self._started = record.step, record.tokens, time.perf_counter()
        while not self._over():
            self._step()
            if self._evaluation_is_due():
                self._examine()
            if record.step % config.save == 0:
                self._note_losses()
                save()
        self._note_losses()
        if not record.marks or record.marks[-1]["step"] != record.step:
            self._examine()

    def _over(self) -> bool:
        """Whether the last step is done, the time is up, or the score stopped improving."""
        record, patience = self.record, self._config.patience
        record.seconds = self._came_with + time.perf_counter() - self._began
        since = sum(score["step"] > max(record.best_step, record.begun_step) for score in record.marks)
        return self.progress() >= 1.0 or 0 < patience <= since

    def progress(self) -> float:
        """The share of the training, or of its present piece, that is done, 0 to 1: of its steps, or of its time."""
        record, config = self.record, self._config
        if config.steps:
            return (record.step - record.begun_step) / config.steps
        return (record.seconds - record.begun_seconds) / self._time()

    def _time(self) -> float:
        """Seconds for training: the minutes without the final evaluations."""
        whole = 60 * self._config.minutes
        if self._piece:
            return whole
        return whole - min(_LAST_EVALUATIONS * self._one_evaluation(), _LAST_SHARE * whole)

    def _one_evaluation(self) -> float:
        """Seconds of one evaluation: the first one loads kernels, and a low acceptance takes longer."""
        took = [float(score["took"]) for score in self.record.marks]
        return min([_SOONER * took[0], *took[1:]]) if took else 0.0

    def _evaluation_is_due(self) -> bool:
        record, config = self.record, self._config
        if config.evaluate or config.steps:
            return record.step % (config.evaluate or max(1, config.steps // _EVALUATIONS)) == 0
        last = float(record.marks[-1]["seconds"]) if record.marks else 0.0
        return record.seconds - last >= max(
            60 * config.minutes / _EVALUATIONS, self._one_evaluation() / _EVALUATIONS_SHARE
        )

    def _step(self) -> None:
        record, config = self.record, self._config
        page = self._next_page()
        torch.manual_seed((config.seed << 32) + record.step)  # a head's random draws are reproducible
        try:
            numbers = self._learn(page, rate(config, record.step, 0.0 if self._piece else self.progress()))
        except torch.OutOfMemoryError:
            what = f"a batch of {page.tokens.numel()} tokens does not fit into the memory of {self.device}"
            raise NotEnoughMemory(what, hint=f"--tokens {max(1, config.tokens // 2)}") from None
        record.step += 1
        record.tokens += int((page.lengths - page.prompt_lens).sum())
        self._settle()
        self._reading = _Reading(record.step, page, numbers)

    def _learn(self, page: Page, pace: float) -> torch.Tensor:
        """One step on a batch; its loss and the accuracies by depth, [1 + depths]."""
        head, lesson = self.head, self._lesson(page)
        last = not self._piece and self.progress() >= _ROUNDED_FROM
        with as_stored(head.stored_matrices()) if last else nullcontext():
            with self._types():
                losses = head.losses(lesson)
            losses.total.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIP)
        self._optimiser.step(pace)
        return torch.cat([losses.total.detach().float().view(1), losses.accuracy.detach().float()])

    def _lesson(self, page: Page) -> Lesson:
        head, here = self.head, page.to(self.device)
        learn = own_words(page.tokens, page.prompt_lens, page.lengths)
        rows = Rows.of(learn.flatten().nonzero()[:, 0]).to(self.device)  # found on the host, without synchronisation

        def ask() -> Lesson:
            return self._teacher.lesson(here.tokens, here.prompt_lens, head.frame.vocab, head.taps, here.lengths, rows)

        return ask() if self._remembered is None else self._remembered.lesson(here, rows, ask)

    def _next_page(self) -> Page:
        """The next batch; after an epoch the next one starts."""
        record, config = self.record, self._config
        if self._batches[0] != record.epoch:
            self._batches = record.epoch, self._texts.batches(config.seed, record.epoch, config.tokens)
        page = self._texts.page(self._batches[1][record.place])
        record.place += 1
        if record.place == len(self._batches[1]):
            record.epoch, record.place = record.epoch + 1, 0
        return page

    # -- results
    # --------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read the numbers of the last step, one step late, so that a GPU never waits for the host."""
        reading, self._reading = self._reading, None
        if reading is not None:
            numbers = reading.numbers()
            if not math.isfinite(numbers[0]):
                self._give_up(reading, numbers[0])
            self._recent.append(numbers)
            self._show(reading.step, numbers)
            if len(self._recent) == _SMOOTHED:
                self._note_losses()

    def _note_losses(self) -> None:
        """Add the numbers read since the last time to the record."""
        self._settle()
        if self._recent:
            loss, *accuracy = (sum(column) / len(self._recent) for column in zip(*self._recent, strict=True))
            self.record.losses.append({"step": self.record.step, "loss": loss, "accuracy": accuracy})
            self._recent.clear()

    def _give_up(self, reading: _Reading, loss: float) -> None:
        page, file = reading.page, self._folder / f"bad-batch-{reading.step}.safetensors"
        write_tensors(file, {"tokens": page.tokens, "prompt_lens": page.prompt_lens, "lengths": page.lengths})
        raise SlipstreamError(
            f"the loss was {loss} at step {reading.step}; the batch is in {file}",
            hint="try a smaller --rate with --restart",
        )

    def _weights(self) -> Tensors:
        """A copy of the current weights."""
        return {name: weight.detach().cpu().clone() for name, weight in self.head.state_dict().items()}

    def _examine(self) -> None:
        """Evaluate the current weights; keep them if they are the best so far."""
        self._settle()
        record, began = self.record, time.perf_counter()
        weights = self._weights()
        score = self._score(weights)
        took = time.perf_counter() - began
        record.seconds = self._came_with + time.perf_counter() - self._began
        record.marks.append({"step": record.step, "seconds": record.seconds, "took": took, **asdict(score)})
        better = score.tokens_per_step >= record.best
        if better:
            record.best, record.best_step, self.best = score.tokens_per_step, record.step, weights
        depths = " ".join(f"{share:.2f}" for share in score.by_depth)
        self._sink.tell(
            f"step {record.step:,}: {score.tokens_per_step:.3f} tokens per step{' *' if better else ''}, "
            f"accepted by depth {depths or 'nothing'}, {record.seconds / 60:.1f} min"
        )

    def _show(self, step: int, numbers: list[float]) -> None:
        record, config, seconds = self.record, self._config, time.perf_counter() - self._started
        each = seconds / max(1, record.step - self._first)
        done = self.progress()
        left = each * config.steps * (1 - done) if config.steps else self._time() * (1 - done)
        parts = (
            f"step {step:,}" + (f" of {config.steps:,}" if config.steps else ""),
            f"loss {numbers[0]:.3f}",
            "right " + " ".join(f"{share:.2f}" for share in numbers[1:]),
            f"{record.best:.2f} tokens per step" if record.marks else "not evaluated yet",
            f"{(record.tokens - self._before) / max(seconds, 1e-9):,.0f} tokens/s",
            f"{max(0.0, left) / 60:.1f} min left",
        )
        self._sink.show(", ".join(parts))


@contextmanager
def as_stored(matrices: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute with matrices as stored in a file. Gradients apply to the exact ones, which are restored afterwards."""
    exact = [matrix.data for matrix in matrices]
    wide: dict[int, list[nn.Parameter]] = {}
    for matrix in matrices:
        wide.setdefault(matrix.shape[1], []).append(matrix)
    try:
        for alike in wide.values():  # rows are rounded independently: those of one width together
            for matrix, part in zip(alike, rounded([matrix.data for matrix in alike]), strict=True):
                matrix.data = part
        yield
    finally:
        for matrix, data in zip(matrices, exact, strict=True):
            matrix.data = data


class _Reading:
    """The numbers of a step on their way to the host, and its batch."""

    def __init__(self, step: int, page: Page, numbers: torch.Tensor) -> None:
        self.step = step
        self.page = page
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrived = None
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def numbers(self) -> list[float]:
        """Loss, and accuracy by depth."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
