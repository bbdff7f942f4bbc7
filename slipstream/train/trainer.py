"""The loop: a batch, the target's reading of it, the head's losses, a step; now and then an examination."""

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

from slipstream.drafters.head import Head, Lesson, Rows
from slipstream.drafters.stored import rounded
from slipstream.drafters.trained import write_tensors
from slipstream.errors import NotEnoughMemory, SlipstreamError
from slipstream.train.course import Course, rate
from slipstream.train.evaluate import Mark
from slipstream.train.lessons import Page, Texts
from slipstream.train.optimiser import Optimiser
from slipstream.train.remembered import Remembered
from slipstream.train.state import Record, State, Tensors
from slipstream.train.teacher import Teacher, own_words

_CLIP = 1.0  # of the gradients' length
_HELD_OUT_BATCH = 8  # texts of a lesson that is not trained on
_SMOOTHED = 10  # steps that one entry of the record's losses stands for
# Examinations while it trains and when it is over, and the most of the minutes that either may take.
_MARKS, _MARKS_SHARE = 20, 0.2
_LAST_MARKS, _LAST_SHARE = 8, 0.3
# The last part of a training is spent on weights as the smallest file has them: what it rounds off is made up for.
_ROUNDED_FROM = 0.8
_SOONER = 0.5  # of the first examination's time: a drafter that has learnt something needs fewer steps


@dataclass(frozen=True)
class Watch:
    """Who is told how it goes: `tell` gets lines that stay, `show` one that the next replaces."""

    tell: Callable[[str], None] = lambda line: None
    show: Callable[[str], None] = lambda line: None


class Trainer:
    """Trains one head. What it has come to is in `head`, `best` and `record`."""

    def __init__(
        self,
        head: Head,
        teacher: Teacher,
        texts: Texts,
        course: Course,
        mark: Callable[[Tensors], Mark],
        folder: Path,
        watch: Watch,
        remembered: Remembered | None = None,
    ) -> None:
        self.head = head
        self.record = Record()
        self.best: Tensors = {}
        self.device = str(head.frame.vocab.device)
        self._teacher = teacher
        self._texts = texts
        self._course = course
        self._mark = mark
        self._folder = folder
        self._watch = watch
        self._remembered = remembered
        self._optimiser = Optimiser(head, course.rate, fused=self.device.startswith("cuda"))
        self._batches: tuple[int, list[Any]] = (-1, [])
        self._reading: _Reading | None = None
        self._recent: list[list[float]] = []
        self._came_with = 0.0  # seconds that former runs took
        self._began = time.perf_counter()

    # -- going on -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where it stands."""
        return State(self.record, dict(self.head.state_dict()), self.best, self._optimiser.memory)

    def restore(self, state: State) -> None:
        """Stand where a former run stood."""
        self.record, self.best = state.record, state.best
        self.head.load_state_dict(state.weights)
        self._optimiser.restore(state.memory)
        self._came_with = state.record.seconds

    def facts(self) -> dict[str, Any]:
        """What the head has to say about itself, in the best state that it was in, from texts that were held out."""
        self.head.load_state_dict(self.best)
        with torch.no_grad(), self._types():
            return self.head.facts(self._held_out())

    def _held_out(self) -> Iterator[Lesson]:
        """Lessons of the texts that are not trained on."""
        for start in range(0, len(self._texts.held_out), _HELD_OUT_BATCH):
            yield self._lesson(self._texts.page(self._texts.held_out[start : start + _HELD_OUT_BATCH]))

    def _types(self) -> torch.autocast:
        """Products are made in bfloat16 where the target's type, which its hidden states have, is narrow."""
        narrow = self.head.frame.rows.dtype != torch.float32
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=narrow)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, save: Callable[[], None], *, begun: bool = False) -> None:
        """Train to the end; `save` is called where a later run may go on.

        `begun`: the head has been trained before, and what it could do then counts. Of a new one nothing is expected,
        and nothing takes longer to find out: every step of its examination gives one token.
        """
        course, record = self._course, self.record
        self._began = time.perf_counter()
        if begun and not record.marks:
            self._examine()
        self._first, self._before, self._started = record.step, record.tokens, time.perf_counter()
        while not self._over():
            self._step()
            if self._mark_is_due():
                self._examine()
            if record.step % course.save == 0:
                self._note_losses()
                save()
        self._note_losses()
        if not record.marks or record.marks[-1]["step"] != record.step:
            self._examine()

    def _over(self) -> bool:
        """Whether the last step is done, the time is over, or nothing gets better any more."""
        record, patience = self.record, self._course.patience
        record.seconds = self._came_with + time.perf_counter() - self._began
        since = sum(mark["step"] > record.best_step for mark in record.marks)
        return self._progress() >= 1.0 or 0 < patience <= since

    def _progress(self) -> float:
        """How much of the training is done, 0 to 1: of its steps, or of its time."""
        record, course = self.record, self._course
        return record.step / course.steps if course.steps else record.seconds / self._time()

    def _time(self) -> float:
        """Seconds for training: what the examinations at the very end leave of the minutes."""
        whole = 60 * self._course.minutes
        return whole - min(_LAST_MARKS * self._one_mark(), _LAST_SHARE * whole)

    def _one_mark(self) -> float:
        """Seconds that an examination takes: the first one loads kernels, and the less is accepted the longer it is."""
        took = [float(mark["took"]) for mark in self.record.marks]
        return min([_SOONER * took[0], *took[1:]]) if took else 0.0

    def _mark_is_due(self) -> bool:
        record, course = self.record, self._course
        if course.evaluate or course.steps:
            return record.step % (course.evaluate or max(1, course.steps // _MARKS)) == 0
        last = float(record.marks[-1]["seconds"]) if record.marks else 0.0
        return record.seconds - last >= max(60 * course.minutes / _MARKS, self._one_mark() / _MARKS_SHARE)

    def _step(self) -> None:
        record, course = self.record, self._course
        page = self._next_page()
        torch.manual_seed((course.seed << 32) + record.step)  # whatever a head draws is the same when it is done again
        try:
            numbers = self._learn(page, rate(course, record.step, self._progress()))
        except torch.OutOfMemoryError:
            what = f"a batch of {page.tokens.numel()} tokens does not fit into the memory of {self.device}"
            raise NotEnoughMemory(what, hint=f"--tokens {max(1, course.tokens // 2)}") from None
        record.step += 1
        record.tokens += int((page.lengths - page.prompt_lens).sum())
        self._settle()
        self._reading = _Reading(record.step, page, numbers)

    def _learn(self, page: Page, pace: float) -> torch.Tensor:
        """One step on a batch; its loss and the accuracies by depth, [1 + depths]."""
        head, lesson = self.head, self._lesson(page)
        last = self._progress() >= _ROUNDED_FROM
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
        rows = Rows.of(learn.flatten().nonzero()[:, 0]).to(self.device)  # found on the host, which waits for nobody

        def ask() -> Lesson:
            return self._teacher.lesson(here.tokens, here.prompt_lens, head.frame.vocab, head.taps, here.lengths, rows)

        return ask() if self._remembered is None else self._remembered.lesson(here, rows, ask)

    def _next_page(self) -> Page:
        """The next batch; where an epoch ends, another begins."""
        record, course = self.record, self._course
        if self._batches[0] != record.epoch:
            self._batches = record.epoch, self._texts.batches(course.seed, record.epoch, course.tokens)
        page = self._texts.page(self._batches[1][record.place])
        record.place += 1
        if record.place == len(self._batches[1]):
            record.epoch, record.place = record.epoch + 1, 0
        return page

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read the numbers of the last step: a step late, so that a GPU never waits for the host."""
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
        """Put what was read since the last time into the record."""
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
        """A copy of the weights of now."""
        return {name: weight.detach().cpu().clone() for name, weight in self.head.state_dict().items()}

    def _examine(self) -> None:
        """Decode with the weights of now; keep them if they are the best so far."""
        self._settle()
        record, began = self.record, time.perf_counter()
        weights = self._weights()
        mark = self._mark(weights)
        took = time.perf_counter() - began
        record.seconds = self._came_with + time.perf_counter() - self._began
        record.marks.append({"step": record.step, "seconds": record.seconds, "took": took, **asdict(mark)})
        better = mark.tokens_per_step >= record.best
        if better:
            record.best, record.best_step, self.best = mark.tokens_per_step, record.step, weights
        depths = " ".join(f"{share:.2f}" for share in mark.by_depth)
        self._watch.tell(
            f"step {record.step:,}: {mark.tokens_per_step:.3f} tokens per step{' *' if better else ''}, "
            f"accepted by depth {depths or 'nothing'}, {record.seconds / 60:.1f} min"
        )

    def _show(self, step: int, numbers: list[float]) -> None:
        record, course, seconds = self.record, self._course, time.perf_counter() - self._started
        each = seconds / max(1, record.step - self._first)
        left = each * (course.steps - record.step) if course.steps else self._time() - record.seconds
        parts = (
            f"step {step:,}" + (f" of {course.steps:,}" if course.steps else ""),
            f"loss {numbers[0]:.3f}",
            "right " + " ".join(f"{share:.2f}" for share in numbers[1:]),
            f"{record.best:.2f} tokens per step" if record.marks else "not examined yet",
            f"{(record.tokens - self._before) / max(seconds, 1e-9):,.0f} tokens/s",
            f"{max(0.0, left) / 60:.1f} min left",
        )
        self._watch.show(", ".join(parts))


@contextmanager
def as_stored(matrices: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute with matrices as a file has them. What is learnt meanwhile is for the exact ones, which come back."""
    exact = [matrix.data for matrix in matrices]
    wide: dict[int, list[nn.Parameter]] = {}
    for matrix in matrices:
        wide.setdefault(matrix.shape[1], []).append(matrix)
    try:
        for alike in wide.values():  # rows are rounded one by one: those of one width in one go
            for matrix, part in zip(alike, rounded([matrix.data for matrix in alike]), strict=True):
                matrix.data = part
        yield
    finally:
        for matrix, data in zip(matrices, exact, strict=True):
            matrix.data = data


class _Reading:
    """The numbers of a step on their way to the host, and the batch that they are of."""

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
