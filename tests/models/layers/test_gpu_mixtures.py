"""Mixtures of experts on a GPU: the kernels do what the plain operations do, for any routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from slipstream.attention import tree_segment
from slipstream.cache import PagedCache
from slipstream.models import decoder
from slipstream.models.config import ModelConfig
from slipstream.models.formats.hf import HFCheckpoint
from slipstream.models.layers.gpu_mixture import GroupedMixture, Stacks
from slipstream.models.layers.linear import PlainLinear
from slipstream.models.layers.mlp import AfterNorm, MixtureMLP, make_mlp
from slipstream.models.layers.norm import Stream, UnitNorm
from tests.interpreted import DEVICE
from tests.models.test_families import build

pytestmark = pytest.mark.kernels


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory, which kernels write into, has nothing that could be taken for a result."""

    def full(*shape: int, dtype: torch.dtype, **rest: Any) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else -(2**30), dtype=dtype, **rest)

    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", full)


def random(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(kind)


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return bool((found.double() - expected).abs().max() <= bound * expected.abs().max())


def test_choices_and_groups(poisoned: None) -> None:
    from slipstream.gpu.kernels import mixture_kernels as kernels

    for rows, experts, per_token in ((1, 4, 1), (5, 8, 2), (33, 6, 3)):
        logits = 3 * random(rows, experts)
        shares = torch.softmax(logits.double(), 1)
        best = shares.topk(per_token, 1).indices.sort(1).values
        for normed in (False, True):
            chosen, found = kernels.choose(logits, per_token, normed)
            assert torch.equal(chosen.long(), best)
            expected = shares.gather(1, best)
            assert near(found, expected / expected.sum(1, keepdim=True) if normed else expected, 1e-6)
    for rows, experts, per_token in ((1, 4, 1), (5, 8, 2), (700, 3, 2)):  # the last is more than is grouped at a time
        chosen = torch.rand(rows, experts, device=DEVICE).argsort(1)[:, :per_token].int().contiguous()
        groups = kernels.group(chosen, experts)
        flat = chosen.flatten()
        for expert in range(experts):
            mine = (flat == expert).nonzero().flatten()
            assert groups.counts[expert] == len(mine)
            assert torch.equal(groups.order[expert, : len(mine)].long(), mine)
    strange = torch.full((3, 6), float("nan"), device=DEVICE)
    strange[1, 2] = float("inf")
    chosen, _ = kernels.choose(strange, 4, True)
    assert (chosen.diff(dim=1) > 0).all() and chosen.min() >= 0 and chosen.max() < 6, "no expert, or one twice"


def test_mixtures(poisoned: None) -> None:
    def reference(x, mixture, chosen, shares):
        gate_up, down = (stack.double() for stack in mixture.experts)
        total = torch.zeros_like(x, dtype=torch.float64)
        for row in range(len(x)):
            for expert, share in zip(chosen[row].tolist(), shares[row].tolist(), strict=True):
                gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
                total[row] += share * (down[expert] @ (functional.silu(gate) * up))
        return total

    float32, float16 = (torch.float32, 2e-5), (torch.float16, 5e-3)
    bfloat16 = (torch.bfloat16, 3e-2) if DEVICE == "cuda" else float16  # of which the interpreter makes no products
    for rows, experts, per_token, width, inner, (kind, bound) in (
        (0, 4, 2, 80, 48, float32),
        (1, 4, 1, 80, 48, float32),
        (1, 8, 2, 300, 40, bfloat16),
        (5, 8, 2, 72, 136, float16),
        (5, 6, 2, 37, 19, float32),
        (33, 4, 2, 80, 48, float32),  # more than a block of pairs for some expert
        (33, 8, 1, 64, 48, bfloat16),
        (70, 4, 2, 80, 70, float32),  # the large tiles
    ):
        x, router = random(rows, width, kind=kind), random(experts, width, kind=kind)
        stacks = Stacks(
            random(experts, 2 * inner, width, kind=kind) / width**0.5, random(experts, width, inner, kind=kind)
        )
        for crowd in ("free", "idle", "one") if rows < 70 else ("free",):
            if crowd == "idle":  # an expert that nobody chooses, whose weights must not be read
                x[:, 0], router[:, 0], router[1, 0] = 9.0, 0.0, -99.0
                for stack in stacks:
                    stack[1] = float("nan")
            if crowd == "one":  # all rows choose the last one
                router[-1, 0] = 99.0
            mixture = GroupedMixture(PlainLinear(router, None), stacks, per_token, True)
            chosen, shares = mixture.choose(x)
            assert crowd == "free" or not (chosen == 1).any()
            assert crowd != "one" or (chosen == experts - 1).any(1).all()
            expected = reference(x, mixture, chosen, shares)
            total = random(rows, 2 * width, kind=kind)[:, :width]
            before = total.clone()
            mixture.onto_(total, x)
            assert not rows or near(total, before.double() + expected, bound)
            if crowd == "free":
                again = torch.zeros_like(before)
                mixture.onto_(again, x)
                assert torch.equal(mixture(x), again), "the same rows gave something else"

    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mixture(x)
        x.copy_(random(*x.shape))
        graph.replay()
        assert torch.equal(captured, mixture(x)), "the graph has made a choice of its own"


@pytest.mark.parametrize("norm_topk", [False, True])
def test_mixtures_as_they_are_loaded(norm_topk: bool) -> None:
    config = ModelConfig(
        "llama", 9, 40, 1, 2, 2, 20, 50, 64, experts=5, experts_per_token=2, expert_size=50, norm_topk=norm_topk
    )
    torch.manual_seed(1)
    weights = {"router": random(5, 40)}
    for expert in range(5):
        weights |= {f"experts.{expert}.{name}": random(50, 40) / 6 for name in ("gate", "up")}
        weights[f"experts.{expert}.down"] = random(40, 50)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None, columns: Any = None) -> PlainLinear:
        return PlainLinear(weight, bias)

    def loaded(grouped: bool) -> tuple[Any, list[str]]:
        asked: list[str] = []

        def read(name: str) -> torch.Tensor:
            asked.append(name)
            return weights[name]

        return make_mlp(config, True, read, AfterNorm(read, None), linear, grouped), asked

    (plain, asked_by_plain), (mixture, asked) = loaded(False), loaded(True)
    assert asked == asked_by_plain
    assert isinstance(mixture, GroupedMixture)
    assert mixture.experts.gate_up.shape == (5, 128, 40) and mixture.experts.down.shape == (5, 40, 64)
    x = random(11, 40)
    assert near(mixture(x), plain(x).double(), 1e-5)


def test_mixtures_in_a_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("mixtral", tmp_path)
    if DEVICE == "cpu":  # layers as they are on a GPU: attention does not rotate, rows have no constant
        monkeypatch.setattr(decoder, "native_shape", lambda config: None)
        monkeypatch.setattr(UnitNorm, "stream", lambda norm, x: Stream(x, norm))

    def hidden(grouped: bool) -> torch.Tensor:
        monkeypatch.setattr(decoder, "paged_available", lambda device: grouped)  # for attention it stays as it is
        model = decoder.Decoder(HFCheckpoint(tmp_path), torch.float32, DEVICE)
        assert model.captures == grouped
        assert all(isinstance(layer.mlp, GroupedMixture if grouped else MixtureMLP) for layer in model.layers)
        config, cache = model.config, PagedCache(2, DEVICE)
        cache.add_store("here", config.layers, 2, config.kv_heads, config.head_dim, model.dtype)
        table = cache.open([])
        cache.reserve(table, 9)
        with torch.inference_mode():
            return model.forward(cache, "here", [tree_segment(table, 0, list(range(3, 12)), None)]).hidden

    plain = hidden(grouped=False)
    assert near(hidden(grouped=True), plain.double(), 1e-4)
