"""The unmodified client of OpenAI, sync and async, against this server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.tooling import WEATHER as FUNCTION
from tests.server.tooling import saying, served_with_tools, written_call
from tests.serving import Served

HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"type": "function", "function": {**FUNCTION, "description": "The weather of a city"}}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with_tools(tmp_path_factory.mktemp("tools")) as (server, _):
        yield server


@pytest.fixture(scope="module")
def client(talking: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=talking.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def test_chats_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    how: Any = {"model": model, "messages": HI, "max_tokens": 30, "seed": 4, "temperature": 0.8}
    whole = client.chat.completions.create(**how)
    text = whole.choices[0].message.content
    assert text and whole.usage is not None
    stream = client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    steered = client.chat.completions.create(**how, extra_body={"speculate": False, "return_origins": True})
    assert steered.choices[0].message.content == text
    assert set(steered.choices[0].model_extra["origins"]) == {None}  # type: ignore[index]


def test_the_async_client_with_many_streams(talking: Served, model: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=talking.url + "/v1", api_key="none") as client:

            async def one(seed: int, stream: bool) -> str:
                how: Any = {"model": model, "messages": HI, "max_tokens": 20, "seed": seed}
                if not stream:
                    answer = await client.chat.completions.create(**how)
                    return answer.choices[0].message.content or ""
                text = ""
                async for chunk in await client.chat.completions.create(**how, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            whole = await asyncio.gather(*(one(seed, False) for seed in range(10)))
            streamed = await asyncio.gather(*(one(seed, True) for seed in range(10)))
            assert whole == streamed and len(set(whole)) > 5
            stream: Any = await client.chat.completions.create(
                model=model, messages=HI, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(main())
    talking.until_idle()


def test_completions_and_log_probabilities(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=["a", "b"], max_tokens=5, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.token_logprobs[0] is None
    chat = client.chat.completions.create(model=model, messages=HI, max_tokens=5, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None and len(content) == 5 and len(content[0].top_logprobs) == 2


@pytest.mark.parametrize("seed", range(4))
def test_json_by_a_schema(client: openai.OpenAI, model: str, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}
    how: Any = {"model": model, "messages": HI, "seed": seed, "max_tokens": 100, "response_format": form}
    answer = client.chat.completions.create(**how)
    point = json.loads(answer.choices[0].message.content or "")
    assert point.keys() == {"x", "y"} and answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(**how, stream=True)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream)) == point
    plain = client.chat.completions.create(**how, extra_body={"speculate": False})
    assert json.loads(plain.choices[0].message.content or "") == point


def test_other_forms(client: openai.OpenAI, model: str) -> None:
    for wanted in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}):
        body = {"structured_outputs": wanted}
        answer = client.chat.completions.create(model=model, messages=HI, max_tokens=20, extra_body=body)
        assert answer.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="json"):
        client.chat.completions.create(
            model=model, messages=HI, extra_body={"structured_outputs": {"json": {"type": "nonsense"}}}
        )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_that_must_be_called(client: openai.OpenAI, model: str, choice: Any) -> None:
    how: Any = {"model": model, "messages": HI, "tools": [WEATHER], "tool_choice": choice, "seed": 2, "max_tokens": 200}
    how |= {"parallel_tool_calls": False}
    answer = client.chat.completions.create(**how).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "weather" and call.id
    asked = json.loads(call.function.arguments)
    assert asked["city"] in ("Oslo", "Rome") and 1 <= asked["days"] <= 9
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**how, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert name == "weather" and json.loads(arguments) == asked
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "cold"}
    again = client.chat.completions.create(
        model=model, messages=[*HI, answer.message, result], tools=[WEATHER], max_tokens=5
    )
    assert again.choices[0].message.role == "assistant"


def test_tools_that_the_model_chooses_to_call(client: openai.OpenAI, model: str) -> None:
    wanted = {"city": "Oslo", "days": 2}
    extra = saying(f"Let me see.\n{written_call(wanted)}")
    how: Any = {"model": model, "messages": HI, "tools": [WEATHER], "max_tokens": 200, "extra_body": extra}
    whole = client.chat.completions.create(**how).choices[0]
    with client.chat.completions.stream(**how) as stream:
        last = stream.get_final_completion().choices[0]
    for choice in (whole, last):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and json.loads(call.function.arguments) == wanted


def test_tools_and_a_schema_with_the_async_client(talking: Served, model: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=talking.url + "/v1", api_key="none") as client:
            form: Any = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}
            how: Any = {"model": model, "messages": HI, "seed": 1, "max_tokens": 200}
            forced = {**how, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
            json_whole, call_whole = await asyncio.gather(
                client.chat.completions.create(**how, response_format=form), client.chat.completions.create(**forced)
            )
            point = json.loads(json_whole.choices[0].message.content)
            assert point.keys() == {"x", "y"}
            (call,) = call_whole.choices[0].message.tool_calls
            asked = json.loads(call.function.arguments)
            assert asked["city"] in ("Oslo", "Rome") and call_whole.choices[0].finish_reason == "tool_calls"
            text = arguments = ""
            async for chunk in await client.chat.completions.create(**how, response_format=form, stream=True):
                text += chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**forced, stream=True):
                for part in chunk.choices[0].delta.tool_calls or ():
                    arguments += part.function.arguments or ""
            assert json.loads(text) == point and json.loads(arguments) == asked

    asyncio.run(main())


def test_a_prediction_is_billed(client: openai.OpenAI, model: str) -> None:
    how: Any = {"model": model, "messages": HI, "max_tokens": 60, "temperature": 0}
    plain = client.chat.completions.create(**how)
    text = plain.choices[0].message.content or ""
    predicted = client.chat.completions.create(**how, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
    details = predicted.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens or 0) > 0
    how |= {"prediction": {"type": "content", "content": "nonsense " * 20}}
    wrong = client.chat.completions.create(**how)
    assert wrong.choices[0].message.content == text and wrong.usage is not None
    details = wrong.usage.completion_tokens_details
    assert details is not None and (details.rejected_prediction_tokens or 0) > 0
    *_, last = client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
    assert last.usage is not None and last.usage.completion_tokens_details == details


def test_responses_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    how: Any = {"model": model, "input": "Hi", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**how)
    assert whole.status == "incomplete" and whole.output_text
    with client.responses.stream(**how) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    form: Any = {"format": {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}}
    answer = client.responses.create(model=model, input="Hi", text=form, max_output_tokens=100)
    assert json.loads(answer.output_text).keys() == {"x", "y"} and answer.status == "completed"
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    called = client.responses.create(
        model=model, input="Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    (item,) = called.output
    assert item.type == "function_call" and json.loads(item.arguments)["city"] in ("Oslo", "Rome")


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nonsense", messages=HI)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=HI, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model=model, messages="Hi")  # type: ignore[call-overload]
