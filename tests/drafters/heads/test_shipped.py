"""The drafters that come with the package: small, described, found by name, lossless, and worth having."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from slipstream import LLM, SamplingParams
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.weight_codec import SIX
from slipstream.drafters.interchange.foreign import write_foreign
from slipstream.drafters.registry import drafter_class
from slipstream.train.interchange.export import HF_MODEL, export_drafter, load_for
from slipstream.train.run import learned_methods

SHIPPED = Path(head_checkpoint.__file__).parents[1] / "shipped"
DEFAULT_TARGET = "2ccae5729066b2e7"  # the fingerprint of SmolLM2-135M-Instruct
PROMPTS = [
    "Write a Python function that reverses a string.",
    "Tom has 12 apples and buys 30 more. He gives away 17. How many are left?",
    "Give me a JSON object that describes a book.",
    "Why do leaves change colour in autumn?",
]
# Tokens per step on these prompts, which depend on nothing but the files: a little below what was measured.
LEAST = {"eagle3": 2.6, "mtp": 2.3, "draft_model": 2.0, "kangaroo": 2.0, "parallel": 2.0, "medusa": 1.6}


def test_every_method_that_learns_is_shipped_and_small() -> None:
    assert {path.name for path in SHIPPED.iterdir()} == {f"{method}-{DEFAULT_TARGET}" for method in learned_methods()}
    sizes = [file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()]
    assert max(sizes) < 16_000_000 and sum(sizes) < 30_000_000


@pytest.mark.parametrize("method", learned_methods())
def test_a_shipped_drafter_describes_itself(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))  # a user's own drafter is not found instead
    place = head_checkpoint.find(method, DEFAULT_TARGET)
    assert place is not None
    drafter = head_checkpoint.load(place)
    drafter.require(method, DEFAULT_TARGET, place)
    kind = drafter_class(method)
    assert (
        kind.name == method
        and len(drafter.vocab) == (16_384 if method in ("medusa", "draft_model") else 8192)
        and drafter.vocab.diff().min() > 0
    )
    with safe_open(place / head_checkpoint.WEIGHTS, "pt") as file:
        in_six = any(name.endswith(SIX) for name in file.keys())  # noqa: SIM118 (it is no mapping)
    assert drafter.figures["stored_as"] == ("6 bits" if in_six else "int8")
    assert drafter.provenance["arguments"]["method"] == method
    assert drafter.provenance["data"]["counts"]["kept"] > 60_000


@pytest.mark.real_model
def test_shipped_drafters_give_the_plain_text_in_fewer_steps(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_checkpoint, "directory", lambda method, fingerprint: SHIPPED / "nothing")
    llm = LLM(smollm2_path, speculate=None, max_model_len=512)
    greedy, sampled = SamplingParams(temperature=0.0, max_tokens=32), SamplingParams(seed=3, top_p=0.9, max_tokens=16)
    asked = [[{"role": "user", "content": prompt}] for prompt in [*PROMPTS, *PROMPTS[:2]]]
    how = [greedy] * len(PROMPTS) + [sampled] * 2
    plain = [output.token_ids for output in llm.chat(asked, how)]
    for method, least in LEAST.items():
        llm.use(f"{method}:nodes=12,branch=4")
        outputs = llm.chat(asked, how)
        assert [output.token_ids for output in outputs] == plain, method
        assert llm.engine.draft_faults == 0, method
        certain = outputs[: len(PROMPTS)]
        per_step = sum(output.stats.emitted for output in certain) / sum(output.stats.steps for output in certain)
        assert per_step >= least, f"{method}: {per_step:.2f} tokens per step"


@pytest.mark.real_model
def test_the_shipped_draft_becomes_a_model_that_can_verify_in_a_cascade(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    llm = LLM(smollm2_path, speculate=None, max_model_len=512, quantize="none")
    place = head_checkpoint.own("draft_model", llm.model.fingerprint)
    write_foreign(
        tmp_path / "draft",
        export_drafter(load_for(HF_MODEL, place), place, HF_MODEL, llm.target),
    )
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    how = SamplingParams(temperature=0.0, max_tokens=24)
    plain = [output.token_ids for output in llm.chat(asked, how)]
    llm.use(f"cascade:suffix+draft_model:model={tmp_path / 'draft'},depth=5")
    outputs = llm.chat(asked, how)
    assert [output.token_ids for output in outputs] == plain
    assert sum(output.stats.emitted for output in outputs) / sum(output.stats.steps for output in outputs) >= 2.0
