"""A drafter that learns from a server's own traffic: capture requests of one kind, train on them, measure the gain.

    python -m benchmarks.learning capture captured/ --requests 2000          # by a server; --here: without one
    slipstream train eagle3 --init eagle3 --data captured/ -o learnt/ --minutes 5
    python -m benchmarks.learning measure eagle3 eagle3:checkpoint=learnt/

`capture` starts `slipstream serve --capture` and asks it, 16 requests at a time, for greedy answers; `--here` asks the
engine of this process, for machines without the server's packages. The requests are those of one application, which
turns letters to a shop into JSON; those that `measure` asks are held out: none of them was captured. `measure` gives
tokens per step with a tree of 15 nodes at most, on all held-out requests. Without a GPU weights are in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.intervals import Bootstrap, Interval
from slipstream.drafters.retrieval.corpus import fingerprint
from slipstream.train.captures import CaptureStore, open_captures, record_of

_MOST = 2**30  # bytes
_HELD_OUT, _SEEN = 1, 2  # seeds
_NODES = 15


_NAMES = "Ada Berg,Ben Okafor,Chiara Rossi,Dmitri Volkov,Elena Cruz,Farid Haddad,Grace Lin,Hugo Meyer,Ines Duarte"
_THINGS = "oak table,desk lamp,wool rug,garden chair,bookshelf,kitchen clock,linen curtain,coat rack,floor mirror"
_PLACES = "Lisbon,Oslo,Turin,Ghent,Graz,Cork,Lyon,Bergen,Porto,Basel"
_WISHES = "a refund,a replacement,an invoice,a call back,a later delivery date"
_TROUBLES = "arrived with a scratch,is too large for the room,came in the wrong colour,has a loose leg,never came"
_LETTERS = (
    "Hello, my name is {name} and I live in {place}. Order {order}: the {thing} {trouble}. I paid {price} euros for "
    "{count} of them and would like {wish}.",
    "Dear shop, on {day} May I bought {count} times the {thing}, order {order}, {price} euros in all. It {trouble}. "
    "Please arrange {wish}. Regards, {name}, {place}",
    "{name} here, from {place}. I need {wish} for order {order}, because the {thing} ({count} pieces, {price} euros) "
    "{trouble}.",
)
_TASK = """Turn the letter into JSON, with these fields and no others. An example:

Letter: I am Ivo Lang from Bonn. I paid 35 euros for 2 of your towels, order 10482, and one has a hole. Please \
send me a replacement.
JSON: {"name": "Ivo Lang", "city": "Bonn", "order": 10482, "item": "towel", "quantity": 2, "price_eur": 35, \
"problem": "has a hole", "request": "a replacement"}

Letter: """


def made(seed: int) -> Iterator[str]:
    """Requests of the application, none twice."""
    draw, known = random.Random(seed), set[str]()
    while True:
        words = {
            name: draw.choice(values.split(","))
            for name, values in (
                ("name", _NAMES), ("thing", _THINGS), ("place", _PLACES), ("wish", _WISHES), ("trouble", _TROUBLES)
            )
        }  # fmt: skip
        numbers = {"order": draw.randint(10_000, 99_999), "count": draw.randint(1, 9), "price": draw.randint(20, 900)}
        text = draw.choice(_LETTERS).format(**words, **numbers, day=draw.randint(1, 31))
        if text not in known:
            known.add(text)
            yield f"{_TASK}{text}\nJSON:"


def held_out(given: argparse.Namespace) -> list[str]:
    return list(islice(made(_HELD_OUT), given.held_out))


def asked(given: argparse.Namespace) -> Iterator[str]:
    """What is captured."""
    avoided = set(held_out(given))
    return islice((text for text in made(_SEEN) if text not in avoided), given.requests)


def opened(**drafters: Any) -> LLM:
    return LLM(quantize="none" if torch.cuda.is_available() else "int8", **drafters)


def capture_here(given: argparse.Namespace) -> None:
    """As the server does, without one."""
    place = Path(given.folder)
    how = SamplingParams(temperature=0.0, max_tokens=given.tokens, seed=0)
    texts, began, count = list(asked(given)), time.monotonic(), 0
    with opened(speculate=None) as llm, open_captures(place):
        model, vocabulary = llm.model, llm.model.config.vocab_size
        tokenizer = fingerprint(llm.get_tokenizer(), vocabulary)
        names = {"model": model.name, "fingerprint": model.fingerprint, "tokenizer": tokenizer}
        store = CaptureStore(place, _MOST, time.monotonic, vocab_size=vocabulary, **names)
        for output in llm.chat([[{"role": "user", "content": text}] for text in texts], how):
            store.add(record_of(output.prompt_token_ids, 0.0, output.outputs[0]))
            count += len(output.outputs[0].token_ids)
        store.close()
    told(len(texts), count, time.monotonic() - began)


def told(requests: int, tokens: int, seconds: float) -> None:
    print(f"{requests} requests, {tokens:,} tokens in {seconds:.0f} s ({tokens / seconds:.0f} tok/s)")


def capture(given: argparse.Namespace) -> None:
    if given.here:
        capture_here(given)
        return
    command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", "--quantize", "int8", "--no-access-log"]
    server = subprocess.Popen([*command, "--capture", given.folder], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
        while not _alive(url):
            time.sleep(0.2)
        began = time.monotonic()

        def ask(text: str) -> int:
            if time.monotonic() - began > given.seconds:
                return 0
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": given.tokens, "temperature": 0}
            head = {"content-type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
            with urllib.request.urlopen(request, timeout=300) as answer:
                return int(json.load(answer)["usage"]["completion_tokens"])

        with ThreadPoolExecutor(16) as pool:
            tokens = [count for count in pool.map(ask, asked(given)) if count]
        told(len(tokens), sum(tokens), time.monotonic() - began)
    finally:
        server.terminate()
        server.wait(60)


def _alive(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def measure(given: argparse.Namespace) -> None:
    texts, drafters = held_out(given), given.drafters
    sized = [f"{name}{',' if ':' in name else ':'}nodes={_NODES}" for name in drafters]
    counts: list[tuple[np.ndarray, np.ndarray]] = []
    with opened(speculate=None, drafters=sized) as llm:
        for name in sized:
            how = SamplingParams(temperature=0.0, max_tokens=given.tokens, seed=0, speculate=name)
            outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], how)
            tokens, steps = (
                np.array([getattr(o.stats, what) for o in outputs], float) for what in ("emitted", "steps")
            )
            counts.append((tokens, steps))
            found = Bootstrap([name] * len(outputs)).ratio(tokens, steps)
            gained = f", {found.value - counts[0][0].sum() / counts[0][1].sum():+.3f}" if len(counts) > 1 else ""
            print(
                f"{name}: {_shown(found)} tokens per step{gained} ({len(outputs)} requests, {tokens.sum():,.0f} tokens)"
            )
    for name, mine in zip(sized[1:], counts[1:], strict=True):
        print(f"{name} over {sized[0]}: {_shown(Bootstrap([name] * len(texts)).ratio_of_ratios(mine, counts[0]))}")


def _shown(found: Interval) -> str:
    return f"{found.value:.3f}" + ("" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, action in (("capture", capture), ("measure", measure)):
        verb = verbs.add_parser(name)
        verb.set_defaults(action=action)
        verb.add_argument("--held-out", type=int, default=64)
        verb.add_argument("--tokens", type=int, default=96)
    verbs.choices["capture"].add_argument("folder")
    verbs.choices["capture"].add_argument("--here", action="store_true", help="without a server")
    verbs.choices["capture"].add_argument("--requests", type=int, default=2000)
    verbs.choices["capture"].add_argument("--seconds", type=float, default=1e9)
    verbs.choices["measure"].add_argument("drafters", nargs="+")
    given = parser.parse_args()
    given.action(given)


if __name__ == "__main__":
    main()
