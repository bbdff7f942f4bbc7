"""Measures the CPU cost of the client of `slipstream bench --url`: its server only sleeps, in another process.

    python -m benchmarks.client [--streams 16] [--rate 30] [--tokens 300]

Prints the part of a core that the client took while so many streams each delivered so many tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
from multiprocessing.connection import Connection

from slipstream.bench.prompts import BenchPrompt
from slipstream.bench.serve.client import Address, Client
from slipstream.bench.serve.load import Load, Wire, offer

_EVENT = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{'
_EVENT += b'"content":" word"},"finish_reason":null}]}\n\n'


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, gap: float) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = f"{len(_EVENT):x}\r\n".encode() + _EVENT + b"\r\n"
            for _ in range(tokens):
                writer.write(chunk)
                await asyncio.sleep(gap)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve(port: Connection, tokens: int, gap: float) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: _answer(r, w, tokens, gap), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of each stream")
    parser.add_argument("--tokens", type=int, default=300)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(there, given.tokens, 1 / given.rate), daemon=True)
    server.start()
    address = Address("127.0.0.1", here.recv(), "", False)

    async def measure() -> None:
        prompts = [BenchPrompt("p", "p", ({"role": "user", "content": "Count."},))] * given.streams
        client = Client(address, {})
        found = await offer(Wire(client, "m", given.tokens), prompts, Load(given.streams), 600, lambda n: None)
        await client.close()
        tokens = sum(answer.output_len for answer in found.answers)
        each = 1e6 * found.cpu / tokens
        print(
            f"{given.streams} streams, {tokens / found.duration:.0f} tokens/s in all: the client took "
            f"{100 * found.cpu / found.duration:.2f}% of a core, {each:.0f} us per token"
        )

    asyncio.run(measure())
    server.terminate()


if __name__ == "__main__":
    main()
