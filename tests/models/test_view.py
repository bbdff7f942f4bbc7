"""TargetView: what a drafter sees of the target."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.attention import tree_segment
from slipstream.sequence import TARGET
from slipstream.tree import TokenTree
from tests.tiny import tiny_directory, tiny_llm


def test_a_draft_pass_over_some_layers_leaves_committed_rows_alone() -> None:
    llm = tiny_llm()
    view, tokens = llm.target, [5, 9, 17, 3]
    table = llm.cache.open([])
    llm.cache.reserve(table, 10)
    with torch.inference_mode():
        llm.model.forward(llm.cache, TARGET, [tree_segment(table, 0, tokens, None)])
        before = llm.cache.stores[TARGET][:, :, table.pages[0], :, :4].clone()
        segment = tree_segment(table, 4, [8], TokenTree.chain(8, [1, 2]))
        output = view.run([segment], [0])
        assert torch.equal(output.logits, view.head(output.hidden))
        assert torch.equal(output.hidden, llm.model.forward(llm.cache, TARGET, [segment], taps=[0]).taps[0])
    assert torch.equal(before, llm.cache.stores[TARGET][:, :, table.pages[0], :, :4])


def fingerprint(llm: LLM) -> str:
    return llm.target.fingerprint


def test_the_fingerprint_is_that_of_the_weights(tmp_path: Path) -> None:
    ours = fingerprint(tiny_llm())
    assert ours == fingerprint(tiny_llm(speculate="ngram")) == fingerprint(tiny_llm(dtype="float16"))
    assert ours != fingerprint(tiny_llm(vocab_size=50))
    assert ours != fingerprint(tiny_llm(seed=1)), "the same shape with other weights"
    source = tiny_directory(0)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] += 0.01  # fine-tuned a little, in one place
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert ours != fingerprint(LLM(tmp_path, speculate=None))
