"""Drafts with 8-bit GEMM: nearly the exact product, batch-invariant, and never a reason for another text."""

from __future__ import annotations

import pytest
import torch

from slipstream import SamplingParams
from slipstream.models.layers import linear
from tests.heads import random_head
from tests.tiny import tiny_llm

pytestmark = pytest.mark.skipif(not linear.draft_int8_works(), reason="this build of torch has no 8-bit product")


@pytest.mark.parametrize("bias", [True, False])
def test_a_row_is_nearly_right_and_is_batch_invariant(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(700, 600, generator=generator), torch.randn(9, 600, generator=generator)
    added = torch.randn(700, generator=generator) if bias else None
    x[0] *= 1e4  # the first token of a text has such hidden states
    x[3], x[4, 7] = float("nan"), float("inf")
    product = linear.DraftInt8Linear(weight, added)
    together, wanted = product(x), torch.nn.functional.linear(x, weight, added)
    for row in (0, 1, 2, 5, 6, 7, 8):
        assert torch.equal(product(x[row : row + 1])[0], together[row])
        assert (together[row] - wanted[row]).norm() < 0.02 * wanted[row].norm()
    assert not together[3].isfinite().any() and not together[4].isfinite().any()
    assert product(x[:0]).shape == (0, 700)


def test_only_large_weights_on_a_cpu_are_worth_it() -> None:
    assert isinstance(linear.make_draft_linear(torch.randn(600, 600)), linear.DraftInt8Linear)
    assert not isinstance(linear.make_draft_linear(torch.randn(100, 100)), linear.DraftInt8Linear)
    assert not isinstance(linear.make_draft_linear(torch.randn(600, 600, dtype=torch.float16)), linear.DraftInt8Linear)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "mtp", "parallel", "kangaroo", "draft_model"])
def test_texts_are_the_same_alone_and_together(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `match` those of plain decoding; under `rejection` those of each request alone, because q has its bits."""
    monkeypatch.setattr(linear, "_LEAST_DRAFT_WEIGHT", 1)
    speculate = f"{method}:checkpoint={random_head(method)},depth=3,branch=2,nodes=6"
    asked = [[5, 9, 17, 3] * 20, [1, 2, 3], [7] * 140]
    how = [SamplingParams(temperature=1.0, seed=seed, max_tokens=16) for seed in range(3)]
    plain = tiny_llm(context=300, characters=True)
    drafting = tiny_llm(context=300, characters=True, speculate=speculate)
    wanted = [output.token_ids for output in plain.generate(asked, how)]
    assert [output.token_ids for output in drafting.generate(asked, how)] == wanted
    judged = tiny_llm(context=300, characters=True, speculate=speculate, verifier="rejection")
    alone = [judged.generate([prompt], one)[0].token_ids for prompt, one in zip(asked, how, strict=True)]
    assert [output.token_ids for output in judged.generate(asked, how)] == alone
    assert drafting.engine.draft_faults == judged.engine.draft_faults == 0
