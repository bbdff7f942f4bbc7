"""`slipstream tune --method`: finds the best settings of a method for one model, shows and saves them."""

from __future__ import annotations

import importlib
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import checks
from slipstream.commands.bench.options import writable
from slipstream.commands.demo import executable
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.commands.shared.opening import open_llm
from slipstream.commands.shared.options import EngineSetup
from slipstream.commands.shared.terminal import ProgressBar, note, print_json, say, show_table, temporary_line
from slipstream.errors import OptionError, unknown_choice
from slipstream.folders import expanded
from slipstream.models.formats.builtin import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.bench.tune.prompts import Conversation
    from slipstream.llm import LLM

# method -> its search. Named by strings: torch is imported after the options are checked.
_SEARCHES = {"layer_skip": "slipstream.bench.tune.layer_skip"}


def tune_method(
    method: str, setup: EngineSetup, prompts: str | None, budget: float, output: str | None, as_json: bool
) -> None:
    """Search the settings of one method, show and save them."""
    if method not in _SEARCHES:
        raise unknown_choice("method to tune", method, list(_SEARCHES))
    checks.require(math.isfinite(budget) and budget > 0, "budget", budget, "seconds, above 0")
    extra = None if output is None else writable(output)
    conversations = _conversations(prompts)
    llm = open_llm(setup)
    finding = _search(method, llm, conversations, budget)
    finding["prompts"] = {"source": prompts or "built in", **finding["prompts"]}
    saved = _save(finding, extra)
    if as_json:
        print_json({**finding, "saved": [str(path) for path in saved]}, indent=2)
    else:
        _print(finding, saved, setup.model)


def _conversations(prompts: str | None) -> list[Conversation]:
    from slipstream.bench.tune.prompts import question, read_prompts

    if prompts is None:
        return [question(prompt.text) for prompt in PROMPTS]
    return read_prompts(expanded(prompts))


def _search(method: str, llm: LLM, conversations: list[Conversation], budget: float) -> dict[str, Any]:
    from slipstream.bench.tune.progress import TuneProgress
    from slipstream.bench.tune.prompts import encode

    if llm.tokenizer is None:
        raise OptionError(f"{llm.model.name} has no tokenizer, so it cannot read prompts")
    encoded = [encode(llm.tokenizer, conversation) for conversation in conversations]
    with ProgressBar() as bar:
        progress = TuneProgress(_tell, lambda seconds: bar(int(min(seconds, budget)), math.ceil(budget)))
        finding: dict[str, Any] = importlib.import_module(_SEARCHES[method]).tune(llm, encoded, budget, progress)
    return finding


def _tell(line: str) -> None:
    with temporary_line(""):  # clears the bar
        note(line)


def _save(finding: dict[str, Any], extra: Path | None) -> list[Path]:
    from slipstream.drafters import tuned

    places = [tuned.path(finding["method"], finding["fingerprint"]), *([extra] if extra is not None else [])]
    for place in places:
        try:
            tuned.save(place, finding)
        except OSError as error:
            raise OptionError(f"cannot write {str(place)!r}: {error.strerror or error}") from None
    return places


def _print(finding: dict[str, Any], saved: list[Path], model: str) -> None:
    rows = [
        [
            f"{point['layers_run']}{' *' if point['skip'] == finding['skip'] else '  '}",
            f"{100 * point['agreement']:.1f}%",
            f"{point['estimated_speedup']:.2f}x",
            str(point["depth"]),
            point["skip"],
        ]
        for point in finding["frontier"]
    ]
    show_table(["layers run  ", "agreement", "estimated speed-up", "depth", "skip"], rows, right=[0, 1, 2, 3])
    say("\n" + _measured_line(finding))
    if finding["measured"]["disturbed"]:
        say("The figures are impossible: other programs disturbed the measurement. Tune again when idle.", "bad")
    elif finding["measured"]["speedup"] < 1:
        say(f"Plain decoding is faster: {finding['method']} does not pay on this model.", "bad")
    for place in saved:
        say(f"saved: {place}")
    choice = "" if model == DEFAULT_MODEL else f" -m {shlex.quote(model)}"
    drafter = f"{finding['method']}:depth={finding['depth']},nodes={finding['depth']}"
    say("use it:")
    say(f"  {executable()} run{choice} --speculate {drafter} 'Why is the sky blue?'", "bold")


def _measured_line(finding: dict[str, Any]) -> str:
    measured, held_out = finding["measured"], finding["prompts"]["held_out"]
    plural = "s" if held_out > 1 else ""
    where = f"{held_out} prompt{plural} that the search did not see" if held_out else "the prompt of the search itself"
    return (
        f"Measured on {where}: {measured['speedup']:.2f}x plain decoding "
        f"({measured['tokens_per_second']:.1f} against {measured['plain_tokens_per_second']:.1f} tok/s), "
        f"{measured['tokens_per_step']:.2f} tokens per step, "
        f"texts {'identical' if measured['identical'] else 'NOT identical'}."
    )
