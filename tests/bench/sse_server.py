"""A small server that speaks as much of the OpenAI protocol as a bench needs, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WORDS = ["one ", "two ", "three ", "four ", "five ", "six "]


class SseServer:
    """Streams `tokens` words per answer, one every `gap` seconds after `first` seconds; keeps what it was asked.

    `each`: how many requests it answers on a connection; the next one finds it closed.
    """

    def __init__(
        self, *, tokens: int = 6, first: float = 0.0, gap: float = 0.0, status: int = 200, each: int = 1000
    ) -> None:
        self.tokens, self.first, self.gap, self.status, self.each = tokens, first, gap, status, each
        self.asked: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.usage = True
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self.each):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                if path.endswith("/v1/models"):
                    await self._plain(writer, 200, {"data": [{"id": "words"}]})
                elif self.status != 200:
                    await self._plain(writer, self.status, {"error": {"message": "out of words"}})
                else:
                    self.asked.append({"path": path, **json.loads(body)})
                    self.under_way += 1
                    self.most_under_way = max(self.most_under_way, self.under_way)
                    await self._stream(writer, "chat" in path)
                    self.under_way -= 1
            await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _plain(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first)
        for number in range(self.tokens):
            word = WORDS[number % len(WORDS)]
            self._event(writer, {"choices": [{"delta": {"content": word}} if chat else {"text": word}]})
            await writer.drain()
            if self.gap and number < self.tokens - 1:
                await asyncio.sleep(self.gap)
        if self.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
            self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: Any) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def serving(**how: Any) -> Iterator[SseServer]:
    """A running server; `url` has its address."""
    server, loop = SseServer(**how), asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listening.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for sockets to be closed

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
