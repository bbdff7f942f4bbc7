"""Tool calls in the styles of Hermes, Llama 3 and Mistral, whatever the deltas are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.server.parsing import ParserRequest, parser_factory
from slipstream.server.parsing.tool_styles import TOOL_STYLES, find_tool_style
from tests.server.parsing.parsed import Whole, counted, parsed

NAMES = ["weather", "add"]
A, B = '{"city": "Zürich", "days": [1, -2.5e3, {"x": null}]}', "{}"


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def read(style: str, text: str, size: int | None = None) -> Whole:
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    return parsed(TOOL_STYLES[style](NAMES, counted()), pieces)


CALLS = [  # style, text, content, calls
    ("hermes", f"<tool_call>\n{call('weather', A)}\n</tool_call>", "", [("weather", A)]),
    ("hermes", f"Let me see.\n<tool_call>{call('add', B)}</tool_call>\n", "Let me see.", [("add", B)]),
    (
        "hermes",
        f"<tool_call>\n{call('weather', A)}\n</tool_call>\n<tool_call>\n{call('add', B)}\n</tool_call> Done.",
        "Done.",
        [("weather", A), ("add", B)],
    ),
    ("hermes", f"<tool_call>{call('add', B)}\n{call('add', A)}</tool_call>", "", [("add", B), ("add", A)]),
    ("hermes", f"<tool_call>{call('other', B)}</tool_call>", "", [("other", B)]),  # the client knows its tools
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", r'<tool_call>{"name": "add", "arguments": "{\"a\": \"\\n\"}"}', "", [("add", r'{"a": "\n"}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "a\\u0064d", "arguments": {}, "x": [1]}', "", [("add", "{}")]),
    ("hermes", f"One.\n<tool_call>{call('add', B)}</tool_call>\nTwo.\n", "One.\nTwo.", [("add", B)]),
    ("hermes", "a <b> <tool_cal", "a <b> <tool_cal", []),
    ("hermes", " Text. \n", " Text. \n", []),
    ("llama3_json", call("weather", A, "parameters"), "", [("weather", A)]),
    ("llama3_json", f"\n <|python_tag|>{call('other', A, 'parameters')}", "", [("other", A)]),
    (
        "llama3_json",
        f"{call('weather', A, 'parameters')}; {call('add', B, 'parameters')}",
        "",
        [("weather", A), ("add", B)],
    ),
    ("llama3_json", f"Sure. <|python_tag|>{call('add', B)};{call('new', A)} ok", "Sure. ok", [("add", B), ("new", A)]),
    ("llama3_json", f"I would say {call('add', B)}", f"I would say {call('add', B)}", []),
    ("mistral", f"[TOOL_CALLS][{call('weather', A)}]", "", [("weather", A)]),
    ("mistral", f"Ah. [TOOL_CALLS] [{call('weather', A)}, {call('add', B)}]", "Ah.", [("weather", A), ("add", B)]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]add{B}, or", ", or", [("weather", A), ("add", B)]),
    ("mistral", f"[TOOL_CALLS][{call('add', B)}", "", [("add", B)]),  # ended before the list did
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CALLS)
def test_calls(style: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in (None, 1, 2, 5, 13):
        whole = read(style, text, size)
        assert (whole.content, whole.named) == (content, calls), size
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", " <tool_call>[1, 2]</tool_call> "),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 3}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "3"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
        ("hermes", 'a\n<tool_call>\n{"name": "add", "argu'),  # the answer ended too early
        ("hermes", "<tool_call>\n"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),  # an answer in JSON, not one of the tools
        ("llama3_json", '<|python_tag|>search.call(query="cats")'),
        ("llama3_json", "  {"),
        ("mistral", "[TOOL_CALLS]{}"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][[{}]]"),
        ("mistral", "[TOOL_CALLS]weather [AR"),
        ("mistral", "a [1] [TOOL_CALLS"),
    ],
)
def test_what_is_no_call_is_content(style: str, text: str) -> None:
    for size in (None, 1, 3):
        assert read(style, text, size) == Whole(content=text)


def test_a_call_that_fails_does_not_hide_the_next_one() -> None:
    whole = read("hermes", f"<tool_call>oh <tool_call>{call('add', B)}</tool_call>", 1)
    assert (whole.content, whole.named) == ("<tool_call>oh", [("add", B)])
    whole = read("mistral", f"[TOOL_CALLS][{call('add', B)}, oops", 1)
    assert (whole.content, whole.named) == (", oops", [("add", B)])


def test_arguments_that_go_wrong_or_end_early_stay_as_far_as_they_came() -> None:
    whole = read("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, oops}}</tool_call>', 2)
    assert whole.named == [("add", '{"a": 1, ')] and whole.content == "oops}}</tool_call>"
    whole = read("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', 2)
    assert whole.named == [("add", '{"a": "x')] and whole.content == ""


def test_arguments_are_streamed() -> None:
    parser = TOOL_STYLES["hermes"](NAMES, counted())
    given = [parser.push(t) for t in ("Hm", ".\n<tool", '_call>{"name": "add', '", "arguments": {"a', '": 1', "}}")]
    assert given[0].content == "Hm" and given[1].content == "."
    assert not given[2].tool_calls and not given[2].content
    start, first = given[3].tool_calls
    assert (start.index, start.id, start.name, start.arguments) == (0, "id0", "add", "")
    assert (first.index, first.id, first.name, first.arguments) == (0, None, None, '{"a')
    assert [d.arguments for p in given[4:] for d in p.tool_calls] == ['": 1', "}"]


def test_ids() -> None:
    """OpenAI's form; Mistral's templates refuse ids that are not nine letters and digits."""
    texts = {"hermes": f"<tool_call>{call('add', B)}", "llama3_json": call("add", B)}
    for style, text in texts.items():
        ids = {parsed(TOOL_STYLES[style](NAMES), [text]).calls[0][0] for _ in range(2)}
        assert len(ids) == 2 and all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    (id, _, _) = parsed(TOOL_STYLES["mistral"](NAMES), [f"[TOOL_CALLS][{call('add', B)}]"]).calls[0]
    assert re.fullmatch("[0-9a-zA-Z]{9}", id)


_BITS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
    ),
    *(call("add", '{"a": "\\""}'), '{"name": "add", ', '"arguments": ', '{"a": 1', "true", "nul", '"', "\\", "weather"),
]


@settings(max_examples=300)
@given(st.sampled_from([*TOOL_STYLES]), st.lists(st.sampled_from(_BITS), max_size=9), st.data())
def test_any_split_gives_the_same(style: str, bits: list[str], data: st.DataObject) -> None:
    text = "".join(bits)
    expected = read(style, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(TOOL_STYLES[style](NAMES, counted()), pieces) == expected
    assert read(style, text, 1) == expected
    if not expected.calls:
        assert expected.content == text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4), st.sampled_from([*TOOL_STYLES]), st.booleans(), st.integers(1, 9))
def test_any_arguments_come_through(arguments: dict[str, Any], style: str, ascii: bool, size: int) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    one = call("add", written)
    text = {"hermes": f"<tool_call>{one}</tool_call>", "mistral": f"[TOOL_CALLS][{one}]"}.get(style, one)
    whole = read(style, text, size)
    assert whole.named == [("add", written)] and whole.content == ""


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|im_start|>", None),
    ],
)
def test_the_chat_template_decides(template: str, style: str | None) -> None:
    assert find_tool_style(template) == style
    tools = [{"type": "function", "function": {"name": "add"}}]
    factory = parser_factory("auto", "auto", template)
    assert factory.tools == style
    needs = factory(ParserRequest(tools=tools)).needs_special_tokens
    assert needs == (style in ("mistral", "llama3_json"))
    assert not factory(ParserRequest()).needs_special_tokens


def test_tools_only_where_asked_for() -> None:
    text = f"<think>a<tool_call></think> b <tool_call>{call('add', B)}</tool_call>"
    tools = [{"type": "function", "function": {"name": "add"}}]
    factory = parser_factory("hermes", "qwen3", None)
    for request in (ParserRequest(), ParserRequest(tools=tools, tool_choice="none")):
        assert parsed(factory(request), text).content == f"b <tool_call>{call('add', B)}</tool_call>"
    whole = parsed(factory(ParserRequest(tools=tools)), text)
    assert (whole.reasoning, whole.content, whole.named) == ("a<tool_call>", "b", [("add", B)])
    assert parsed(parser_factory("none", "none", "<tool_call>")(ParserRequest(tools=tools)), text).content == text
    with pytest.raises(ValueError, match="unknown tool-call parser 'x'"):
        parser_factory("x", "auto", None)
