"""`tool_choice` as a grammar: it compiles, allows nothing else, and the parser of the style reads what it allows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import OptionError
from slipstream.server.parsing import ParserRequest, parser_factory
from slipstream.server.parsing.tool_styles import TOOL_STYLES
from tests.invoking import save_model
from tests.server.parsing.parsed import parsed
from tests.vocabularies import train_byte_level

llguidance = pytest.importorskip("llguidance")

SPECIAL = ["[TOOL_CALLS]", "<|python_tag|>"]
WEATHER = {
    "name": "weather",
    "parameters": {
        "$defs": {"unit": {"enum": ["C", "F"]}},
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": 'odd "name"\\'}},
    {"type": "function", "name": "now", "parameters": {"properties": {}, "additionalProperties": False}},
]
FEW = {  # arguments that even a random model finishes
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
ZURICH = '{"city": "Zürich", "unit": "C"}'


@pytest.fixture(scope="module")
def tokenizer() -> tuple[Any, dict[str, int]]:
    from tokenizers import AddedToken

    backend = train_byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return llguidance.LLTokenizer(backend.to_str()), {text: backend.token_to_id(text) for text in SPECIAL}


def allows(tokenizer: tuple[Any, dict[str, int]], grammar: str, text: str) -> bool:
    made, _ = tokenizer
    matcher = llguidance.LLMatcher(made, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = made.tokenize_str(text, parse_special=True)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def grammar_of(style: str, choice: Any, ids: dict[str, int], parallel: bool = True) -> str:
    request = ParserRequest(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    grammar = parser_factory(style, "none", None).grammar(request, ids)
    assert grammar is not None
    return grammar


def written(style: str, *calls: tuple[str, str]) -> str:
    """Calls as models of a style write them."""
    key = "parameters" if style == "llama3_json" else "arguments"
    bodies = [f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    if style == "hermes":
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    return "; ".join(bodies) if style == "llama3_json" else f"[TOOL_CALLS][{', '.join(bodies)}]"


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_required(style: str, tokenizer: tuple[Any, dict[str, int]]) -> None:
    grammar = grammar_of(style, "required", tokenizer[1])
    calls = [("weather", ZURICH), ('odd "name"\\', '{"anything": [1]}'), ("now", "{}")]
    for some in ([calls[0]], [calls[1]], [calls[2]], calls):
        text = written(style, *some)
        assert allows(tokenizer, grammar, text), text
        assert parsed(TOOL_STYLES[style](["weather", "now", calls[1][0]]), [text]).named == some
    for text in (
        "",
        "I cannot.",
        written(style, ("weather", '{"city": "Bern"}')),
        written(style, ("weather", '{"city": "Bern", "unit": "K"}')),
        written(style, ("other", "{}")),
        written(style, ("now", "[]")),
        written(style, ("now", "{}")) + " and",
        written(style, ("now", "{}"))[:-1],
    ):
        assert not allows(tokenizer, grammar, text), text


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_one_function_and_one_call(style: str, tokenizer: tuple[Any, dict[str, int]]) -> None:
    one, two = written(style, ("now", "{}")), written(style, ("now", "{}"), ("now", "{}"))
    for choice in ({"type": "function", "function": {"name": "now"}}, {"type": "function", "name": "now"}):
        grammar = grammar_of(style, choice, tokenizer[1], parallel=False)
        assert allows(tokenizer, grammar, one) and not allows(tokenizer, grammar, two)
        assert not allows(tokenizer, grammar, written(style, ("weather", ZURICH)))
        assert allows(tokenizer, grammar_of(style, choice, tokenizer[1]), two)


def test_free_choices_have_no_grammar() -> None:
    for choice in ("auto", "none"):
        request = ParserRequest(tools=TOOLS, tool_choice=choice)
        assert parser_factory("none", "none", None).grammar(request, {}) is None
        assert parser_factory("hermes", "none", None).grammar(request, {}) is None


@pytest.mark.parametrize(
    ("style", "tools", "choice", "message"),
    [
        ("hermes", TOOLS, {"type": "function", "function": {"name": "nobody"}}, "'nobody', which is not among"),
        ("hermes", TOOLS, "any", "tool_choice 'any' is not understood"),
        ("hermes", TOOLS, {"type": "allowed_tools"}, "is not understood"),
        ("hermes", TOOLS, {"type": "function", "function": "now"}, "is not understood"),
        ("hermes", [], "required", "there are no tools"),
        ("none", TOOLS, "required", "no known style of tool calls"),
        ("hermes", [{"type": "retrieval"}], "auto", r"tools\[0\] is not a function"),
        ("hermes", [*TOOLS, {"type": "function", "function": {}}], "auto", r"tools\[3\] has no name"),
        ("hermes", [{"type": "function", "name": "f", "parameters": 3}], "required", "'f' are not a JSON schema"),
    ],
)
def test_refused(style: str, tools: list[Any], choice: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parser_factory(style, "none", None).grammar(ParserRequest(tools=tools, tool_choice=choice), {})


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_a_random_model_makes_a_call(style: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Through the engine: the grammar holds at every node of a tree, and a special token is matched by its id."""
    llm = LLM(str(save_model(tmp_path_factory.mktemp("calls"), extra=SPECIAL[0])), speculate="suffix")
    assert llm.tokenizer is not None
    ids = {str(llm.tokenizer.token(id)): id for id in llm.tokenizer.special_ids}
    parsing, request = parser_factory(style, "none", None), ParserRequest(tools=[FEW], tool_choice="required")
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=200,
        structured_outputs={"grammar": parsing.grammar(request, ids)},
        skip_special_tokens=not parsing(request).needs_special_tokens,
    )
    question = [{"role": "user", "content": "Will it rain?"}]
    drafted, plain = (llm.chat(question, replace(params, speculate=how))[0] for how in (None, False))
    assert drafted.text == plain.text and drafted.finish_reason == "stop"
    whole = parsed(parsing(request), [drafted.text])
    assert whole.content == "" and {name for name, _ in whole.named} == {"forecast"}
    for _, arguments in whole.named:
        found = json.loads(arguments)
        assert found["unit"] in ("C", "F") and 1 <= found["days"] <= 9
