"""`slipstream demo`: the same six prompts with and without speculation, side by side, in one process."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.commands.demo_prompts import PROMPTS, DemoPrompt
from slipstream.commands.shared.opening import open_llm
from slipstream.commands.shared.options import Described, EngineSetup, Sampling, require_single_answer
from slipstream.commands.shared.show import Origins, legend, mark_origins
from slipstream.commands.shared.terminal import coloured, print_json, say, show_table, temporary_line
from slipstream.errors import OptionError
from slipstream.types import Stats

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec
    from slipstream.llm import LLM
    from slipstream.types import Completion, SamplingParams

_MAX_TOKENS = 128
_TRAINED = "eagle3"
_ROUNDS = 2  # plain and speculative alternate; the faster run of each counts, as other programs only slow a run down


@dataclass(frozen=True)
class Comparison:
    """One prompt answered both ways."""

    kind: str
    plain: Completion
    speculative: Completion
    pieces: list[tuple[str, bool]]  # the speculative text, by origin
    identical: bool

    @property
    def speedup(self) -> float:
        """Speed-up of the speculative answer."""
        return _speedup(self.plain.stats, self.speculative.stats)

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        stats = self.speculative.stats
        return {
            "kind": self.kind,
            "plain_tok_s": round(self.plain.stats.tokens_per_second, 2),
            "speculative_tok_s": round(stats.tokens_per_second, 2),
            "speedup": round(self.speedup, 3),
            "tokens": stats.emitted,
            "tokens_per_step": round(stats.tokens_per_step, 3),
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "identical": self.identical,
            "text": self.speculative.text,
        }


def demo(
    setup: EngineSetup | None = None,
    sampling: Sampling | None = None,
    as_json: Annotated[bool, Described("print one JSON object at the end", ("--json",))] = False,
) -> int:
    """Answer six prompts with plain and speculative decoding, and compare."""
    setup, sampling = setup or EngineSetup(), sampling or Sampling()
    require_single_answer(sampling, "demo")
    params = sampling.params(max_tokens=_MAX_TOKENS, seed=0)
    spec = setup.drafter()
    llm = open_llm(setup)
    if llm.tokenizer is None:
        raise OptionError(f"{setup.model} has no tokenizer, so it cannot answer text")
    if setup.speculate is None and setup.speculative_config is None:
        spec = _best(llm) or spec
    if not as_json:
        say(f"{setup.model}, drafter {spec}. {legend(coloured(sys.stdout))}.\n")
    with temporary_line("warming up ..."):
        for drafter in (None, spec):
            llm.use(drafter)
            llm.generate(_encode(llm, PROMPTS[-1]), params)
    compared = []
    for number, prompt in enumerate(PROMPTS, 1):
        doing = f"{number} of {len(PROMPTS)}: {prompt.kind}, plain and speculative, {_ROUNDS} times each ..."
        with temporary_line(doing):
            compared.append(_compare(llm, prompt, spec, params))
        if not as_json:
            _print_one(prompt, compared[-1])
    report = _report(setup, spec, llm, compared)
    if as_json:
        print_json(report)
    else:
        _print_table(compared, report)
    return 0 if report["identical"] else 1


def _best(llm: LLM) -> DrafterSpec | None:
    """The best drafter trained for this model, if any, merged with `suffix`."""
    from slipstream.drafters.heads import head_checkpoint
    from slipstream.drafters.registry import parse_speculate

    return parse_speculate(f"suffix+{_TRAINED}") if head_checkpoint.find(_TRAINED, llm.model.fingerprint) else None


def _encode(llm: LLM, prompt: DemoPrompt) -> list[int]:
    assert llm.tokenizer is not None
    if llm.tokenizer.has_chat_template:
        return llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    return llm.tokenizer.encode(prompt.text)


def _compare(llm: LLM, prompt: DemoPrompt, spec: DrafterSpec, params: SamplingParams) -> Comparison:
    prompt_ids = _encode(llm, prompt)
    plain: list[Completion] = []
    speculative: list[Completion] = []
    pieces: list[tuple[str, bool]] = []
    for _ in range(_ROUNDS):
        for drafter, runs in ((None, plain), (spec, speculative)):
            llm.use(drafter)  # a new one each time: a drafter that learns from answers must not have seen this one
            completion, pieces = _answer(llm, prompt_ids, params)
            runs.append(completion)
    texts = {tuple(completion.token_ids) for completion in plain + speculative}
    return Comparison(prompt.kind, _fastest(plain), _fastest(speculative), pieces, len(texts) == 1)


def _answer(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> tuple[Completion, list[tuple[str, bool]]]:
    assert llm.tokenizer is not None
    origins, pieces, completion = Origins(llm.tokenizer, prompt_ids), [], None
    for delta in llm.stream(prompt_ids, params):
        pieces += origins.push(delta)
        completion = delta.completion
    assert completion is not None  # the last delta has it
    return completion, pieces


def _fastest(runs: list[Completion]) -> Completion:
    return min(runs, key=lambda completion: completion.stats.decode_ms)


def _speedup(plain: Stats, speculative: Stats) -> float:
    """Ratio of decode speeds; if a single step gave a whole answer, of total times."""
    if plain.decoded and speculative.decoded:
        return speculative.tokens_per_second / plain.tokens_per_second
    return (plain.prefill_ms + plain.decode_ms) / (speculative.prefill_ms + speculative.decode_ms)


def _report(setup: EngineSetup, spec: DrafterSpec, llm: LLM, compared: list[Comparison]) -> dict[str, Any]:
    import torch

    from slipstream import __version__

    plain, speculative = Stats(), Stats()
    for pair in compared:
        plain.add(pair.plain.stats)
        speculative.add(pair.speculative.stats)
    return {
        "prompts": [c.as_dict() for c in compared],
        "model": setup.model,
        "speculate": str(spec),
        "exact": llm.exact,
        "identical": all(c.identical for c in compared),
        "plain_tok_s": round(plain.tokens_per_second, 2),
        "speculative_tok_s": round(speculative.tokens_per_second, 2),
        "speedup": round(_speedup(plain, speculative), 3),
        "tokens_per_step": round(speculative.tokens_per_step, 3),
        "torch_threads": torch.get_num_threads(),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "device": llm.model.device,
        "quantize": llm.quantize,
        "version": __version__,
    }


def _print_one(prompt: DemoPrompt, compared: Comparison) -> None:
    colour = coloured(sys.stdout)
    first, *more = prompt.text.splitlines()
    say(f"{prompt.kind}: {first}{' ...' if more else ''}", "title")
    print(mark_origins(compared.pieces, colour))
    verdict = "identical to plain decoding" if compared.identical else "NOT identical to plain decoding"
    say(f"({verdict}, {compared.speedup:.2f}x)\n", "dim" if compared.identical else "bad")


def _print_table(compared: list[Comparison], report: dict[str, Any]) -> None:
    rows = [
        [
            entry["kind"],
            f"{entry['plain_tok_s']:.1f}",
            f"{entry['speculative_tok_s']:.1f}",
            f"{entry['speedup']:.2f}x",
            f"{entry['tokens_per_step']:.2f}",
            "yes" if entry["identical"] else "NO",
        ]
        for entry in [*report["prompts"], {"kind": "all", **report}]
    ]
    headers = ["kind", "plain tok/s", "speculative tok/s", "speed-up", "tokens per step", "identical"]
    show_table(headers, rows, right=[1, 2, 3, 4])
    weights = "" if report["quantize"] == "none" else f", weights in {report['quantize']}"
    say(f"\n{report['dtype']} on {report['device']}{weights}, torch threads: {report['torch_threads']}")
    say("See the trees of each step:")
    say(f"  {_next_command(report['model'])}", "bold")


def _next_command(model: str) -> str:
    """A command that works when pasted here."""
    from slipstream.models.formats.builtin import DEFAULT_MODEL

    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    return f"{executable()} run{choice} --show tree 'Repeat: the quick brown fox jumps over the lazy dog'"


def executable() -> str:
    """How this program was called, in the shortest form."""
    called = Path(sys.argv[0])
    if called.name != "slipstream" or not called.exists():
        return f"{_shortest(Path(sys.executable))} -m slipstream"
    if shutil.which("slipstream") == str(called.absolute()):
        return "slipstream"
    return _shortest(called)


def _shortest(path: Path) -> str:
    whole, relative = str(path.absolute()), os.path.relpath(path)
    if os.sep not in relative:
        relative = f".{os.sep}{relative}"
    return shlex.quote(min(relative, whole, key=len))
