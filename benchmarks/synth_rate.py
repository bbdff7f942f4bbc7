"""How fast the engine writes training data: plain decoding of a very large batch.

    python -m benchmarks.synth_rate                       # on a GPU, 1,024 sequences at once
    python -m benchmarks.synth_rate --batch 8 --requests 16 --device cpu    # anywhere, to see that it runs

Prompts are parts of the demo's prompts, of mixed length, half of them answered greedily and half at a temperature of
0.7. One warm-up round compiles kernels and captures graphs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

import torch

from slipstream import LLM, SamplingParams
from slipstream.commands.demo_prompts import PROMPTS
from slipstream.engine.burst import Burst, Guard
from slipstream.engine.device import DeviceRunner
from slipstream.engine.launched import Launched
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.types import Output

Asked = tuple[list[int], SamplingParams]


def requests(llm: LLM, count: int, tokens: int, ignore_eos: bool, seed: int) -> Iterator[Asked]:
    """Chat prompts cut to parts of 8 tokens and more, all different."""
    assert llm.tokenizer is not None
    chats = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS]
    chooser = random.Random(seed)
    for number in range(count):
        chat = chats[number % len(chats)]
        ids = [*chat[: chooser.randrange(8, len(chat) + 1)], chooser.randrange(200, 20_000)]
        temperature = 0.0 if number % 2 else 0.7
        yield ids, SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=ignore_eos)


class BurstClock:
    """Tokens and time of bursts: in total, and until the device was done."""

    def __init__(self, burst: Burst) -> None:
        self.tokens, self.seconds, self.device_seconds = 0, 0.0, 0.0
        self._read, self._commit = burst.read, burst.commit
        self._done = 0.0
        burst.go_ahead = lambda launched: None  # type: ignore[method-assign]  # a burst's time is to be all of it
        burst.read, burst.commit = self._timed_read, self._timed_commit  # type: ignore[method-assign]

    def _timed_read(self, launched: Launched, first: int, stop: int) -> None:
        self._read(launched, first, stop)
        self._done = time.perf_counter()

    def _timed_commit(self, launched: Launched, guard: Guard) -> None:
        self._commit(launched, guard)
        self.tokens += sum(item.new_tokens for item in launched.progress)
        self.seconds += time.perf_counter() - launched.began
        self.device_seconds += self._done - launched.began


def run(llm: LLM, asked: list[Asked], batch: int) -> tuple[list[Output], float]:
    """All answers, and the seconds they took."""
    began = time.perf_counter()
    outputs = [output for _, output in llm.answers(asked, batch)]
    return outputs, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-rows", type=int, default=8192, help="rows of prompts in one step")
    parser.add_argument("--ignore-eos", action="store_true", help="every answer has all its tokens")
    parser.add_argument("--no-burst", action="store_true", help="single steps, for comparison")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        speculate=None,
        device=arguments.device,
        max_model_len=1024,
        max_num_seqs=arguments.batch,
        cache_tokens=arguments.batch * 640,
    )
    llm.engine.scheduler.prompt_rows = arguments.prompt_rows
    if arguments.no_burst:
        DeviceRunner.possible = staticmethod(lambda state: False)  # type: ignore[method-assign]
        llm.engine.set_runners()
    burst = llm.burst

    def asked(count: int, seed: int) -> list[Asked]:
        return list(requests(llm, count, arguments.tokens, arguments.ignore_eos, seed))

    _, seconds = run(llm, asked(arguments.batch, 1), arguments.batch)
    print(f"{llm.model.name} {llm.model.dtype} on {llm.model.device}, {arguments.batch} sequences at once")
    captured = 0.0 if burst is None else burst.graphs.capture_ms / 1000
    print(f"first round {seconds:.1f} s, of which capturing graphs {captured:.1f} s")
    clock = None if burst is None else BurstClock(burst)
    outputs, seconds = run(llm, asked(arguments.requests, 2), arguments.batch)
    emitted = sum(output.stats.emitted for output in outputs)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    print(f"{len(outputs)} answers, {emitted:,} tokens, {prompts:,} tokens of prompts, {seconds:.2f} s")
    print(f"{emitted / seconds:10,.0f} tokens a second overall")
    if clock is not None and clock.tokens:
        print(f"{clock.tokens / clock.seconds:10,.0f} tokens a second in bursts ({clock.seconds:.2f} s)")
        share = clock.device_seconds / clock.seconds
        print(f"{clock.tokens / clock.device_seconds:10,.0f} tokens a second on the device ({share:.0%} of the bursts)")
    if llm.model.device.startswith("cuda"):
        print(f"{torch.cuda.max_memory_allocated() / 2**30:10.1f} GiB of GPU memory at the peak")


if __name__ == "__main__":
    main()
