"""Self-speculation: the target's own layers as the draft, and the rows that verification need not compute again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.drafters.layer_skip import format_layers, parse_layers
from slipstream.errors import OptionError
from tests.tiny import tiny_directory

PROMPT = [5, 3, 8, 1, 2] * 20
HOW = SamplingParams(temperature=0.8, seed=3, max_tokens=40)


def build(speculate: str | None, layers: int = 6, **kwargs: Any) -> LLM:
    return LLM(tiny_directory(0, layers=layers), speculate=speculate, **kwargs)


def passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each pass of this model ran from now on."""
    counts: list[int] = []
    forward = llm.model.forward

    def recording(cache: Any, store: str, segments: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("layers")
        prepared = max((s.prepared.layers for s in segments if s.prepared), default=0)
        counts.append(len(chosen) if chosen is not None else llm.model.config.layers - prepared)
        return forward(cache, store, segments, **kwargs)

    monkeypatch.setattr(llm.model, "forward", recording)
    return counts


@pytest.mark.parametrize("shape", ["depth=3", "depth=3,nodes=8,branch=2", "depth=4,min_confidence=0.3"])
def test_verification_starts_after_the_layers_that_drafting_ran(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(f"early_exit:exit=2,{shape}")
    assert llm.exact
    counts = passes(llm, monkeypatch)
    (output,) = llm.generate([PROMPT], HOW)
    # The prompt runs through all layers at once, and so may a last token that leaves no room for a draft.
    assert counts.count(6) <= 2 and counts.count(6) + counts.count(4) == output.stats.steps
    assert output.token_ids == build(None).generate([PROMPT], HOW)[0].token_ids


def test_rows_are_not_reused_when_turned_off_or_where_bits_could_change(monkeypatch: pytest.MonkeyPatch) -> None:
    told = build("early_exit:exit=2,reuse=no")
    inexact = build("early_exit:exit=2", dtype="float16")
    assert told.exact and not inexact.exact
    for llm in (told, inexact):
        counts = passes(llm, monkeypatch)
        (output,) = llm.generate([PROMPT], HOW)
        assert counts.count(6) == output.stats.steps and set(counts) == {2, 6}


def test_a_batch_of_prepared_trees_and_prompts_is_what_each_is_alone() -> None:
    prompts = [PROMPT[:length] for length in (3, 97, 60, 1, 40)]
    how = [SamplingParams(temperature=0.9, seed=i, max_tokens=9 + 7 * i) for i in range(5)]
    plain = [build(None).generate([p], [h])[0].token_ids for p, h in zip(prompts, how, strict=True)]
    llm = build("early_exit:exit=3,depth=3,nodes=8,branch=2", max_num_seqs=2)  # the others' prompts come in between
    assert [o.token_ids for o in llm.generate(prompts, how)] == plain


def idle_layer(layer: int, folder: Path) -> Path:
    """A model of six layers, one of which adds nothing to what passes through it."""
    source = tiny_directory(0, layers=6)
    weights = load_file(source / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(("layer", "draft"), [(5, "early_exit:exit=5,depth=4"), (2, "layer_skip:skip=2,depth=4")])
def test_a_layer_that_adds_nothing_is_not_missed(layer: int, draft: str, tmp_path: Path) -> None:
    llm = LLM(idle_layer(layer, tmp_path), speculate=draft)
    for how in (SamplingParams(temperature=0.0, max_tokens=42), SamplingParams(temperature=1.0, seed=1, max_tokens=42)):
        (output,) = llm.generate([PROMPT], how)
        # The first token comes without a draft; then every step says five.
        assert output.stats.steps == 1 + -(-41 // 5)


def test_the_layers_that_are_skipped_are_spelled_as_ranges() -> None:
    assert parse_layers("4/7-9/12") == {4, 7, 8, 9, 12}
    assert format_layers({12, 4, 9, 7, 8}) == "4/7-9/12"
    assert format_layers(parse_layers("0-2/1-3")) == "0-3"


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        ("early_exit:exit=6", "exit=6.*1 to 5"),
        ("early_exit:exit=-1", "exit=-1"),
        ("early_exit:reuse=perhaps", "reuse='perhaps'.*auto, yes, no"),
        ("layer_skip:skip=6", "skip='6'.*layers 0 to 5"),
        ("layer_skip:skip=0-5", "keep some"),
        ("layer_skip:skip=3-1", "not a list of layers"),
        ("layer_skip:skip=x", "not a list of layers"),
        ("layer_skip:skip=0-99999999999", "no model has"),
        ("layer_skip:skip=", "not a list of layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(speculate: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(speculate)
