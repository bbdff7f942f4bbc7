"""Structured output on real schemas: is every answer that ends valid, what does `grammar` bring, what do masks cost.

    python -m benchmarks.grammar [--model smollm2-135m] [--threads 2] [--schemas 20] [--prompts 20] [--tokens 160]
                                 [--speculate none,suffix] [--quantize int8] [--temperature 0.0]
                                 [--strict] [--short] [--json FILE]

The schemas are those of other projects (GitHub, Cloud Build, Codecov, ...) that the package check-jsonschema carries,
whole files or definitions of them; answers are validated by the package jsonschema. Each prompt is answered by every
drafter with and without `grammar`, in turns; the texts must be identical. Speeds are of decoding, tokens a second over
those of the same drafter without `grammar`, on the answers that end: a small model repeats itself in the others. The
cost of masks is the time spent in constraints, of all time, with and without `grammar`.

`--strict` makes every property required and allows no others, as APIs with a strict mode ask for: the schemas then say
most of the text. Whole files are left out there, since all of their properties would be far too many. `--short`
lets strings have 24 characters and lists two items: the answers of a small model then end.

`--json` keeps every answer as it is made. The same command with the same file goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import torch

from slipstream import LLM, SamplingParams
from slipstream.grammar import Constraint
from slipstream.types import Output

# File, and the definition in it that is used; the whole schema without one.
SCHEMAS = [
    ("github-discussion", ""),
    ("github-issue-config", ""),
    ("changie", ""),
    ("cloudbuild", ""),
    ("codecov", ""),
    ("changie", "$defs/ProjectConfig"),
    ("changie", "$defs/Replacement"),
    ("changie", "$defs/Custom"),
    ("cloudbuild", "definitions/GoModules"),
    ("cloudbuild", "definitions/MavenArtifacts"),
    ("cloudbuild", "definitions/BuildStep"),
    ("citation-file-format", "definitions/person"),
    ("citation-file-format", "definitions/entity"),
    ("compose-spec", "$defs/healthcheck"),
    ("compose-spec", "$defs/schedule"),
    ("buildkite", "definitions/selectField"),
    ("bitbucket-pipelines", "definitions/dynamic_pipeline_variable"),
    ("mergify", "$defs/Commit"),
    ("taskfile", "definitions/for_cmd_call"),
    ("snapcraft", "$defs/ContentPlug"),
]
_SHARED = ("$schema", "definitions", "$defs")
_LETTERS, _ITEMS = 24, 2  # of a short string, and of a short list
_SAID = {"maxLength", "minLength", "enum", "const", "pattern", "format"}
SUBJECTS = [
    "a small web shop", "a weather station", "a chess club", "a library of old maps", "a bakery in Lyon",
    "a robot that waters plants", "a choir", "a bicycle repair shop", "a school newspaper", "a museum of trains",
    "a game of cards", "a hospital's canteen", "a garden calendar", "a travel diary", "a news feed",
    "a thermostat", "a poetry contest", "a fishing boat", "a music player", "an archive of letters",
]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one drafter; pairs are without `grammar` and with it."""

    drafter: str
    schema: str
    prompt: int
    finish_reason: str
    valid: bool
    identical: bool
    text: str
    emitted: tuple[int, int]
    steps: tuple[int, int]
    decoded: tuple[int, int]  # tokens of all steps after the first
    decode_ms: tuple[float, float]
    whole_ms: tuple[float, float]
    mask_ms: tuple[float, float]

    @property
    def ended(self) -> bool:
        return self.finish_reason == "stop"


class Answers:
    """All answers so far, in a file if there is one."""

    def __init__(self, file: Path | None, settings: dict[str, Any]) -> None:
        self._file, self._settings = file, settings
        self.made: list[Answer] = []
        if file is not None and file.exists():
            held = json.loads(file.read_text())
            if held["settings"] != settings:
                raise SystemExit(f"{file} holds answers with other settings: {held['settings']}")
            self.made = [Answer(**answer) for answer in held["answers"]]
        self._known = {(answer.drafter, answer.schema, answer.prompt) for answer in self.made}

    def __contains__(self, key: tuple[str, str, int]) -> bool:
        return key in self._known

    def add(self, answer: Answer) -> None:
        self.made.append(answer)
        if self._file is not None:
            whole = {"settings": self._settings, "rows": self.rows(), "answers": [asdict(each) for each in self.made]}
            fresh = self._file.with_name(self._file.name + ".new")
            fresh.write_text(json.dumps(whole, indent=1))
            fresh.replace(self._file)  # a run that is stopped here leaves a whole file

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each drafter."""
        names = dict.fromkeys(answer.drafter for answer in self.made)
        return [row([answer for answer in self.made if answer.drafter == name]) for name in names]


def row(answers: list[Answer]) -> dict[str, Any]:
    """The figures of one drafter's answers."""
    ended = [answer for answer in answers if answer.ended]
    steps = total(answer.steps for answer in ended)
    emitted, decoded = total(answer.emitted for answer in ended), total(answer.decoded for answer in ended)
    decode_ms = total(answer.decode_ms for answer in ended)
    masks, whole = total(answer.mask_ms for answer in answers), total(answer.whole_ms for answer in answers)
    return {
        "drafter": answers[0].drafter,
        "speedup": (decoded[1] / decode_ms[1]) / (decoded[0] / decode_ms[0]) if all(decoded) else 0.0,
        "tokens_per_step": [emitted[label] / max(1, steps[label]) for label in (0, 1)],
        "identical": all(answer.identical for answer in answers),
        "answers": len(answers),
        "ended": len(ended),
        "valid": sum(answer.valid for answer in ended),
        "mask_share": [masks[label] / whole[label] for label in (0, 1)],
    }


def total(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The sums of firsts and of seconds."""
    firsts, seconds = zip((0.0, 0.0), *pairs, strict=True)
    return sum(firsts), sum(seconds)


def load(name: str, part: str) -> dict[str, Any]:
    """A schema of check-jsonschema, or a definition in it with what it refers to."""
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    whole: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    if not part:
        return whole
    found = functools.reduce(lambda inside, key: inside[key], part.split("/"), whole)
    return {key: whole[key] for key in _SHARED if key in whole} | found


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with all of its properties required, and no others."""
    return {**schema, "required": list(schema["properties"]), "additionalProperties": False}


def short(schema: Any) -> Any:
    """The schema with short strings and lists, where it says nothing else about them."""
    if isinstance(schema, list):
        return [short(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: short(part) for key, part in schema.items()}
    if schema.get("type") == "string" and not _SAID & schema.keys():
        return {**inside, "maxLength": _LETTERS}
    return {"maxItems": max(_ITEMS, schema.get("minItems", 0)), **inside} if schema.get("type") == "array" else inside


def timed(total: list[float]) -> None:
    """Add up the time spent in constraints, nested calls once."""
    inside = [0]

    def clocked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*arguments: Any) -> Any:
            inside[0] += 1
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                inside[0] -= 1
                if inside[0] == 0:
                    total[0] += time.perf_counter() - began

        return run

    for name in ("allows", "forbidden", "forced", "few", "pruned", "following"):
        setattr(Constraint, name, clocked(getattr(Constraint, name)))


def beside(drafter: str) -> str:
    """The drafter with `grammar`; `auto` has it."""
    return "grammar" if drafter == "none" else drafter if drafter == "auto" else f"{drafter}+grammar"


def settings(llm: LLM, drafter: str) -> dict[str, str | dict[str, object]]:
    """What a request names for this drafter without and with `grammar`."""
    parts = [part for part in llm.engine.drafters[drafter].parts if part != "grammar"]
    return {"without": {"method": drafter, "drafters": parts} if parts else drafter, "with": beside(drafter)}


def schemas(arguments: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Label, topic and schema of each."""
    for name, part in [pair for pair in SCHEMAS if pair[1] or not arguments.strict][: arguments.schemas]:
        schema = strict(load(name, part)) if arguments.strict else load(name, part)
        yield f"{name} {part}".strip(), (part or name).rpartition("/")[2], short(schema) if arguments.short else schema


def measure(llm: LLM, drafter: str, arguments: argparse.Namespace, spent: list[float], answers: Answers) -> None:
    """Answer what this drafter has not answered yet."""
    asked = settings(llm, drafter)
    for label, topic, schema in schemas(arguments):
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        for number, subject in enumerate(SUBJECTS[: arguments.prompts]):
            if (drafter, label, number) in answers:
                continue
            messages = [{"role": "user", "content": f"Write a JSON object of the kind {topic!r} for {subject}."}]
            outputs, masks = {}, {}
            for turn in (*asked, *reversed(asked))[number % 2 * 2 :][:2]:
                how = SamplingParams(
                    temperature=arguments.temperature,
                    seed=number,
                    max_tokens=arguments.tokens,
                    structured_outputs={"json": schema},
                    speculate=asked[turn],
                )
                spent[0] = 0.0
                (outputs[turn],) = llm.chat(messages, how)
                masks[turn] = 1000 * spent[0]
            first, second = outputs["without"], outputs["with"]
            ended = first.finish_reason == "stop"
            answer = Answer(
                drafter,
                label,
                number,
                str(first.finish_reason),
                ended and validator.is_valid(json.loads(first.text)),
                first.token_ids == second.token_ids,
                first.text,
                (first.stats.emitted, second.stats.emitted),
                (first.stats.steps, second.stats.steps),
                (first.stats.decoded, second.stats.decoded),
                (first.stats.decode_ms, second.stats.decode_ms),
                (whole_ms(first), whole_ms(second)),
                (masks["without"], masks["with"]),
            )
            answers.add(answer)
            if answer.ended and not answer.valid:
                print(f"invalid: {label}, {subject}: {answer.text}", flush=True)


def whole_ms(output: Output) -> float:
    """From the start of the prompt to the last token."""
    return output.stats.prefill_ms + output.stats.decode_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS))
    parser.add_argument("--prompts", type=int, default=len(SUBJECTS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--speculate", default="none,suffix")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--strict", action="store_true", help="all properties are required, no others allowed")
    parser.add_argument("--short", action="store_true", help="short strings and lists")
    parser.add_argument("--json", type=Path, help="keep answers and figures in a file, and go on from it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = ("model", "threads", "tokens", "quantize", "temperature", "strict", "short")
    answers = Answers(arguments.json, {name: getattr(arguments, name) for name in kept})
    drafters = arguments.speculate.split(",")
    loaded = dict.fromkeys([*drafters, *map(beside, drafters)])
    llm = LLM(arguments.model, quantize=arguments.quantize, speculate=None, drafters=list(loaded))
    spent = [0.0]
    timed(spent)
    for drafter in drafters:
        measure(llm, drafter, arguments, spent, answers)
    print("| drafter | `grammar` beside it | tokens per step | without | identical | ended | valid | masks | without |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for each in answers.rows():
        before, after = each["tokens_per_step"]
        least, most = each["mask_share"]
        same = "yes" if each["identical"] else "NO"
        figures = f"{each['speedup']:.2f}x | {after:.2f} | {before:.2f} | {same}"
        counts = f"{each['ended']} of {each['answers']} | {each['valid']}"
        print(f"| `{each['drafter']}` | {figures} | {counts} | {most:.2%} | {least:.2%} |")


if __name__ == "__main__":
    main()
