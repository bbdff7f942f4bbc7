"""The real SmolLM2-135M-Instruct: logits, and the same text with every drafter."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.twin import transformers_twin
from benchmarks.workloads import EDIT, STORY, SUMMARY
from slipstream import LLM, SamplingParams
from slipstream.attention import tree_segment
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.sequence import TARGET
from slipstream.tree import TokenTree

pytestmark = [pytest.mark.real_model, pytest.mark.usefixtures("two_threads")]

PROMPTS = [EDIT[1], SUMMARY[3], STORY[0], "What is 17 * 23? Think step by step.", "Hi!", "List three fruits as JSON."]
DRAFTERS: list[Any] = ["ngram", "suffix", "suffix:min_confidence=0,nodes=40,depth=12", "suffix:shared=true"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, speculate=None, max_model_len=2048)


@pytest.fixture(scope="module")
def twin(smollm2_path: Path) -> Any:
    """The same weights in transformers."""
    return transformers_twin(open_checkpoint(smollm2_path))


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def test_logits_are_those_of_transformers_for_a_prompt_and_a_tree(llm: LLM, twin: Any) -> None:
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode_chat(conversations()[0])
    chooser = random.Random(0)
    tree = TokenTree(prompt[-1])
    for _ in range(20):
        tree.add(chooser.randrange(len(tree)), chooser.randrange(49_152))
    table = llm.cache.open([])
    llm.cache.reserve(table, len(prompt) + len(tree))
    with torch.no_grad():
        llm.model.forward(llm.cache, TARGET, [tree_segment(table, 0, prompt[:-1], None)])
        ours = llm.model.forward(llm.cache, TARGET, [tree_segment(table, len(prompt) - 1, prompt[-1:], tree)]).logits
        for node in (0, 3, 11, 20):
            path = prompt + tree.path_tokens(node)
            theirs = twin(torch.tensor([path])).logits[0, -1]
            # Logits span some 40 units; both sides round in float32 through 30 layers.
            torch.testing.assert_close(ours[node], theirs, atol=2e-3, rtol=1e-4)
            assert int(ours[node].argmax()) == int(theirs.argmax())
    llm.cache.release(table)


def test_greedy_text_is_that_of_transformers(llm: LLM, twin: Any) -> None:
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    with torch.no_grad():
        theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0, len(prompt) :].tolist()
    (ours,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32))
    assert ours.token_ids == theirs


def test_every_drafter_gives_the_plain_text(llm: LLM) -> None:
    """Greedy and sampled requests in one batch, and each alone."""
    assert llm.exact
    how = [SamplingParams(temperature=0.8 * (i % 2), top_p=0.95, seed=i, max_tokens=24) for i in range(len(PROMPTS))]
    llm.use(None)
    plain = [llm.chat(c, q)[0].token_ids for c, q in zip(conversations(), how, strict=True)]
    assert [o.token_ids for o in llm.chat(conversations(), how)] == plain
    for drafter in DRAFTERS:
        llm.use(drafter)
        outputs = llm.chat(conversations(), how)
        assert [o.token_ids for o in outputs] == plain, drafter
        assert sum(o.stats.accepted for o in outputs) > 0
        assert llm.engine.draft_faults == 0


def test_the_model_as_its_own_draft_accepts_everything(llm: LLM, smollm2_path: Path) -> None:
    llm.use({"method": "draft_model", "model": str(smollm2_path), "depth": 4, "nodes": 4})
    for how in (SamplingParams(temperature=0, max_tokens=20), SamplingParams(temperature=1.0, seed=4, max_tokens=20)):
        (output,) = llm.chat(conversations()[2], how)
        assert output.stats.steps == 4
        assert output.stats.accepted == 16
    llm.use(None)


def test_under_rejection_the_model_as_its_own_draft_accepts_everything_too(smollm2_path: Path) -> None:
    draft = {"method": "draft_model", "model": str(smollm2_path), "depth": 4, "nodes": 4}
    llm = LLM(smollm2_path, speculate=draft, verifier="rejection", max_model_len=512)
    (output,) = llm.chat(conversations()[2], SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=15))
    assert output.stats.accepted == 12
    assert not output.stats.lossy


def test_a_built_in_model_needs_neither_transformers_nor_gguf(smollm2_path: Path) -> None:
    """Its text, and that of its trained drafter, in a process in which those packages cannot be imported."""
    code = """
import sys
sys.modules["transformers"] = sys.modules["gguf"] = None
from slipstream import LLM, SamplingParams
llm = LLM("smollm2-135m", speculate="suffix+eagle3", max_model_len=512)
output = llm.chat([{"role": "user", "content": "Name the months."}], SamplingParams(temperature=0, max_tokens=12))[0]
assert output.stats.accepted > 0
print(output.text)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The months are: January")
