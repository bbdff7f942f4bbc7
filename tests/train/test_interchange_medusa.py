"""Medusa heads of other projects: they draft here what they draft there, and go back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from slipstream import SamplingParams
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.interchange import import_drafter
from slipstream.drafters.interchange.foreign import Foreign, read_foreign, write_foreign
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.errors import CorruptFile, DraftMismatch, OptionError, ShapeMismatch, UnsupportedModel
from slipstream.train.interchange.export import export_drafter, load_for
from tests.foreign_heads import TOKENS, WIDTH, folder, medusa_weights, target_directory, target_llm, target_view
from tests.heads import random_head
from tests.invoking import invoke
from tests.tiny import tiny_llm

PUBLISHED = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "someone/tiny"}


def brought(place: Path) -> head_checkpoint.Trained:
    return import_drafter(read_foreign(place), target_view(), "tiny")


def taken(checkpoint: head_checkpoint.Trained) -> Foreign:
    return export_drafter(checkpoint, Path("heads"), "vllm-medusa", target_view())


def vllm_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published weights under the names that vLLM's loader looks for."""
    renamed = {}
    for name, weight in weights.items():
        head, block, *rest = name.split(".")
        renamed[f"blocks.{head}.layers.{block}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"] = (
            weight
        )
    return renamed


@torch.no_grad()
def test_imported_heads_give_the_logits_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = medusa_weights()
    head_checkpoint.save(tmp_path / "heads", brought(folder(PUBLISHED, weights, pickled="medusa_lm_head.pt")))
    llm = target_llm(f"medusa:checkpoint={tmp_path / 'heads'},tree=dynamic")
    drafter = llm.drafter
    assert isinstance(drafter, MedusaDrafter)
    seen: list[tuple[list[int], torch.Tensor]] = []
    healthy = drafter._offer

    def recording(growth: Any) -> Any:
        if growth.logits is not None:
            seen.append((list(growth.sequence.tokens), growth.logits.clone()))
        return healthy(growth)

    monkeypatch.setattr(drafter, "_offer", recording)
    llm.generate([[5, 9, 17, 3] * 34], SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))
    assert llm.engine.draft_faults == 0 and len(seen) > 5
    assert {logits.shape for _, logits in seen} >= {(3, TOKENS)}
    target = LlamaForCausalLM.from_pretrained(target_directory(), dtype=torch.float32).eval()
    for text, logits in seen:
        hidden = target.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]  # from which the root was chosen
        for head, row in enumerate(logits):
            inner = functional.silu(weights[f"{head}.0.linear.weight"] @ hidden + weights[f"{head}.0.linear.bias"])
            assert torch.allclose(row, weights[f"{head}.1.weight"] @ (hidden + inner), atol=1e-4)


def test_published_heads_reach_vllm_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    weights = medusa_weights()
    head_checkpoint.save(tmp_path / "ours", brought(folder(PUBLISHED, weights)))
    foreign = taken(load_for("vllm-medusa", tmp_path / "ours"))
    wanted = vllm_names(weights)
    assert foreign.weights.keys() == wanted.keys()
    assert all(torch.equal(foreign.weights[name], weight) for name, weight in wanted.items())
    assert foreign.config["num_heads"] == 3 and foreign.config["medusa_fc_bias"] is True
    assert foreign.config["truncated_vocab_size"] == foreign.config["vocab_size"] == TOKENS
    write_foreign(tmp_path / "theirs", foreign)
    again = taken(brought(tmp_path / "theirs"))
    assert again.config == foreign.config
    assert all(torch.equal(again.weights[name], weight) for name, weight in foreign.weights.items())


def test_a_part_of_the_vocabulary_goes_out_with_all_rows_and_comes_back_as_the_part() -> None:
    tokens = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))[:40].sort().values
    whole, part = medusa_weights(), vllm_names(medusa_weights(tokens=40)) | {"token_map": tokens}
    checkpoint = brought(folder({"model_type": "medusa"}, part))
    assert torch.equal(checkpoint.vocab, tokens)
    back = taken(checkpoint)
    assert back.config["truncated_vocab_size"] == TOKENS  # vLLM 0.32 loads no other
    assert back.weights.keys() == part.keys()
    others = sorted(set(range(TOKENS)) - set(tokens.tolist()))
    for name, weight in part.items():
        rows = name.startswith("lm_heads")
        assert torch.equal(back.weights[name][tokens] if rows else back.weights[name], weight), name
        assert not rows or (len(back.weights[name]) == TOKENS and not back.weights[name][others].any())
    again = brought(folder(back.config, back.weights))
    assert torch.equal(again.vocab, tokens)
    assert all(torch.equal(again.weights[name], weight) for name, weight in checkpoint.weights.items())
    # vLLM takes the mapped ones of all rows, too.
    cut = brought(folder({"model_type": "medusa"}, vllm_names(whole) | {"token_map": tokens}))
    assert torch.equal(cut.weights["rows"][:40], whole["0.1.weight"][tokens])


def test_heads_without_a_bias_get_one_of_zeros() -> None:
    weights = {name: weight for name, weight in vllm_names(medusa_weights()).items() if not name.endswith("bias")}
    assert not brought(folder({"model_type": "medusa"}, weights)).weights["enter.bias"].any()


def test_what_cannot_be_held_is_refused_by_name() -> None:
    weights = medusa_weights()
    with pytest.raises(UnsupportedModel, match="several blocks per head"):
        brought(folder(PUBLISHED, medusa_weights(blocks=2)))
    with pytest.raises(CorruptFile, match=r"lacks 1\.1\.weight"):
        brought(folder(PUBLISHED, {name: weight for name, weight in weights.items() if name != "1.1.weight"}))
    with pytest.raises(CorruptFile, match="lacks some of its heads"):
        brought(folder(PUBLISHED, {name: weight for name, weight in weights.items() if not name.startswith("1.")}))
    with pytest.raises(ShapeMismatch, match=r"0\.1\.weight is \[120, 64\], but should be \[97, 64\]"):
        brought(folder(PUBLISHED, medusa_weights(tokens=120)))
    with pytest.raises(UnsupportedModel, match=r"has unknown weights: 0\.1\.bias"):
        brought(folder(PUBLISHED, weights | {"0.1.bias": torch.zeros(WIDTH)}))
    with pytest.raises(DraftMismatch, match="token_map names tokens twice"):
        brought(folder({}, vllm_names(medusa_weights(tokens=2)) | {"token_map": torch.tensor([4, 97])}))


def test_heads_with_a_second_matrix_are_not_exported() -> None:
    place, llm = random_head("medusa"), tiny_llm(context=300, characters=True)
    with pytest.raises(OptionError, match=r"second matrix.*own_rows=true"):
        export_drafter(load_for("vllm-medusa", place), place, "vllm-medusa", llm.target)


def test_heads_with_rows_of_their_own_begin_by_saying_what_the_target_says_and_can_be_exported(tmp_path: Path) -> None:
    place, model = random_head("medusa", own_rows=True, heads=2), tiny_llm(context=300, characters=True)
    view = model.target
    foreign = export_drafter(load_for("vllm-medusa", place), place, "vllm-medusa", view)
    known = foreign.weights["token_map"]
    assert torch.equal(foreign.weights["lm_heads.1.weight"][known], view.head_rows(known))
    assert not foreign.weights["blocks.0.layers.0.weight"].any()
    write_foreign(tmp_path / "theirs", foreign)
    done = invoke("import", str(tmp_path / "theirs"), "-o", str(tmp_path / "ours"), "-m", str(model.model.name))
    assert done.exit_code == 0 and "medusa, 61 draft tokens" in done.stdout, done.output
