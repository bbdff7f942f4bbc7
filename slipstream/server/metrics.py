"""Prometheus metrics: what clients saw, and what the engine did.

Speculation has vLLM's names beside ours, so that its dashboards and `vllm bench serve` show acceptance unmodified.
There a draft counts as many tokens as its tree is deep; nodes have a metric of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slipstream.engine.status import EngineStatus
from slipstream.policy.tally import ACCEPTED, OFFERED
from slipstream.types import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        self._registry.register(self._engine)

        def histogram(name: str, help: str, buckets: Iterable[float] = _SECONDS) -> Any:
            made = Histogram(name, help, ["model_name"], registry=self._registry, buckets=tuple(buckets))
            return made.labels(model)

        self.ttft = histogram("slipstream:time_to_first_token_seconds", "From arrival to the first token.")
        self.tpot = histogram("slipstream:time_per_output_token_seconds", "(last - first token) / (tokens - 1).")
        self.itl = histogram("slipstream:inter_token_latency_seconds", "Gaps between tokens; those of a step are 0.")
        self.chunk_gap = histogram("slipstream:inter_chunk_latency_seconds", "Gaps between chunks of a stream.")
        self.latency = histogram("slipstream:e2e_request_latency_seconds", "From arrival to the last token.")
        self.prompt_length = histogram("slipstream:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.length = histogram("slipstream:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._finished = Counter(
            "slipstream:requests", "Choices by how they ended.", ["model_name", "reason"], registry=self._registry
        )
        self._responses = Counter(
            "slipstream:http_responses", "Responses by route and status.", ["route", "status"], registry=self._registry
        )
        self._active = Gauge("slipstream:http_requests_active", "Requests being answered.", registry=self._registry)

    def ended(self, completion: Completion, prompt_tokens: int) -> None:
        """Count a choice that has ended by itself."""
        self._finished.labels(self._model, completion.finish_reason or "unknown").inc()
        self.prompt_length.observe(prompt_tokens)
        self.length.observe(len(completion.token_ids))
        metrics = completion.metrics
        if metrics is None or metrics.first_token_time is None or metrics.last_token_time is None:
            return
        self.ttft.observe(metrics.first_token_time - metrics.arrival_time)
        self.latency.observe(metrics.last_token_time - metrics.arrival_time)
        if len(completion.token_ids) > 1:
            decoding = metrics.last_token_time - metrics.first_token_time
            self.tpot.observe(decoding / (len(completion.token_ids) - 1))

    def interrupted(self, reason: str) -> None:
        """Count a request that ended otherwise: the client left, or an error."""
        self._finished.labels(self._model, reason).inc()

    def chunk(self, gap: float, tokens: int) -> None:
        """Count a chunk of a stream and its tokens, which arrived together."""
        self.chunk_gap.observe(gap)
        self.itl.observe(gap)
        for _ in range(tokens - 1):
            self.itl.observe(0.0)

    def responded(self, route: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(route, str(status)).inc()

    def render(self, status: EngineStatus | None, active: int) -> bytes:
        """The text of `/metrics`; `status` is None while the engine is being loaded."""
        self._engine.status = status
        self._active.set(active)
        return generate_latest(self._registry)


class _EngineCollector:
    """The engine's own totals as metrics."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.status: EngineStatus | None = None

    def collect(self) -> Iterator[Metric]:
        """All metrics of the last status."""
        status = self.status
        if status is None:
            return
        stats = status.stats
        yield self._gauge("num_requests_running", "Sequences that run.", status.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", status.waiting)
        used = status.pages_used / status.pages if status.pages else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it.", used)
        yield self._counter("prompt_tokens", "Tokens of prompts that were started.", status.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Of those, found in the KV cache.", status.cached_tokens)
        yield self._counter("generation_tokens", "Tokens that were generated.", stats.emitted)
        yield self._counter("num_preemptions", "Sequences that made room for others.", status.preemptions)
        yield self._counter("engine_restarts", "How often the engine failed and was made anew.", status.restarts)
        yield self._counter("steps", "Target passes that gave a sequence tokens, per sequence.", stats.steps)
        yield self._counter("draft_seconds", "Time spent drafting.", stats.draft_ms / 1000)
        yield self._counter("verify_seconds", "Time spent in target passes and verification.", stats.verify_ms / 1000)
        yield self._batches(status)
        yield from self._speculation(status)

    def _speculation(self, status: EngineStatus) -> Iterator[Metric]:
        stats = status.stats
        for prefix in ("slipstream:", "vllm:"):
            name = f"{prefix}spec_decode_num"
            yield self._family(f"{name}_drafts", "Steps in which a sequence had a draft.", stats.drafting_steps)
            levels = sum(stats.offered_by_depth)
            yield self._family(f"{name}_draft_tokens", "Levels of drafted trees: tokens of a chain.", levels)
            yield self._family(f"{name}_accepted_tokens", "Drafted tokens that were accepted.", stats.accepted)
            by_depth = CounterMetricFamily(
                f"{name}_accepted_tokens_per_pos", "The same by depth.", labels=["model_name", "position"]
            )
            for depth, count in enumerate(stats.accepted_by_depth):
                by_depth.add_metric([self._model, str(depth)], count)
            yield by_depth
        yield self._counter("spec_decode_num_draft_nodes", "Nodes of drafted trees.", stats.drafted)
        faults = self._labelled("draft_faults", "Drafts that failed.", ["drafter"])
        for drafter, count in status.faults.items():
            faults.add_metric([self._model, drafter], count)
        yield faults
        decisions = self._labelled("policy_decisions", "Steps by what the policy chose.", ["drafters", "probe"])
        for (drafters, probe), count in status.decisions.items():
            decisions.add_metric([self._model, drafters or "none", str(probe).lower()], count)
        yield decisions
        offered = self._labelled("draft_nodes_offered", "Nodes below an accepted parent.", ["drafter", "depth"])
        accepted = self._labelled("draft_nodes_accepted", "Of those, accepted.", ["drafter", "depth"])
        for drafter, counts in status.tally.counts.items():
            for depth, bins in enumerate(counts, 1):
                offered.add_metric([self._model, drafter, str(depth)], float(bins[:, OFFERED].sum()))
                accepted.add_metric([self._model, drafter, str(depth)], float(bins[:, ACCEPTED].sum()))
        yield offered
        yield accepted

    def _batches(self, status: EngineStatus) -> Metric:
        sizes = sorted(status.batches.items())
        buckets = [(str(most), float(sum(n for size, n in sizes if size <= most))) for most in _BATCHES]
        count = float(sum(n for _, n in sizes))
        family = HistogramMetricFamily("slipstream:batch_size", "Sequences that run, by step.", labels=["model_name"])
        family.add_metric([self._model], [*buckets, ("+Inf", count)], float(sum(size * n for size, n in sizes)))
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        return self._family(f"slipstream:{name}", help, value)

    def _family(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _labelled(self, name: str, help: str, labels: list[str]) -> CounterMetricFamily:
        return CounterMetricFamily(f"slipstream:{name}", help, labels=["model_name", *labels])

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"slipstream:{name}", help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
