"""Reasoning parts: where they begin and end, whatever the deltas are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.server.parsing import ParserRequest, parser_factory
from slipstream.server.parsing.reasoning import REASONING_STYLES, ReasoningParser
from tests.server.parsing.parsed import parsed

THINK = REASONING_STYLES["qwen3"]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", False, "So.", "Yes."),
        ("So.\n</think>\n\nYes.", True, "So.", "Yes."),
        ("\n<think>So.</think>Yes.", True, "So.", "Yes."),  # the tag again, though the prompt had it
        ("<think></think>Yes.", False, "", "Yes."),
        ("<think>\n\n</think>\n\nYes.\n", False, "", "Yes.\n"),
        ("Yes.", False, "", "Yes."),
        ("  <b>Yes.", False, "", "  <b>Yes."),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),  # an answer about tags
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think>a < b </thin", False, "a < b </thin", ""),  # ended inside
        ("So", True, "So", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("", False, "", ""),
    ],
)
def test_parts(text: str, inside: bool, reasoning: str, content: str) -> None:
    for size in (1, 2, 3, 7, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        whole = parsed(ReasoningParser(THINK, inside), pieces)
        assert (whole.reasoning, whole.content) == (reasoning, content), size


def test_it_streams() -> None:
    """What cannot become a tag is passed on at once; the end may lie anywhere in a delta of several tokens."""
    parser = ReasoningParser(THINK, inside=True)
    assert parser.push("Let me").reasoning == "Let me"
    assert parser.push(" see </").reasoning == " see"
    ended = parser.push("think>Four, so </think>")
    assert (ended.reasoning, ended.content) == ("", "Four, so </think>")
    assert parser.push(" 4").content == " 4"


_PIECES = ["<think>", "</think>", "<", "</", "think>", "</think", "a", " ", "\n", "<think", "[THINK]", "[/THINK]"]


@given(st.lists(st.sampled_from(_PIECES), max_size=8), st.data(), st.booleans(), st.sampled_from([*REASONING_STYLES]))
def test_any_split_gives_the_same(bits: list[str], data: st.DataObject, inside: bool, name: str) -> None:
    text, style = "".join(bits), REASONING_STYLES[name]
    expected = parsed(ReasoningParser(style, inside), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(ReasoningParser(style, inside), pieces) == expected
    assert parsed(ReasoningParser(style, inside), text) == expected


def chosen(template: str, parser: str, prompt_end: str, text: str) -> tuple[str, str]:
    whole = parsed(parser_factory("auto", parser, template)(ParserRequest(prompt_end=prompt_end)), [text])
    return whole.reasoning, whole.content


def test_who_decides() -> None:
    """The chat template, or the server's operator; where the prompt opened the tag, the answer is inside."""
    qwen = "{% if '</think>' in content %}{% endif %}"
    assert chosen(qwen, "auto", "<|im_start|>assistant\n", "<think>a</think>b") == ("a", "b")
    assert chosen(qwen, "auto", "<|im_start|>assistant\n<think>\n", "a</think>b") == ("a", "b")
    assert chosen(qwen, "auto", "<think>\n\n</think>\n\n", "b") == ("", "b")
    assert chosen(qwen, "none", "", "<think>a</think>b") == ("", "<think>a</think>b")
    assert chosen("plain", "auto", "", "<think>a</think>b") == ("", "<think>a</think>b")
    assert chosen("plain", "qwen3", "", "<think>a</think>b") == ("a", "b")
    assert chosen("plain", "deepseek_r1", "", "a</think>b") == ("a", "b")
    assert chosen("[THINK] ... [/THINK]", "auto", "[/INST]", "[THINK]a[/THINK]b") == ("a", "b")
    with pytest.raises(ValueError, match="unknown reasoning parser 'qwen'"):
        parser_factory("auto", "qwen", None)
