"""`slipstream chat`: commands, turns that are forgotten, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.commands.conversation import Conversation
from slipstream.errors import PromptError
from tests.invoking import invoke


def test_chat_by_script(tiny: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = [
        "Hello", "/system Be brief.", "first\\", "second", '"""', "/help is text here", "", "end", '"""',
        "/usr/bin is a path", f"/save {saved}", "/stats", "/nonsense", "/save", "/help", "/reset", "/stats", "/system",
        "   ", "/exit", "never read",
    ]  # fmt: skip
    done = invoke("chat", "-m", tiny, "--max-tokens", "4", "--ignore-eos", input="\n".join(script) + "\n")
    assert done.exit_code == 0, done.output
    messages = json.loads(saved.read_text())
    assert [m["content"] for m in messages if m["role"] != "assistant"] == [
        "Be brief.", "Hello", "first\nsecond", "/help is text here\n\nend", "/usr/bin is a path",
    ]  # fmt: skip
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 4]
    assert done.stderr.count("first token after") == 4 + 2, "after each answer, and for /stats twice"
    assert "16 tokens" in done.stderr
    assert "error: unknown command '/nonsense'" in done.stderr
    assert "error: /save needs a file name" in done.stderr
    assert "/reset         forget" in done.stderr
    assert ">>>" not in done.stdout, "no prompts where nobody sees them"


def test_chat_ends_with_its_input(tiny: str) -> None:
    assert invoke("chat", "-m", tiny, input="").exit_code == 0


def test_chat_forgets_the_oldest_turns(tiny: str) -> None:
    lines = ["word " * 12] * 4 + ["x" * 3000, "short"]
    done = invoke("chat", "-m", tiny, "--max-model-len", "256", "--max-tokens", "8", input="\n".join(lines))
    assert done.exit_code == 0
    assert re.search(r"the context holds 256 tokens: the oldest \d+ turns were dropped", done.stderr)
    assert re.search(r"error: that is \d+ tokens and the context holds 256", done.stderr)
    assert done.stderr.count("first token after") == 5


def test_chat_refuses_what_it_cannot_do(tiny: str, other: str) -> None:
    for options in (["-n", "2"], ["--logprobs", "1"]):
        assert invoke("chat", "-m", tiny, *options, input="").exit_code == 2
    done = invoke("chat", "-m", other, input="")
    assert done.exit_code == 2 and "no chat template" in done.stderr


def test_conversation_keeps_what_fits(tiny: str) -> None:
    from slipstream.text import Tokenizer

    conversation = Conversation(Tokenizer.from_directory(tiny), room=120, longest=40, system="S")
    for number in range(5):
        prompt, _ = conversation.ask(f"question {number}")
        assert len(prompt) + 40 <= 120
        conversation.answered(f"answer {number}")
    contents = [message["content"] for message in conversation.messages]
    assert contents[0] == "S" and contents[-1] == "answer 4" and "question 0" not in contents
    before = conversation.messages
    with pytest.raises(PromptError):
        conversation.ask("y" * 2000)
    assert conversation.messages == before
    conversation.ask("interrupted at once")
    conversation.answered("")
    assert "interrupted at once" not in [message["content"] for message in conversation.messages]
