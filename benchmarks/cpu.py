"""One run, one table: what the engine costs on this CPU, and what `suffix` gains. SmolLM2-135M, float32.

    python -m benchmarks.cpu [--threads 2] [--quick] [--json FILE]

Every figure is a ratio of two measurements taken alternately in this process. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.twin import transformers_twin
from benchmarks.workloads import KINDS, STORY
from slipstream import LLM, SamplingParams
from slipstream.attention import BlockAttention, tree_segment
from slipstream.cache import PagedCache
from slipstream.models.decoder import Decoder
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.layers.linear import PackedLinear
from slipstream.models.layers.rope import RopeTable
from slipstream.models.model import Model
from slipstream.models.native_rows import NativeRows, native_shape
from slipstream.native import kernels
from slipstream.native.call import program
from slipstream.native.compiler import Library
from slipstream.sequence import TARGET
from slipstream.tree import TokenTree


def alternate(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each action, measured in turns so that noise affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if number:  # the first round is warm-up
                times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in times.items()}


class Passes:
    """Single forward passes after a context, outside the engine."""

    def __init__(self, model: Model, longest: int) -> None:
        self.model = model
        self.cache = PagedCache(longest // 128 + 3)
        self.model.add_store(self.cache, TARGET)
        self.table = self.cache.open([])
        self.cache.reserve(self.table, longest + 100)
        self.tokens = [(37 * i) % 40_000 + 10 for i in range(longest)]
        for start in range(0, longest, 512):
            chunk = self.tokens[start : start + 512]
            self.model.forward(self.cache, TARGET, [tree_segment(self.table, start, chunk, None)])

    def over(self, rows: int, context: int) -> Callable[[], object]:
        """A pass over a chain of `rows` tokens after `context` tokens."""
        segment = tree_segment(self.table, context, self.tokens[:1], TokenTree.chain(self.tokens[0], range(1, rows)))
        return lambda: self.model.forward(self.cache, TARGET, [segment])

    def attention(self, context: int) -> Callable[[], object]:
        """The attention of a pass over a single token."""
        config = self.model.config
        segment = tree_segment(self.table, context, self.tokens[:1], TokenTree(self.tokens[0]))
        qkv = torch.randn(1, (config.heads + 2 * config.kv_heads) * config.head_dim)
        layers, shape, rope = self.cache.layers(TARGET), native_shape(config), RopeTable(config, "cpu")
        native = None if shape is None else NativeRows([segment], shape, rope)
        attention = BlockAttention([segment], config.heads, config.kv_heads, config.head_dim, "cpu")

        def run() -> None:
            for layer in layers:
                if native is None:
                    attention(qkv, layer, None)
                else:
                    native.mix(qkv, layer)

        return run


def measure_passes(llm: LLM, rounds: int) -> dict[str, float]:
    """Rows per pass, overhead, growth with context."""
    passes = Passes(llm.model, 8000)
    with torch.inference_mode():
        times = alternate({f"rows {rows}": passes.over(rows, 200) for rows in (1, 8, 16, 64)}, rounds)
        result = {f"pass over {rows} rows / 1 row": times[f"rows {rows}"] / times["rows 1"] for rows in (8, 16, 64)}
        # Long contexts: the difference between a step at 200 tokens and at 1,000 is smaller than the machine's noise.
        for context in (4000, 8000):
            times = alternate(
                {
                    "short": passes.over(1, 200),
                    "long": passes.over(1, context),
                    "short attention": passes.attention(200),
                    "long attention": passes.attention(context),
                },
                rounds,
            )
            growth, alone = times["long"] - times["short"], times["long attention"] - times["short attention"]
            result[f"growth of a pass to context {context} / growth of attention alone"] = growth / alone
    return result


def share_of_the_floor(llm: LLM, rounds: int) -> float:
    """The time to read and sum as many weights, relative to a pass over one row."""
    passes = Passes(llm.model, 200)
    weights = torch.ones(int(llm.model.config.weights_read(1)))
    with torch.inference_mode():
        times = alternate({"read": weights.sum, "pass": passes.over(1, 64)}, rounds)
    return times["read"] / times["pass"]


def share_of_the_rest(llm: LLM, rounds: int) -> float:
    """The part of a plain step that is neither GEMM nor attention, timed inside real steps: median over answers.

    A program of our own kernels has both, and small steps between them: these are timed separately and subtracted.
    """
    llm.use(None)
    small = time_of_small_steps(llm.model)
    inside = 0.0

    def timed(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: Any) -> torch.Tensor:
            nonlocal inside
            began = time.perf_counter()
            result = call(*arguments)
            inside += time.perf_counter() - began
            return result

        return run

    calls = [(PackedLinear, "__call__"), (BlockAttention, "__call__"), (Library, "run")]
    originals = [getattr(kind, name) for kind, name in calls]
    how, shares = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True), []
    try:
        for (kind, name), original in zip(calls, originals, strict=True):
            setattr(kind, name, timed(original))
        for _ in range(rounds):
            stream = llm.stream([{"role": "user", "content": STORY[1]}], how)
            next(stream)  # prefill
            inside, began, steps = 0.0, time.perf_counter(), 0
            for _ in stream:
                steps += 1
            shares.append(1 - (inside - steps * small) / (time.perf_counter() - began))
    finally:
        for (kind, name), original in zip(calls, originals, strict=True):
            setattr(kind, name, original)
    return statistics.median(shares)


def time_of_small_steps(model: Model) -> float:
    """Seconds that a pass over one row takes for norms, rotations and gates, if they are steps of a program."""
    layers = model.native if isinstance(model, Decoder) else None
    if layers is None:
        return 0.0
    passes = Passes(model, 256)
    segment = tree_segment(passes.table, 200, passes.tokens[:1], TokenTree(passes.tokens[0]))
    rows = layers.rows([segment], RopeTable(model.config, "cpu"))  # the kernels read it while they run
    layers.read(rows, passes.cache.layers(TARGET))
    functions = kernels.layers(layers.shape)
    small = {functions[name] for name in ("norm", "rotate")}
    words = program([step for steps in layers.steps for step in steps if step[0] in small])
    return alternate({"small": lambda: functions.run(words.ctypes.data)}, 50)["small"] / 1000


def decode_speed(llm: LLM, prompt: str, tokens: int) -> tuple[float, list[int], float]:
    output = llm.chat([{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=tokens))[0]
    stats = output.stats
    return stats.decode_ms / max(1, stats.decoded), output.token_ids, stats.tokens_per_step


def measure_transformers(llm: LLM, rounds: int) -> float:
    """Our plain decoding over transformers', tokens a second, same weights and prompt, decode time only."""
    twin = transformers_twin(open_checkpoint(DEFAULT_MODEL))
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": STORY[0]}])
    batch = torch.tensor([ids])

    def theirs(count: int) -> Callable[[], object]:
        return lambda: twin.generate(batch, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    def ours(count: int) -> Callable[[], object]:
        how = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return lambda: llm.generate([ids], how)

    with torch.no_grad():
        times = alternate({"t1": theirs(1), "t65": theirs(65), "o1": ours(1), "o65": ours(65)}, rounds)
    return (times["t65"] - times["t1"]) / (times["o65"] - times["o1"])


def measure_suffix(llm: LLM, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Speed-up of `suffix` over `none` per kind of prompt: total decode time over total decode time, per token."""
    results = {}
    for kind, prompts in KINDS.items():
        plain_ms = fast_ms = steps = 0.0
        worst, same = float("inf"), True
        for prompt in prompts:
            plain, fast = [], []
            for _ in range(rounds):
                llm.use(None)
                per_token, baseline, _ = decode_speed(llm, prompt, tokens)
                plain.append(per_token)
                llm.use("suffix")
                per_token, drafted, rate = decode_speed(llm, prompt, tokens)
                fast.append(per_token)
                same = same and drafted == baseline
            ratio = statistics.median(plain) / statistics.median(fast)
            worst = min(worst, ratio)
            plain_ms += statistics.median(plain) * len(baseline)
            fast_ms += statistics.median(fast) * len(baseline)
            steps += rate / len(prompts)
        results[kind] = {
            "speed-up": plain_ms / fast_ms,
            "worst prompt": worst,
            "tokens per step": steps,
            "identical": float(same),
        }
    return results


def memory_per_token(llm: LLM) -> float:
    """Bytes of resident memory per token of context, relative to its K/V."""
    config = llm.model.config
    cache = PagedCache(400)
    llm.model.add_store(cache, TARGET)

    def resident() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        return 0

    table = cache.open([])
    tokens = [(31 * i) % 40_000 for i in range(40_960)]
    cache.reserve(table, len(tokens))
    with torch.inference_mode():
        llm.model.forward(cache, TARGET, [tree_segment(table, 0, tokens[:512], None)])
        before = resident()
        cache.stores[TARGET][:, :, table.pages[4:]] = 1.0
        grown = resident() - before
    return grown / (len(tokens) - 512) / config.kv_bytes_per_token(4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(speculate=None)
    rounds = 3 if arguments.quick else 9
    figures: dict[str, float] = measure_passes(llm, 3 * rounds)
    figures["reading the weights of a pass / pass over 1 row"] = share_of_the_floor(llm, 3 * rounds)
    figures["neither products nor attention, share of a plain step"] = share_of_the_rest(llm, rounds)
    figures["plain decoding / transformers, tokens a second"] = measure_transformers(llm, rounds)
    for kind, values in measure_suffix(llm, 2 if arguments.quick else 3, 96 if arguments.quick else 160).items():
        figures |= {f"suffix on {kind}: {name}": value for name, value in values.items()}
    figures["memory per token of context / K/V"] = memory_per_token(llm)
    print(f"SmolLM2-135M float32, {arguments.threads} threads, torch {torch.__version__}, exact: {llm.exact}")
    for name, value in figures.items():
        print(f"{value:8.2f}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
