"""AsyncLLM: streams that are awaited, of the same engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream import AsyncLLM, SamplingParams
from slipstream.errors import DeadlineExceeded, EngineClosed, OptionError, QueueFull
from tests.tiny import plain_answers, tiny_directory

PROMPTS = [[1 + i, 2 + i, 3, 4, 5 + i] * (1 + i % 7) for i in range(12)]
HOW = SamplingParams(temperature=0.7, seed=5, max_tokens=50, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(tiny_directory(characters=True), speculate="suffix", max_num_seqs=16, max_queue=100) as made:
        yield made


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing is under way, and check that nothing is kept."""
    until = time.perf_counter() + 10
    while llm.under_way:
        assert time.perf_counter() < until, "a request runs on"
        await asyncio.sleep(0.005)
    status = await llm.status()
    assert (status.running, status.waiting, status.pages_used) == (0, 0, 0)


async def read(llm: AsyncLLM, prompt: list[int], how: SamplingParams = HOW) -> list[int]:
    return [token async for delta in llm.generate(prompt, how) for token in delta.token_ids]


def test_many_streams_have_the_texts_of_llm_and_some_are_closed(llm: AsyncLLM) -> None:
    texts = [output.token_ids for output in plain_answers(PROMPTS, HOW, characters=True)]

    async def client(number: int) -> None:
        which, leaves = number % len(PROMPTS), number % 3 == 0
        said: list[int] = []
        async with llm.generate(PROMPTS[which], HOW) as stream:
            async for delta in stream:
                said += delta.token_ids
                if leaves and len(said) > number % 40:
                    break
        assert said == (texts[which][: len(said)] if leaves else texts[which])

    async def main() -> None:
        await asyncio.gather(*(client(number) for number in range(100)))
        await idle(llm)

    asyncio.run(main())


def test_event_loops_of_several_threads_share_the_engine(llm: AsyncLLM) -> None:
    texts = [output.token_ids for output in plain_answers(PROMPTS, HOW, characters=True)]

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(*(read(llm, prompt) for prompt in PROMPTS)))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: asyncio.run(main()), range(4))) == [texts] * 4


def test_a_stream_that_is_dropped_or_cancelled_ends_its_request(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        del stream
        gc.collect()
        await idle(llm)
        task = asyncio.create_task(read(llm, PROMPTS[0], LONG))
        while not (await llm.status()).running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await idle(llm)

    asyncio.run(main())


def test_an_event_loop_that_goes_away_ends_its_requests(llm: AsyncLLM) -> None:
    kept = []

    async def main() -> None:
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        kept.append(stream)

    asyncio.run(main())
    asyncio.run(idle(llm))


def test_a_reader_that_does_not_read_blocks_no_other(llm: AsyncLLM) -> None:
    async def main() -> None:
        slow = llm.generate(PROMPTS[1], LONG)
        assert await asyncio.wait_for(read(llm, PROMPTS[0]), 10)
        while llm.under_way:
            await asyncio.sleep(0.01)
        deltas = [delta async for delta in slow]
        assert len(deltas) == 1, "all that was not read is one delta"
        assert deltas[0].token_ids == plain_answers([PROMPTS[1]], LONG, characters=True)[0].token_ids

    asyncio.run(main())


def test_an_event_loop_that_is_held_up_misses_nothing(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate(PROMPTS[1], LONG)
        await anext(stream)
        time.sleep(0.2)
        assert len([t async for d in stream for t in d.token_ids]) > 300

    asyncio.run(main())


def test_the_output_alone_and_after_deltas(llm: AsyncLLM) -> None:
    async def main() -> None:
        request = llm.request(PROMPTS[2], HOW)
        output = await llm.submit(request, streams=False).output()
        (wanted,) = plain_answers([PROMPTS[2]], HOW, characters=True)
        assert output.text == wanted.text and output.outputs[0].stats.emitted == 50
        stream = llm.generate(PROMPTS[2], HOW)
        first = await anext(stream)
        output = await stream.output()
        assert output.token_ids[: len(first.token_ids)] == first.token_ids and output.text == wanted.text
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_chats_go_by_the_template(llm: AsyncLLM) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "abc"}]
        output = await llm.chat(messages, HOW).output()
        assert output.prompt_token_ids == llm.get_tokenizer().encode("abc|")
        with pytest.raises(OptionError, match="2 conversations"):
            llm.chat([messages, messages], HOW)  # type: ignore[list-item]

    asyncio.run(main())


def test_refusals_come_before_the_first_delta(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(OptionError, match="no token 97"):
            llm.generate([97], HOW)
        with pytest.raises(OptionError, match="priority"):
            llm.generate([1], HOW, priority=0.5)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="loaded drafter"):
            llm.generate([1], SamplingParams(speculate="lookahead"))
        streams = [llm.generate([1, 2], LONG) for _ in range(116)]
        with pytest.raises(QueueFull):
            llm.generate([1, 2], LONG)
        del streams
        gc.collect()
        await idle(llm)

    asyncio.run(main())


def test_a_late_request_ends_with_an_error(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await llm.generate([1, 2], LONG, timeout=0.0).output()
        await idle(llm)

    asyncio.run(main())


def test_closing_ends_streams_and_the_thread() -> None:
    llm = AsyncLLM(tiny_directory(characters=True), speculate=None)

    async def main() -> None:
        stream = llm.generate([1, 2], LONG)
        await anext(stream)
        threading.Thread(target=llm.close).start()
        with pytest.raises(EngineClosed):
            await stream.output()
        with pytest.raises(EngineClosed):
            llm.generate([1, 2], LONG)

    asyncio.run(main())
    assert not llm.alive
