"""`slipstream run`: one prompt, one streamed answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from slipstream.commands.shared.answer_json import choice_as_dict, seeded
from slipstream.commands.shared.explain import explained
from slipstream.commands.shared.opening import open_llm, stats_line
from slipstream.commands.shared.options import Described, EngineSetup, Sampling
from slipstream.commands.shared.show import Origins, draw_tree, legend, mark_origins
from slipstream.commands.shared.terminal import coloured, harmless, note, print_json, say
from slipstream.errors import OptionError, PromptError, unknown_choice

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.types import Completion, SamplingParams

_SHOWS = ["origin", "tree"]


def run(
    prompt: Annotated[str, Described("the prompt; - reads standard input", metavar="PROMPT", positional=True)],
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    raw: Annotated[bool, Described("send the text unchanged, without the chat template")] = False,
    system: Annotated[str | None, Described("system message for the chat template", metavar="TEXT")] = None,
    show: Annotated[str | None, Described("origin: mark drafted tokens; tree: draw every step", metavar="WHAT")] = None,
    explain: Annotated[bool, Described("say what was drafted in each step, and why")] = False,
    as_json: Annotated[bool, Described("print one JSON object at the end", ("--json",))] = False,
) -> None:
    """Answer one prompt."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    _check(show, explain, as_json, sampling, raw, system)
    params = seeded(sampling.params())
    text = _read(prompt, raw)
    llm = open_llm(setup)
    prompt_ids = _encode(llm, text, raw, system)
    if as_json:
        output = llm.generate(prompt_ids, params)[0]
        print_json(_summary(setup, llm, prompt_ids, output.outputs, params))
        return
    completions = _follow(llm, prompt_ids, params, show)
    for completion in completions:
        note(_ending(completion, drawn=sampling.seed is None and not params.greedy))
        if explain:
            note("\n".join(explained(completion.stats)))


def _check(show: str | None, explain: bool, as_json: bool, sampling: Sampling, raw: bool, system: str | None) -> None:
    """Refuse options that exclude each other."""
    if show is not None and show not in _SHOWS:
        raise unknown_choice("--show", show, _SHOWS)
    if (show is not None or explain) and as_json:
        given = "--show" if show is not None else "--explain"
        raise OptionError(f"{given} and --json exclude each other: give one of them")
    if show is not None and sampling.n != 1:
        raise OptionError("--show shows a single answer", hint="leave out -n")
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
            raise OptionError(f"{llm.model.name} has no chat template, so --system is not supported")
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])


def _follow(llm: LLM, prompt_ids: list[int], params: SamplingParams, show: str | None) -> list[Completion]:
    """Stream the answer; several answers are shown when all are done."""
    assert llm.tokenizer is not None  # checked by `_encode`
    origins, colour = Origins(llm.tokenizer, prompt_ids), coloured(sys.stdout)
    if show == "origin":
        note(legend(colour))
    done: list[Completion] = []
    steps = 0
    for delta in llm.stream(prompt_ids, params, trace=show == "tree"):
        given = delta.token_ids
        for tree in delta.trees:
            steps += 1
            head, *rest = draw_tree(tree, given, llm.tokenizer)
            say("\n".join([f"step {steps:<3} {head}", *rest]))
            given = given[len(tree.walk(given)) + 1 :]
        if show != "tree" and params.n == 1:
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


def _ending(completion: Completion, *, drawn: bool) -> str:
    """Counters, and the seed if it was drawn."""
    line = stats_line(completion.stats)
    if completion.finish_reason == "length":
        line += ", cut by --max-tokens or the context"
    if drawn and completion.index == 0:
        line += f", seed {completion.seed}"
    return line


def _summary(
    setup: EngineSetup, llm: LLM, prompt_ids: list[int], completions: list[Completion], params: SamplingParams
) -> dict[str, object]:
    """The JSON summary; the first choice's fields are at the top level, `choices` has all."""
    choices = [choice_as_dict(completion, params) for completion in completions]
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
