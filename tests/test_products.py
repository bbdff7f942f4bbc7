"""Products that do what follows them: what they give is what the plain operations give, and when they are taken."""

from __future__ import annotations

import torch

from slipstream import products
from tests.interpreted import interpreted

KERNELS = """
import torch
from torch.nn import functional
from slipstream import product_kernels as kernels
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
kind = torch.bfloat16 if device == "cuda" else torch.float16

def near(found, expected):
    assert (found.float() - expected).abs().max() <= 1e-2 * expected.abs().max(), (rows, inner, width)

for rows, inner, width in ((64, 320, 200), (17, 512, 64), (33, 1000, 4100), (64, 1536, 72)):
    x = torch.randn(rows, inner, device=device).to(kind)
    w = (torch.randn(2 * width, inner, device=device) / inner**0.5).to(kind)
    scale = 1.7 / (x.float().square().sum(1, keepdim=True) + 0.3).sqrt()
    gate, value = ((x.float() @ w.float().T) * scale).chunk(2, 1)
    expected = functional.silu(gate) * value
    found = kernels.gates(x, w, 0.3, 1.7)
    near(found, expected)
    total = torch.randn(rows, 2*width, device=device).to(kind)
    expected = total.float() + x.float() @ w.float().T
    for _ in range(2):
        mine = total.clone()
        kernels.onto_(mine, x, w)
        near(mine, expected)
    if inner % 512 == 0 and width % 8 == 0:
        alone = x[:1]
        gate, value = ((alone.float() @ w.float().T) * scale[:1]).chunk(2, 1)
        near(kernels.row_gates(alone, w, 0.3, 1.7), functional.silu(gate) * value)
        mine = total[:1].clone()
        kernels.row_onto_(mine, alone, w)
        near(mine, expected[:1])
"""


def test_the_kernels_do_what_the_plain_operations_do() -> None:
    interpreted(KERNELS)


def test_they_are_for_gpus_alone() -> None:
    x, weight = torch.zeros(64, 8192).bfloat16(), torch.zeros(8192, 8192).bfloat16()
    assert not products.pays(x, weight)
