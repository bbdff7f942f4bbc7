"""How drafters and their options are spelled, and that what is unknown is refused with the valid choices."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams
from slipstream.drafters import DrafterSpec, parse_speculate
from slipstream.drafters.registry import drafter_class, make_options
from slipstream.errors import OptionError
from slipstream.types import Plan


def options(value: Any) -> Any:
    spec = parse_speculate(value)
    return make_options(spec.method, drafter_class(spec.method).options_type, spec.options)


def test_the_spellings() -> None:
    assert parse_speculate(None) == DrafterSpec("none")
    assert parse_speculate("suffix") == DrafterSpec("suffix")
    assert options("ngram:max_n=5,depth=3").max_n == 5
    assert options("suffix:shared=true,min_confidence=0.5").shared is True
    assert options({"method": "suffix", "nodes": 20}).nodes == 20
    assert options('{"method": "ngram", "min_n": 1}').min_n == 1
    assert options("draft_model:model=/some/where").model == "/some/where"
    assert options("none").plan == Plan(0, 0, 1, 0.0)


def test_the_spelling_of_vllm() -> None:
    ours = options({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    assert (ours.depth, ours.nodes, ours.max_n, ours.min_n) == (5, 5, 4, 4)
    ours = options({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert (ours.min_n, ours.max_n) == (2, 4)
    ours = options({"model": "some/draft", "num_speculative_tokens": 3})
    assert (ours.model, ours.depth, ours.nodes) == ("some/draft", 3, 3)
    ours = options({"method": "suffix", "num_speculative_tokens": 9, "suffix_decoding_max_tree_depth": 7})
    assert (ours.nodes, ours.depth) == (9, 7)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sufix", "unknown drafter 'sufix' .*did you mean 'suffix'"),
        ("ngram:max_m=4", "unknown option of drafter 'ngram': 'max_m' .*max_n"),
        ("ngram:max_n=four", "max_n='four' is not int"),
        ("ngram:max_n=2.5", "is not int"),
        ({"method": "ngram", "max_n": 2.5}, "max_n=2.5 is not int"),
        ({"method": "ngram", "max_n": True}, "max_n=True is not int"),
        ("ngram:max_n=1", "max_n=1 is out of range"),
        ("ngram:depth", "'depth' is not an option"),
        ("ngram:depth=3,depth=4", "given twice"),
        ("ngram:branch=2", "branch=2 is out of range"),
        ("ngram:min_confidence=0.5", "min_confidence=0.5 is out of range"),
        ("none:branch=4", "branch=4 is out of range"),
        ("suffix:min_confidence=2", "min_confidence=2.0 is out of range"),
        ("suffix:min_confidence=nan", "out of range"),
        ("suffix:nodes=1000", "nodes=1000 is out of range"),
        ("suffix:shared=perhaps", "is not bool"),
        ("none:depth=3", "depth=3 is out of range"),
        ('{"method": ', "JSON cannot be read"),
        ({"num_speculative_tokens": 3}, "needs `method`"),
        ({"method": "hydra", "num_speculative_tokens": 3}, "unknown drafter 'hydra'"),
        ({"method": "ngram", "quantization": "fp8"}, "unknown option .*'quantization'"),
        (["suffix"], "not list"),
        ("[1]", "unknown drafter"),
    ],
)
def test_what_is_unknown_is_refused_with_the_valid_choices(value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_speculate(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": -1},
        {"stop": ["a", ""]},
        {"seed": 2**65},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="out of range"):
        SamplingParams(**settings)


@pytest.mark.parametrize("name", ["temperature", "top_k", "max_tokens", "seed"])
def test_sampling_parameters_that_are_no_numbers_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}='x' is not an? (number|integer)"):
        SamplingParams(**{name: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu:x", "cpu:0", "tpu", "cuda:99"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    from slipstream.models.load import choose_device

    with pytest.raises(OptionError, match="device"):
        choose_device(device)


def test_a_third_party_registers_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from slipstream.drafters import drafter_names, registry
    from slipstream.drafters.ngram import NgramDrafter

    point = EntryPoint("theirs", "slipstream.drafters.ngram:NgramDrafter", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    assert "theirs" in drafter_names()
    assert drafter_class("theirs") is NgramDrafter
    assert parse_speculate("theirs:max_n=6").options == {"max_n": "6"}
