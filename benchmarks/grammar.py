"""Structured output on real schemas: is every answer that ends valid, what does `grammar` bring, what do masks cost.

    python -m benchmarks.grammar [--model smollm2-135m] [--threads 2] [--schemas 20] [--prompts 20] [--tokens 160]
                                 [--speculate none,suffix] [--temperature 0.0] [--strict] [--short] [--json FILE]

The schemas are those of other projects (GitHub, Cloud Build, Codecov, ...) that the package check-jsonschema carries,
whole files or definitions of them; answers are validated by the package jsonschema. Each prompt is answered by every
drafter with and without `grammar`, in turns; the texts must be identical. Speeds are of decoding, tokens a second over
those of the same drafter without `grammar`, on the answers that end: a small model repeats itself in the others. The
cost of masks is the time spent in constraints, of all time.

`--strict` makes every property required and allows no others, as APIs with a strict mode ask for: the schemas then say
most of the text. Whole files are left out there, since all of their properties would be far too many. `--short`
lets strings have 24 characters and lists two items: the answers of a small model then end.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import torch

from slipstream import LLM, SamplingParams
from slipstream.grammar import Constraint
from slipstream.types import Stats

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


@dataclass
class Row:
    """One drafter with and without `grammar`."""

    drafter: str
    speedup: float = 0.0
    tokens_per_step: float = 0.0
    tokens_per_step_without: float = 0.0
    identical: bool = True
    answers: int = 0
    ended: int = 0
    valid: int = 0
    mask_share: float = 0.0  # of the decode time, without `grammar`
    invalid: list[str] = field(default_factory=list)


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


def measure(llm: LLM, drafter: str, arguments: argparse.Namespace, spent: list[float]) -> Row:
    asked = settings(llm, drafter)
    row, totals = Row(drafter), {label: Stats() for label in asked}
    masks = whole = 0.0  # milliseconds
    for name, part in [pair for pair in SCHEMAS if pair[1] or not arguments.strict][: arguments.schemas]:
        schema = strict(load(name, part)) if arguments.strict else load(name, part)
        schema = short(schema) if arguments.short else schema
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        topic = (part or name).rpartition("/")[2]
        for number, subject in enumerate(SUBJECTS[: arguments.prompts]):
            messages = [{"role": "user", "content": f"Write a JSON object of the kind {topic!r} for {subject}."}]
            outputs = {}
            for label in (*asked, *reversed(asked))[number % 2 * 2 :][:2]:  # in turns
                how = SamplingParams(
                    temperature=arguments.temperature,
                    seed=number,
                    max_tokens=arguments.tokens,
                    structured_outputs={"json": schema},
                    speculate=asked[label],
                )
                spent[0] = 0.0
                (outputs[label],) = llm.chat(messages, how)
                if label == "without":
                    masks += 1000 * spent[0]
                    whole += outputs[label].stats.prefill_ms + outputs[label].stats.decode_ms
            first, second = outputs["without"], outputs["with"]
            row.identical &= first.token_ids == second.token_ids
            row.answers += 1
            if first.finish_reason == "stop":
                row.ended += 1
                for label, output in outputs.items():
                    totals[label].add(output.stats)
                if validator.is_valid(json.loads(first.text)):
                    row.valid += 1
                else:
                    row.invalid.append(f"{name} {part} {subject}: {first.text}")
    without, held = totals["without"], totals["with"]
    row.speedup = held.tokens_per_second / without.tokens_per_second if row.ended else 0.0
    row.tokens_per_step, row.tokens_per_step_without = held.tokens_per_step, without.tokens_per_step
    row.mask_share = masks / whole
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS))
    parser.add_argument("--prompts", type=int, default=len(SUBJECTS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--speculate", default="none,suffix")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--strict", action="store_true", help="all properties are required, no others allowed")
    parser.add_argument("--short", action="store_true", help="short strings and lists")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    drafters = arguments.speculate.split(",")
    loaded = dict.fromkeys([*drafters, *map(beside, drafters)])
    llm = LLM(arguments.model, speculate=None, drafters=list(loaded))
    spent = [0.0]
    timed(spent)
    print("| drafter | `grammar` beside it | tokens per step | without | identical | ended | valid | masks |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |", flush=True)
    rows = []
    for drafter in drafters:
        row = measure(llm, drafter, arguments, spent)
        rows.append(row)
        steps = f"{row.tokens_per_step:.2f} | {row.tokens_per_step_without:.2f}"
        ends = f"{row.ended} of {row.answers} | {row.valid}"
        same = "yes" if row.identical else "NO"
        print(f"| `{drafter}` | {row.speedup:.2f}x | {steps} | {same} | {ends} | {row.mask_share:.2%} |", flush=True)
        for invalid in row.invalid:
            print(f"invalid: {invalid}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
