"""Sampling parameters check themselves when they are made: a wrong one must never reach a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from slipstream import SamplingParams
from slipstream.errors import OptionError
from tests.tiny import tiny_llm

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")

BAD = [
    *[(name, value) for name in INTEGERS for value in (2.5, True, "x", math.nan, math.inf, [1], -(10**30))],
    *[(name, value) for name in NUMBERS for value in (True, "x", math.nan, math.inf, 1e300, 10**400, [1.0], None)],
    *[(name, value) for name in FLAGS for value in (1, "yes", None)],
    *[("stop", value) for value in (5, [5], b"x", [b"x"], [""], {"a": 1}, [["a"]])],
    *[("stop_token_ids", value) for value in (5, ["a"], "12", [1.5], [True], [-1], {3: 4}, [[1]])],
    *[("allowed_token_ids", value) for value in (5, ["a"], [], [2.5], [-1])],
    *[("bad_words", value) for value in ("word", [""], [" "], [5], 5, b"x")],
    *[("logit_bias", value) for value in (5, [1], {"a": 1.0}, {1.5: 1.0}, {True: 1.0}, {1: "x"}, {1: None}, {-1: 1.0})],
    *[("logit_bias", {1: value}) for value in (math.inf, math.nan, 1e300, -1e300, True)],
    *[("speculate", value) for value in (5, ["suffix"], b"suffix", "")],
    *[("structured_outputs", value) for value in (5, "json", {}, {"xml": "a"}, {"json": {}, "regex": "a"}, [("a", 1)])],
    *[("structured_outputs", {"json": value}) for value in (5, "{", "[1]", [1], {"a": {1}}, True, None)],
    *[("structured_outputs", {"json_object": value}) for value in (False, 1, None)],
    *[("structured_outputs", {kind: value}) for kind in ("regex", "grammar") for value in (5, "", " ", None)],
    *[("structured_outputs", {"choice": value}) for value in (5, "yes", [], [""], [5])],
    *[("prediction", value) for value in (5, [1.5], [-1], {"a": 1}, b"x", ["a"])],
    ("n", 0),
    ("n", 10**9),
    ("top_k", -2),
    ("temperature", -0.1),
    ("repetition_penalty", 1e-300),
    ("logprobs", 1001),
    ("prompt_logprobs", -1),
    ("seed", 2**64),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r:.30}" for name, value in BAD])
def test_a_wrong_value_is_refused_in_one_line_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name}") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("detokenize", {"detokenize": False, "stop": "x"}),
        ("structured_outputs", {"structured_outputs": {"json_object": True}, "ignore_eos": True}),
    ],
)
def test_values_that_contradict_each_other_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"^{name}"):
        SamplingParams(**settings)


def test_numbers_of_numpy_become_pythons_own() -> None:
    params = SamplingParams(
        n=np.int64(2), seed=np.uint64(2**64 - 1), temperature=np.float32(0.5), stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float32(-1.0)}, top_p=1,  # type: ignore[dict-item]
    )  # fmt: skip
    assert (params.n, params.seed, params.temperature, params.stop_token_ids) == (2, 2**64 - 1, 0.5, (3, 4))
    assert params.logit_bias == {7: -1.0} and type(next(iter(params.bias))) is int
    for name in ("n", "seed"):
        assert type(getattr(params, name)) is int
    for name in ("temperature", "top_p"):
        assert type(getattr(params, name)) is float


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_default_passes_when_it_is_given(name: str) -> None:
    default = SamplingParams.__dataclass_fields__[name].default
    assert SamplingParams(**{name: default}) == SamplingParams()
    assert SamplingParams(**{name: getattr(SamplingParams(), name)}) == SamplingParams()


def test_every_field_is_under_these_tests() -> None:
    assert {name for name, _ in BAD} == {field.name for field in dataclasses.fields(SamplingParams)}


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 3e38},
    {"temperature": 1e-5, "logit_bias": {1: 1e9}, "repetition_penalty": 1e6},
    {"temperature": 1e-5, "repetition_penalty": 1e-6, "top_p": 0.5},
    {"top_p": 1e-300, "min_p": 1e-300},
    {"top_k": 10**30, "min_tokens": 3, "logit_bias": {1: -math.inf}},
]


@pytest.mark.parametrize("settings", EXTREMES, ids=str)
def test_what_construction_lets_pass_can_be_sampled_from(settings: dict[str, Any]) -> None:
    (output,) = tiny_llm().generate([[1, 2, 3]], SamplingParams(seed=1, max_tokens=4, **settings))
    assert len(output.token_ids) == 4
