"""Every parameter reaches the engine under its name, on every route: the answer is that of `LLM`, and another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from slipstream import LLM, SamplingParams
from tests.invoking import save_model
from tests.serving import Served, served
from tests.vocabularies import TEMPLATE

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "The quick brown fox. The quick brown"}]
BASE: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
END = {"logit_bias": {"2": 100}}  # the end token, in every place
# Fields in which the parameter changes the answer. What depends on the usual answer is a function of its ids and text.
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.2},
    "top_p": {"top_p": 0.05},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 5.0, "temperature": 0.0},
    "presence_penalty": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency_penalty": {"frequency_penalty": 2.0, "temperature": 0.0},
    "logit_bias": {"logit_bias": lambda ids, text: {str(ids[0]): -100}},
    "seed": {"seed": 4},
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 5, **END},
    "ignore_eos": {"ignore_eos": True, **END},
    "stop": {"stop": lambda ids, text: [text[4:6]]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": lambda ids, text: [text[4:6]]},
    "stop_token_ids": {"stop_token_ids": lambda ids, text: [ids[5]]},
    "bad_words": {"bad_words": lambda ids, text: [next(word for word in text if word.isalpha())]},
    "allowed_token_ids": {"allowed_token_ids": [10, 11, 12]},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False, "allowed_token_ids": [1, 10]},
}


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, speculate=None)


def answer(llm: LLM, prompt: list[int], how: dict[str, Any]) -> tuple[str, list[int]]:
    bias = how.get("logit_bias")  # keys of JSON are strings
    params = how if bias is None else {**how, "logit_bias": {int(id): value for id, value in bias.items()}}
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output.text, output.token_ids


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_is_honoured_on_every_route(server: Served, llm: LLM, name: str) -> None:
    (prompt,) = llm.chat_prompts(ASK)
    text, ids = answer(llm, prompt, BASE)
    how = BASE | {key: value(ids, text) if callable(value) else value for key, value in CASES[name].items()}
    wanted, without = answer(llm, prompt, how), {**how, name: BASE.get(name)}
    assert wanted != answer(llm, prompt, {key: value for key, value in without.items() if value is not None})
    (chat,) = server.answer(CHAT, {"messages": ASK, **how, "return_token_ids": True})["choices"]
    assert (chat["message"]["content"], chat["token_ids"]) == wanted
    (completion,) = server.answer(COMPLETIONS, {"prompt": prompt, **how, "return_token_ids": True})["choices"]
    assert (completion["text"], completion["token_ids"]) == wanted
    renamed = {"max_output_tokens" if key == "max_tokens" else key: value for key, value in how.items()}
    response = server.answer(RESPONSES, {"input": ASK, **renamed, "return_token_ids": True})
    assert (response["output"][0]["content"][0]["text"], response["token_ids"]) == wanted
    assert response["prompt_token_ids"] == prompt


def test_max_completion_tokens_is_the_newer_name(server: Served) -> None:
    how = {**BASE, "max_tokens": None}
    (choice,) = server.answer(CHAT, {"messages": ASK, **how, "max_completion_tokens": 7})["choices"]
    assert choice["finish_reason"] == "length"
    for limits in ({"max_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert choice == server.answer(CHAT, {"messages": ASK, **how, **limits})["choices"][0]


def test_speculate_and_what_is_told_of_tokens_on_responses(server: Served) -> None:
    body = {"input": ASK, "max_output_tokens": 120, "temperature": 0, "return_origins": True}
    drafted, plain = (server.answer(RESPONSES, {**body, "speculate": how}) for how in ("suffix", False))
    assert drafted["output"][0]["content"] == plain["output"][0]["content"]
    counts = [told["metrics"]["speculative_decoding"]["num_draft_tokens"] for told in (drafted, plain)]
    assert counts[0] > 0 == counts[1]
    assert set(drafted["origins"]) == {None, "suffix"} and set(plain["origins"]) == {None}
    last = server.named_events(RESPONSES, {**body, "speculate": "suffix"})[-1][1]["response"]
    assert (last["origins"], last["token_ids"]) == (drafted["origins"], drafted["token_ids"])
    scored = server.answer(RESPONSES, {**body, "prompt_logprobs": 1, "return_token_ids": True})
    assert len(scored["prompt_logprobs"]) == len(scored["prompt_token_ids"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_priority_decides_who_runs_next(tiny: str, path: str) -> None:
    """One request runs; of two that wait, the later one with the lower number comes first."""
    how: dict[str, Any] = {"ignore_eos": True, "speculate": False}
    how |= {"input": ASK, "max_output_tokens": 20} if path == RESPONSES else {"max_tokens": 20}
    how |= {CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "a"}}.get(path, {})
    order: list[int] = []
    with served(tiny, max_num_seqs=1) as server:
        all_are_there, step = threading.Event(), server.llm.engine.step

        def held() -> Any:
            all_are_there.wait()
            running = {sequence.request.priority for sequence in server.llm.engine.scheduler.running}
            order.extend(running.difference(order))
            return step()

        server.llm.engine.step = held  # type: ignore[method-assign]

        def ask(priority: int) -> None:
            httpx.post(server.url + path, json={**how, "priority": priority}, timeout=60).raise_for_status()

        with ThreadPoolExecutor(3) as pool:
            try:
                for number, priority in enumerate((3, 2, 1), 1):
                    asked = pool.submit(ask, priority)
                    while server.llm.under_way < number and not asked.done():
                        time.sleep(0.002)
            finally:
                all_are_there.set()
    assert order == [3, 1, 2]


@pytest.mark.parametrize("limits", ["auto:clock=no,max_nodes=0", {"method": "auto", "clock": False, "max_nodes": 0}])
def test_a_request_limits_the_policy(tiny: str, limits: Any) -> None:
    body = {"messages": ASK, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "return_trees": True}
    with served(tiny) as server:
        free, limited = (
            max(len(tree["tokens"]) for tree in server.answer(CHAT, {**body, "speculate": how})["choices"][0]["trees"])
            for how in ("auto:clock=no", limits)
        )
    assert free > 1 == limited, "the root alone"


# -- what goes to the chat template -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def variable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template reads variables."""
    reads = "{{ mood }}|{{ reasoning_effort }}|{% for one in documents or [] %}{{ one.text }}{% endfor %}"
    path = save_model(tmp_path_factory.mktemp("variables"), template=TEMPLATE + reads)
    with served(str(path)) as running:
        yield running


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"chat_template_kwargs": {"mood": "glad"}}, "glad||"),
        ({"reasoning_effort": "low"}, "|low|"),
        ({"documents": [{"text": "one"}, {"text": "two"}]}, "||onetwo"),
        ({"chat_template_kwargs": {"mood": "glad"}, "reasoning_effort": "low"}, "glad|low|"),
    ],
)
def test_variables_of_the_template(variable: Served, field: dict[str, Any], said: str) -> None:
    answer = variable.answer(CHAT, {"messages": ASK, "max_tokens": 1, **field, "return_token_ids": True})
    prompt = variable.llm.get_tokenizer().decode(answer["prompt_token_ids"])
    assert prompt.endswith(said) and "quick brown fox" in prompt


def test_without_the_beginning_of_an_answer(server: Served, llm: LLM) -> None:
    body = {"messages": ASK, **BASE, "return_token_ids": True}
    usual, bare = (
        server.answer(CHAT, {**body, "add_generation_prompt": begins})["prompt_token_ids"] for begins in (True, False)
    )
    assert [usual] == llm.chat_prompts(ASK) and [bare] == llm.chat_prompts(ASK, add_generation_prompt=False)
    assert usual[: len(bare)] == bare and len(usual) > len(bare)
