"""`slipstream chat`: commands, dropped turns, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.commands.conversation import Conversation
from slipstream.errors import PromptError
from slipstream.llm import LLM
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
    assert done.stderr.count("first token after") == 4 + 1, "after each answer, and for /stats"
    assert "16 tokens" in done.stderr
    assert "error: unknown command '/nonsense'" in done.stderr
    assert "error: /save needs a file name" in done.stderr
    assert "/reset " in done.stderr
    assert ">>>" not in done.stdout, "no prompts where nobody sees them"


def test_chat_ends_with_its_input(tiny: str) -> None:
    assert invoke("chat", "-m", tiny, input="").exit_code == 0


def test_chat_forgets_the_oldest_turns(tiny: str) -> None:
    lines = ["word " * 12] * 4 + ["x" * 3000, "short"]
    done = invoke("chat", "-m", tiny, "--max-model-len", "256", "--max-tokens", "8", input="\n".join(lines))
    assert done.exit_code == 0
    assert re.search(r"the context holds 256 tokens: the oldest \d+ turns were dropped", done.stderr)
    assert re.search(r"error: \d+ prompt tokens, but the context holds 256", done.stderr)
    assert done.stderr.count("first token after") == 5


def talk(model: str, *lines: str, options: tuple[str, ...] = ()) -> Any:
    done = invoke("chat", "-m", model, "--max-tokens", "8", "--ignore-eos", *options, input="\n".join(lines) + "\n")
    assert done.exit_code == 0, done.output
    return done


def saved_by(model: str, place: Path, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    """What the messages say that are saved at the end."""
    talk(model, *lines, f"/save {place}", options=options)
    return [message["content"] for message in json.loads(place.read_text())]


def test_save_keeps_turns_that_the_context_dropped(tiny: str, tmp_path: Path) -> None:
    questions = [f"question {number} " + "word " * 12 for number in range(5)]
    contents = saved_by(tiny, tmp_path / "talk.json", *questions, options=("--max-model-len", "256"))
    assert contents[::2] == questions and len(contents) == 10


def test_save_overwrites_nothing(tiny: str, tmp_path: Path) -> None:
    place = tmp_path / "notes.txt"
    place.write_text("precious")
    done = talk(tiny, "Hi", f"/save {place}", f"/save {tmp_path}/nowhere/x", f"/save {tmp_path / 'other.json'}")
    assert place.read_text() == "precious" and len(json.loads((tmp_path / "other.json").read_text())) == 2
    assert f"error: {place} exists" in done.stderr and "error: cannot write" in done.stderr


def test_stats_and_reset(tiny: str) -> None:
    done = talk(tiny, "/stats", "Hi", "Hello", "/stats", "/reset", "/stats", "/reset", "Hi", "/stats")
    first, second, third, fourth = re.findall(r"^\((no answer yet.*|\d answers?: .*)\)$", done.stderr, re.MULTILINE)
    assert first.startswith("no answer yet") and third.startswith("no answer yet"), "/reset begins anew"
    assert re.match(r"2 answers: 16 tokens, .* on average, \d+ of 512 tokens of context", second)
    assert re.match(r"1 answer: 8 tokens, .*first token after [\d.]+ s, \d+ of 512", fourth)
    assert "(2 turns cleared)" in done.stderr and "(nothing to clear)" in done.stderr


def test_what_was_drafted_is_explained_after_each_answer(tiny: str) -> None:
    explained = talk(tiny, "Hello", "Hello again", options=("--explain", "--speculate", "auto")).stderr
    assert explained.count("the step measured what plain decoding costs") >= 1
    assert len(re.findall(r"steps drafted|Nothing promised to pay", explained)) == 2
    assert "step" not in talk(tiny, "Hello").stderr.replace("tokens per step", "")


def test_undo_takes_the_last_turn_back(tiny: str, tmp_path: Path) -> None:
    with_detour = saved_by(tiny, tmp_path / "a", "Hi", "a mistake", "/undo", "Hello")
    assert with_detour == saved_by(tiny, tmp_path / "b", "Hi", "Hello")
    done = talk(tiny, "/undo", "Hi", "/undo", "/undo")
    assert done.stderr.count("error: there is no turn to undo") == 2 and "(undone: Hi)" in done.stderr


def test_retry_answers_again(tiny: str, tmp_path: Path) -> None:
    sampled = ("--temperature", "1.5")
    done = talk(tiny, "Hi", "/retry", f"/save {tmp_path / 'a'}", options=sampled)
    assert len(json.loads((tmp_path / "a").read_text())) == 2 and len(set(done.stdout.splitlines())) > 1
    alike = talk(tiny, "Hi", "/retry")
    assert alike.stdout.splitlines()[0] in alike.stdout.splitlines()[1:]
    assert "the same answer" in alike.stderr and "/set temperature" in alike.stderr
    assert "error: there is no question to repeat" in talk(tiny, "/retry").stderr


def test_a_retry_without_an_answer_keeps_the_old_one(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = LLM.stream, []

    def stopped(self: LLM, *given: Any) -> Any:
        calls.append(given)
        return plain(self, *given) if len(calls) != 2 else iter(())

    monkeypatch.setattr(LLM, "stream", stopped)
    answered = saved_by(tiny, tmp_path / "a", "Hi", "/retry")
    assert len(calls) == 2 and answered == saved_by(tiny, tmp_path / "b", "Hi")


def test_set_changes_how_tokens_are_chosen(tiny: str) -> None:
    done = talk(tiny, "/set max_tokens=3", "Hi", "/set", "/set max_tokens=none", "/set stop=the end", "/set")
    shown = [line for line in done.stderr.splitlines() if "=" in line]
    assert "(3 tokens, " in done.stderr
    assert shown == [
        "(max_tokens=3)", "(temperature=0.0, max_tokens=3, ignore_eos=True)", "(max_tokens=None)",
        "(stop=('the end',))", "(temperature=0.0, stop=('the end',), ignore_eos=True)",
    ]  # fmt: skip
    plain = talk(tiny, "/set ignore_eos=false", "/set max_tokens=none", "/set temperature=1", "/set")
    assert plain.stderr.endswith("(temperature=1.0)\n(temperature=1.0)\n"), "told whatever it is"
    first = talk(tiny, "/set temperature=1", "/set seed=5", "Hi").stdout
    assert first == talk(tiny, "Hi", options=("--temperature", "1", "--seed", "5")).stdout


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("temprature=1", "unknown sampling parameter 'temprature' (did you mean 'temperature'?"),
        ("temperature", "/set needs NAME=VALUE"),
        ("temperature=-1", "temperature=-1 is out of range"),
        ("temperature=hot", "temperature='hot' is not a number"),
        ("ignore_eos=1", "ignore_eos=1 "),
        ("stop=5", "stop=5 "),
        ("logit_bias=[1]", "logit_bias=[1] "),
        ("n=2", "chat gives one answer at a time"),
        ("logprobs=2", "chat does not show logprobs"),
    ],
)
def test_set_refuses_in_a_line(tiny: str, given: str, complaint: str) -> None:
    done = talk(tiny, f"/set {given}", "Hi")
    assert f"error: {complaint}" in done.stderr and len(done.stderr.splitlines()) == 2, done.stderr


def test_a_question_that_cannot_be_asked_leaves_the_talk_as_it_was(tiny: str, tmp_path: Path) -> None:
    impossible = '/set logit_bias={"5000": 1}'
    contents = saved_by(tiny, tmp_path / "a", "Hi", impossible, "Refused", "/retry", "/set logit_bias={}", "Hello")
    assert contents[::2] == ["Hi", "Hello"]


def test_drafter_is_changed_in_mid_talk(tiny: str, other: str) -> None:
    fox = "fox fox fox fox fox fox fox"
    done = talk(
        tiny, fox, "/drafter none", fox, "/drafter ngram:max_n=3", "/drafter", fox, options=("--max-tokens", "60")
    )
    assert "(drafter: none)" in done.stderr and done.stderr.count("(drafter: ngram:max_n=3)") == 2
    assert [("nothing drafted" in line) for line in done.stderr.splitlines() if " tok/s" in line][1]
    wrong = talk(tiny, "/drafter sufix", f"/drafter draft_model:model={other}", "/drafter", "Hi")
    assert "error: unknown drafter 'sufix' (did you mean 'suffix'?" in wrong.stderr
    assert "token 3 is '<|extra|>' in the draft" in wrong.stderr and "(drafter: auto)" in wrong.stderr


def test_help_names_every_command(tiny: str) -> None:
    listed = re.findall(r"^(/\w+)", talk(tiny, "/help").stderr, re.MULTILINE)
    known = talk(tiny, "/nonsense").stderr
    assert sorted(listed) == sorted(re.findall(r"/\w+", known.partition("valid: ")[2]))


def test_chat_refuses_what_it_cannot_do(tiny: str, other: str) -> None:
    for options in (["-n", "2"], ["--logprobs", "1"]):
        assert invoke("chat", "-m", tiny, *options, input="").exit_code == 2
    done = invoke("chat", "-m", other, input="")
    assert done.exit_code == 2 and "no chat template" in done.stderr


def test_conversation_keeps_what_fits(tiny: str) -> None:
    from slipstream.text import Tokenizer

    tokenizer = Tokenizer.from_directory(tiny)
    conversation = Conversation(tokenizer, room=120, longest=40, system="S")
    for number in range(5):
        prompt, _ = conversation.ask(f"question {number}")
        assert len(prompt) + 40 <= 120
        conversation.answered(f"answer {number}")
    shown = tokenizer.decode(prompt)
    assert "question 4" in shown and "question 0" not in shown, "the prompt has the latest"
    contents = [message["content"] for message in conversation.messages]
    assert contents[:2] == ["S", "question 0"] and contents[-1] == "answer 4", "and all are kept"
    before = conversation.messages
    with pytest.raises(PromptError):
        conversation.ask("y" * 2000)
    assert conversation.messages == before
    conversation.ask("interrupted at once")
    conversation.answered("")
    assert "interrupted at once" not in [message["content"] for message in conversation.messages]
