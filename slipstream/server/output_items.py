"""The output of `/v1/responses` as it grows: reasoning, message and function calls, and the events that tell them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from slipstream.server.parsing.base import Parsed, ToolCallDelta

Event = dict[str, Any]


class OutputItems:
    """Items so far. One is open at a time; what belongs to another kind closes it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # which call the open item is
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is still to come

    @property
    def reasoning(self) -> str:
        """The text of the reasoning items."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def push(self, parsed: Parsed, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add a piece of the answer; returns its events."""
        events: list[Event] = []
        self._held += logprobs
        if parsed.reasoning:
            events += self._text("reasoning", parsed.reasoning)
        if parsed.content:
            events += self._text("message", parsed.content)
        for call in parsed.tool_calls:
            events += self._called(call)
        return events

    def close(self) -> list[Event]:
        """The answer is over. One without any text has an empty message."""
        events = [] if self.items else self._begin("message")
        return events + self._end()

    def _text(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._end() + self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        delta: Event = {"type": f"response.{part['type']}.delta", **self._where(), "delta": text}
        if kind == "message":
            delta["logprobs"] = self._held
            part["logprobs"] += self._held
        self._held = []
        return [*events, delta]

    def _called(self, call: ToolCallDelta) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != "function_call" or self._call != call.index:
            events = self._end()
            item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call.id or f"call_{uuid4().hex}"}
            item |= {"name": call.name or "", "arguments": "", "status": "in_progress"}
            self._call = call.index
            events += self._added(item)
        assert self._open is not None
        if call.arguments:
            self._open["arguments"] += call.arguments
            events.append({"type": "response.function_call_arguments.delta", **self._item(), "delta": call.arguments})
        return events

    # -- items begin and end ------------------------------------------------------------------------------------------

    def _begin(self, kind: str) -> list[Event]:
        """Open an item of text, with its one part."""
        if kind == "reasoning":
            item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid4().hex}", "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events = self._added({**item, "status": "in_progress"})
        assert self._open is not None
        self._open["content"].append(part)
        return [*events, {"type": "response.content_part.added", **self._where(), "part": _copied(part)}]

    def _added(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        self._open = item
        place = len(self.items) - 1
        return [{"type": "response.output_item.added", "output_index": place, "item": {**item}}]

    def _end(self) -> list[Event]:
        """Close the open item."""
        item = self._open
        if item is None:
            return []
        item["status"] = "completed"
        events: list[Event] = []
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **self._item(), **said})
        else:
            part = item["content"][0]
            done: Event = {"type": f"response.{part['type']}.done", **self._where(), "text": part["text"]}
            if "logprobs" in part:
                part["logprobs"] += self._held
                done["logprobs"], self._held = part["logprobs"], []
            events += [done, {"type": "response.content_part.done", **self._where(), "part": _copied(part)}]
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": {**item}})
        self._open = None
        return events

    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _where(self) -> dict[str, Any]:
        return {**self._item(), "content_index": 0}


def _copied(part: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
