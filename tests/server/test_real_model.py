"""The default model, served: what the README shows works when pasted."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream import LLM, SamplingParams
from tests.invoking import ROOT
from tests.serving import Served, served

pytestmark = pytest.mark.real_model
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def smollm() -> Iterator[Served]:
    with served("smollm2-135m") as running:
        yield running


def test_the_curl_of_the_readme(smollm: Served) -> None:
    shown = re.search(r"^(curl .*?')\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert shown is not None
    command = shlex.split(shown[1].replace("\\\n", " ").replace("http://127.0.0.1:8000", smollm.url))
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] <= 60


def test_many_conversations_at_once_are_those_of_llm(smollm: Served) -> None:
    asked = [f"Write one sentence about the number {n}." for n in range(12)]
    how = [SamplingParams(temperature=0.7, top_p=0.9, seed=n, max_tokens=24) for n in range(12)]
    with LLM("smollm2-135m", speculate=None) as llm:
        texts = [output.text for output in llm.chat([[{"role": "user", "content": text}] for text in asked], how)]

    def client(number: int) -> str:
        body = {"messages": [{"role": "user", "content": asked[number]}], "temperature": 0.7, "top_p": 0.9}
        answer = smollm.answer(CHAT, {**body, "seed": number, "max_tokens": 24})
        text: str = answer["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(client, range(12))) == texts
    smollm.until_idle()


def test_a_prediction_makes_fewer_steps(smollm: Served) -> None:
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
    body = {"messages": [{"role": "user", "content": "Repeat:\n" + code}], "temperature": 0, "max_tokens": 60}
    plain = smollm.answer(CHAT, {**body, "speculate": False})
    text = plain["choices"][0]["message"]["content"]
    predicted = smollm.answer(CHAT, {**body, "prediction": {"type": "content", "content": text}})
    assert predicted["choices"][0]["message"]["content"] == text
    assert predicted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    steps = [a["metrics"]["speculative_decoding"]["num_steps"] for a in (plain, predicted)]
    assert steps[1] < steps[0]


def test_json_by_a_schema(smollm: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Describe a person."}], "response_format": form, "max_tokens": 80}
    answer = smollm.answer(CHAT, {**body, "temperature": 0})["choices"][0]
    assert answer["finish_reason"] == "stop" and json.loads(answer["message"]["content"]).keys() == {"name", "age"}
