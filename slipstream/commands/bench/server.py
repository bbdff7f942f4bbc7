"""The part of `slipstream bench` that measures a server from outside."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from functools import partial
from typing import Any

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.results import FORMAT, VERSION, provenance
from slipstream.bench.schedule import stratified
from slipstream.bench.serve.client import Address, Client
from slipstream.bench.serve.events import read_answer, read_json
from slipstream.bench.serve.load import Load, Wire, offer
from slipstream.bench.serve.metrics import point, service_levels
from slipstream.bench.session import cost_per_million
from slipstream.commands.bench.options import Limits, ServerLoad, numbers
from slipstream.commands.shared.progress import TimeBar
from slipstream.errors import OptionError, ServerFailed, unknown_choice
from slipstream.models.formats.builtin import DEFAULT_MODEL


def bench_server(
    server: ServerLoad, prompts: list[BenchPrompt], limits: Limits, given: dict[str, Any]
) -> dict[str, Any]:
    """Measure a server under each load; returns results with one point per load."""
    address = Address.parse(server.url or "")
    levels = service_levels(server.goodput)
    rates = numbers("rate", server.rate, float, 1e-6)
    loads = [Load(rate=rate) for rate in rates] or [
        Load(concurrency) for concurrency in numbers("concurrency", server.concurrency, int, 1)
    ]
    client = Client(address, _headers(server.header))
    order = [prompts[index] for index in stratified(prompts)]

    async def measure() -> tuple[str, list[dict[str, Any]]]:
        try:
            return await points_of(await _model(client, str(given["model"])))
        finally:
            await client.close()

    async def points_of(model: str) -> tuple[str, list[dict[str, Any]]]:
        wire = Wire(client, model, limits.tokens)
        first = read_answer((await wire.ask(order[0]))[0][1])  # warms up, and finds out whether anything works
        if not first.success:
            raise ServerFailed(f"{server.url} does not answer: {first.error}")
        points = []
        for number, load in enumerate(loads):
            seconds = max(1.0, (limits.deadline - time.monotonic()) / (len(loads) - number))
            asked = list(itertools.islice(itertools.cycle(order), server.requests or len(order)))
            with TimeBar(str(load), seconds) as bar:
                offered = await offer(wire, asked, load, seconds, partial(_tell, bar, str(load)))
            points.append(point(offered, model, levels))
        return model, points

    model, points = asyncio.run(measure())
    if limits.price is not None:
        for found in points:
            found["cost_per_million_tokens"] = cost_per_million(limits.price, found["output_throughput"])
    header = {"format": FORMAT, "version": VERSION, **provenance(given), "url": server.url, "model": {"name": model}}
    return {**header, "goodput": levels, "points": points}


def _tell(bar: TimeBar, load: str, answers: int) -> None:
    bar.update(f"{answers} answers", load)


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    found = {"Authorization": f"Bearer {key}"} if key else {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip() or "\n" in text or "\r" in text:
            raise OptionError(f"--header {text!r} is not a header", hint="as in --header 'Authorization: Bearer x'")
        found[name.strip()] = value.strip()
    return found


async def _model(client: Client, asked: str) -> str:
    """The model to name in requests: the asked one, or the first that the server has."""
    response = await client.get("/v1/models")
    if response.error is not None:
        raise ServerFailed(response.error)
    listed = read_json(response)
    entries = listed.get("data") if isinstance(listed, dict) else None
    names = [str(entry["id"]) for entry in entries or () if isinstance(entry, dict) and "id" in entry]
    if asked in names or not names:
        return asked
    if asked != DEFAULT_MODEL:
        raise unknown_choice("model of the server", asked, names)
    return names[0]
