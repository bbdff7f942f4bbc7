"""`slipstream batch`: answers a file of prompts in one batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from slipstream import checks
from slipstream.commands.batch.answer_file import AnswerFile
from slipstream.commands.batch.lines import LineDefaults, PromptLine, read_lines
from slipstream.commands.shared.answer_json import choice_as_dict, seeded
from slipstream.commands.shared.opening import open_llm
from slipstream.commands.shared.options import Described, EngineSetup, Sampling
from slipstream.commands.shared.progress import Counter
from slipstream.commands.shared.terminal import note
from slipstream.errors import OptionError, PromptError, SlipstreamError
from slipstream.folders import expanded

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.types import Output, SamplingParams

_AT_ONCE = {"cpu": 16, "cuda": 64}  # by device


def batch(
    prompts: Annotated[
        str, Described(".txt, one prompt per line, or .jsonl with prompt or messages", metavar="FILE", positional=True)
    ],
    output: Annotated[str, Described("file for the answers, as JSON lines", ("--output", "-o"), "FILE")],
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    raw: Annotated[bool, Described("send texts unchanged, without the chat template")] = False,
    system: Annotated[str | None, Described("system message for lines without one", metavar="TEXT")] = None,
    at_once: Annotated[
        int | None, Described("concurrent prompts (default: 16 on a CPU, 64 on a GPU)", metavar="N")
    ] = None,
) -> int:
    """Answer a file of prompts; the same command continues an interrupted run."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    if raw and system is not None:
        raise OptionError("--system needs the chat template and --raw leaves it out: give one of them")
    if at_once is not None:
        checks.integer("at_once", at_once, 1)
    asked, wrong = read_lines(expanded(prompts), LineDefaults(sampling.params(), system, raw))
    file = AnswerFile(expanded(output))
    there = file.answered({line.index: line.digest(setup.model) for line in asked})
    for complaint in wrong:
        note(complaint, "bad")
    left = [line for line in asked if line.index not in there]
    run = _Run(setup, file, len(wrong))
    if left:
        _tell_models(left, setup.model)
        run.answer(open_llm(setup), left, len(there), at_once)
        file.sort()
    before = f", {len(there)} were there already" if there else ""
    failed = f", {run.failed} could not be answered" if run.failed else ""
    note(f"{run.answered} answered{run.speed}{before}{failed}", "bold")
    return 1 if run.failed else 0


def _tell_models(lines: list[PromptLine], model: str) -> None:
    """Note that another model answers than an OpenAI batch names."""
    if others := sorted({line.model for line in lines if line.model is not None} - {model}):
        note(f"lines are for {', '.join(map(str, others))}: {model} answers them")


class _Run:
    """The answering, and its counts."""

    def __init__(self, setup: EngineSetup, file: AnswerFile, failed: int) -> None:
        self._setup, self._file = setup, file
        self.answered, self.failed = 0, failed
        self._tokens = 0
        self._began = time.monotonic()

    @property
    def speed(self) -> str:
        """Tokens per second over all answers."""
        seconds = time.monotonic() - self._began
        return f" in {seconds:.1f} s, {self._tokens / seconds:,.1f} tok/s" if self._tokens else ""

    def answer(self, llm: LLM, lines: list[PromptLine], before: int, at_once: int | None) -> None:
        """Answer all lines in one continuous batch, writing each answer as it completes."""
        if llm.tokenizer is None:
            raise OptionError(f"{llm.model.name} has no tokenizer, so it cannot read text")
        together = at_once or _AT_ONCE[llm.model.device.partition(":")[0]]
        waiting, self._began = deque(lines), time.monotonic()
        total = before + len(lines) + self.failed
        try:
            with self._file, Counter("prompts", total, before + self.failed) as counter:
                while waiting:
                    self._answer_some(llm, waiting, together, counter)
        except KeyboardInterrupt:
            done = before + self.answered
            note(f"stopped: {done} of {total} lines are answered{self.speed}; the same command continues", "bold")
            raise

    def _answer_some(self, llm: LLM, waiting: deque[PromptLine], at_once: int, counter: Counter) -> None:
        """Answer waiting lines, up to one that the engine refuses; unfinished lines wait again."""
        taken: list[PromptLine] = []
        finished: set[int] = set()
        try:
            requests = self._requests(llm, waiting, taken, counter)
            for place, output in llm.answers(requests, at_once, text=True):
                finished.add(place)
                self._keep(llm, taken[place], output)
                counter.advance(f"{self._tokens / (time.monotonic() - self._began):,.1f} tok/s")
        except OptionError as error:
            if not taken:
                raise
            self._refuse(taken.pop(), error, counter)
            waiting.extendleft(line for place, line in reversed(list(enumerate(taken))) if place not in finished)

    def _requests(
        self, llm: LLM, waiting: deque[PromptLine], taken: list[PromptLine], counter: Counter
    ) -> Iterator[tuple[list[int], SamplingParams]]:
        """Waiting lines as engine requests; invalid prompts are reported and skipped."""
        while waiting:
            line = waiting.popleft()
            try:
                ids = _encode(llm, line)
            except SlipstreamError as error:
                self._refuse(line, error, counter)
                continue
            taken.append(line)
            yield ids, seeded(line.params)

    def _refuse(self, line: PromptLine, error: SlipstreamError, counter: Counter) -> None:
        self.failed += 1
        note(f"line {line.index + 1}: {error}", "bad")
        counter.advance()

    def _keep(self, llm: LLM, line: PromptLine, output: Output) -> None:
        assert llm.tokenizer is not None
        choices = [choice_as_dict(completion, line.params) for completion in output.outputs]
        said = sum(len(choice.pop("token_ids")) for choice in choices)
        asked = len(output.prompt_token_ids)
        record: dict[str, Any] = {"index": line.index}
        if line.custom_id is not None:
            record["custom_id"] = line.custom_id
        record |= {"request": line.digest(self._setup.model), "model": self._setup.model}
        record |= {name: value for name, value in choices[0].items() if name != "index"}
        record["usage"] = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
        record["seed"] = output.outputs[0].seed
        if len(choices) > 1:
            record["choices"] = choices
        self._file.write(record)
        self.answered += 1
        self._tokens += said


def _encode(llm: LLM, line: PromptLine) -> list[int]:
    from slipstream.bench.tune.prompts import encode

    assert llm.tokenizer is not None
    ids = encode(llm.tokenizer, line.messages) if line.messages is not None else llm.tokenizer.encode(line.prompt or "")
    if len(ids) >= llm.max_model_len:  # checked here: a refusal by the engine would delay the others
        raise PromptError(f"{len(ids)} prompt tokens, but the context holds {llm.max_model_len}, answer included")
    return ids
