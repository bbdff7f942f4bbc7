"""Figures of a server, with the names and definitions of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from slipstream.bench.serve.events import Served
from slipstream.bench.serve.load import Offered
from slipstream.errors import OptionError

LEVELS = ("ttft", "tpot", "e2el")
_PERCENTILES = (50, 90, 95, 99)

Json = dict[str, Any]


def service_levels(given: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50`, in milliseconds, as numbers."""
    found: dict[str, float] = {}
    for pair in (pair for text in given for pair in text.replace(",", " ").split()):
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in LEVELS or not limit >= 0:
            raise OptionError(
                f"--goodput {pair!r} is not a service level", hint=f"as in ttft:500; valid: {', '.join(LEVELS)}"
            )
        found[name] = limit
    return found


def point(offered: Offered, model: str, levels: Mapping[str, float]) -> Json:
    """The figures of one load."""
    good = [answer for answer in offered.answers if answer.success]
    seconds = max(offered.duration, 1e-9)
    outputs = sum(answer.output_len for answer in good)
    inputs = sum(answer.prompt_len for answer in good)
    peaks = _peaks(good)
    latencies: dict[str, list[float]] = {
        "ttft": [answer.ttft for answer in good],
        "tpot": [tpot for answer in good if (tpot := _tpot(answer)) is not None],
        "itl": [gap for answer in good for gap in answer.itl],
        "e2el": [answer.latency for answer in good],
    }
    found: Json = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": str(offered.load),
        "load": str(offered.load),
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(offered.answers),
        "request_rate": offered.load.rate if offered.load.rate is not None else "inf",
        "burstiness": 1.0,
        "max_concurrency": offered.load.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(offered.answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_meets(answer, levels) for answer in good) / seconds if levels else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peaks[0],
        "max_concurrent_requests": peaks[1],
        "client_cpu_percent": 100 * offered.cpu / seconds,
    }
    for name, values in latencies.items():
        found |= _statistics(name, values)
    found |= {
        "input_lens": [answer.prompt_len for answer in offered.answers],
        "output_lens": [answer.output_len for answer in offered.answers],
        "ttfts": [answer.ttft for answer in offered.answers],
        "itls": [answer.itl for answer in offered.answers],
        "latencies": [answer.latency for answer in offered.answers],
        "start_times": [answer.started for answer in offered.answers],
        "errors": [answer.error for answer in offered.answers],
    }
    return found


def _statistics(name: str, seconds: Sequence[float]) -> Json:
    """Mean, median, standard deviation and percentiles in milliseconds; zeros without values."""
    ms = 1000 * np.array(seconds or [0.0])
    found = {f"mean_{name}_ms": ms.mean(), f"median_{name}_ms": np.median(ms), f"std_{name}_ms": ms.std()}
    found |= {f"p{p}_{name}_ms": np.percentile(ms, p) for p in _PERCENTILES}
    return {key: float(value) for key, value in found.items()}


def _tpot(answer: Served) -> float | None:
    return (answer.latency - answer.ttft) / (answer.output_len - 1) if answer.output_len > 1 else None


def _meets(answer: Served, levels: Mapping[str, float]) -> bool:
    """Whether an answer is within all service levels; an answer of one token has a TPOT of 0."""
    seconds = {"ttft": answer.ttft, "tpot": _tpot(answer) or 0.0, "e2el": answer.latency}
    return all(1000 * seconds[name] <= limit for name, limit in levels.items())


def _peaks(answers: Sequence[Served]) -> tuple[float, int]:
    """The most chunks that arrived in one second, and the most requests that were under way at once."""
    if not answers:
        return 0.0, 0
    began = min(answer.started for answer in answers)
    length = int(max(answer.started + answer.latency for answer in answers) - began) + 2
    chunks = np.zeros(length)
    for answer in answers:
        times = answer.started - began + answer.ttft + np.cumsum([0.0, *answer.itl])
        np.add.at(chunks, times.astype(int), 1)
    ends = [(answer.started + answer.latency, -1) for answer in answers]  # before what starts at the same time
    changes = [change for _, change in sorted([*((answer.started, 1) for answer in answers), *ends])]
    return float(chunks.max()), int(np.cumsum(changes).max())
