"""`slipstream run`: one prompt, one answer, as it comes."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated

from slipstream.commands.opening import open_llm, stats_line
from slipstream.commands.options import Described, EngineSetup, Sampling
from slipstream.commands.show import Origins, draw_tree, legend, mark_origins
from slipstream.commands.terminal import coloured, harmless, note, print_json, say
from slipstream.errors import OptionError, PromptError, unknown_choice

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.types import Completion, SamplingParams

_SHOWS = ["origin", "tree"]


def run(
    prompt: Annotated[str, Described("what to ask; - reads standard input", metavar="PROMPT", positional=True)],
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    raw: Annotated[bool, Described("send the text as it is, without the chat template")] = False,
    system: Annotated[str | None, Described("system message for the chat template", metavar="TEXT")] = None,
    show: Annotated[str | None, Described("origin: mark drafted tokens; tree: draw every step", metavar="WHAT")] = None,
    as_json: Annotated[bool, Described("print one JSON object at the end", ("--json",))] = False,
) -> None:
    """Answer one prompt."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    _check(show, as_json, sampling, raw, system)
    params = sampling.params()
    text = _read(prompt, raw)
    llm = open_llm(setup)
    prompt_ids = _encode(llm, text, raw, system)
    if as_json:
        output = llm.generate(prompt_ids, params)[0]
        print_json(_summary(setup, llm, prompt_ids, output.outputs))
        return
    completions = _follow(llm, prompt_ids, params, show)
    for completion in completions:
        note(_ending(completion, params))


def _check(show: str | None, as_json: bool, sampling: Sampling, raw: bool, system: str | None) -> None:
    """Refuse what cannot be honoured together."""
    if show is not None and show not in _SHOWS:
        raise unknown_choice("--show", show, _SHOWS)
    if show is not None and as_json:
        raise OptionError("--show is for people and --json for programs: give one of them")
    if show is not None and sampling.n != 1:
        raise OptionError("--show follows one answer", hint="leave out -n")
    if sampling.logprobs is not None and not as_json:
        raise OptionError("--logprobs needs --json", hint="add --json")
    if raw and system is not None:
        raise OptionError("--system needs the chat template and --raw leaves it out: give one of them")


def _read(prompt: str, raw: bool) -> str:
    """The prompt; from standard input without the newline that ends a file."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None
    if not (prompt if raw else prompt.strip()):
        raise PromptError("the prompt is empty", hint="give some text")
    return prompt


def _encode(llm: LLM, text: str, raw: bool, system: str | None) -> list[int]:
    if llm.tokenizer is None:
        raise OptionError(f"{llm.model.name} has no tokenizer, so it cannot read text", hint="the Python API takes ids")
    if raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise OptionError(f"{llm.model.name} has no chat template, so --system cannot be honoured")
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _follow(llm: LLM, prompt_ids: list[int], params: SamplingParams, show: str | None) -> list[Completion]:
    """Write the answer while it is made; several answers one after the other, when all are done."""
    assert llm.tokenizer is not None  # `_encode` has asked
    origins, colour = Origins(llm.tokenizer, prompt_ids), coloured(sys.stdout)
    if show == "origin":
        note(legend(colour))
    done: list[Completion] = []
    steps = 0
    for delta in llm.stream(prompt_ids, params):
        if show == "tree" and delta.tree is not None:
            steps += 1
            head, *rest = draw_tree(delta.tree, delta.token_ids, llm.tokenizer)
            say("\n".join([f"step {steps:<3} {head}", *rest]))
        elif params.n == 1:
            text = mark_origins(origins.push(delta), colour) if show == "origin" else harmless(delta.text, sys.stdout)
            print(text, end="", flush=True)
        if delta.completion is not None:
            done.append(delta.completion)
    done.sort(key=lambda completion: completion.index)
    if params.n > 1:
        for completion in done:
            say(f"--- answer {completion.index + 1} of {params.n}", "title")
            print(harmless(completion.text, sys.stdout))
    elif show != "tree" and not done[0].text.endswith("\n"):
        print(flush=True)
    return done


def _ending(completion: Completion, params: SamplingParams) -> str:
    line = stats_line(completion.stats)
    if completion.finish_reason == "length":
        line += ", cut by --max-tokens or the context"
    if not params.greedy and params.seed is None and completion.index == 0:
        line += f", seed {completion.seed}"
    return line


def _summary(setup: EngineSetup, llm: LLM, prompt_ids: list[int], completions: list[Completion]) -> dict[str, object]:
    """Everything a program may want; the first choice's fields are at hand directly, `choices` has all."""
    choices = [_choice(completion) for completion in completions]
    return {
        "model": setup.model,
        "speculate": str(setup.drafter()),
        "verifier": setup.verifier,
        "exact": llm.exact,
        "quantize": llm.quantize,
        "prompt_tokens": len(prompt_ids),
        "seed": completions[0].seed,
        **choices[0],
        "choices": choices,
    }


def _choice(completion: Completion) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "stats": completion.stats.as_dict(),
    }
    if completion.logprobs is not None:
        choice["logprobs"] = [
            {
                "token_id": entry.token_id,
                "logprob": _finite(entry.logprob),
                "top": [{"token_id": token, "logprob": _finite(value)} for token, value in entry.top],
            }
            for entry in completion.logprobs
        ]
    return choice


def _finite(value: float) -> float | None:
    """JSON has no infinity; a token that cannot come has none to tell."""
    return value if math.isfinite(value) else None
