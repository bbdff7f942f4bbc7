"""Kernels between the GEMMs of a layer: they give what the plain operations give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slipstream.gpu.layer_ops import DeferredNorm, RowPlacement, deferred_gate, rotate_and_store
from tests.interpreted import DEVICE


@pytest.mark.kernels
def test_the_kernels_do_what_the_plain_operations_do() -> None:
    from slipstream.gpu.kernels import layer_kernels as kernels

    torch.manual_seed(0)

    def near(found, expected):
        assert (found.float() - expected.float()).abs().max() <= 2e-3 * expected.abs().max()

    MANY = 2 * kernels._PAIRS // 16 + 5  # heads: more than one program takes, where there are many rows
    for rows, heads, kv_heads, size, kind in (
        (1, 4, 2, 64, torch.float32),
        (5, 9, 3, 16, torch.float16),
        (kernels._MANY_ROWS, MANY, 3, 32, torch.float32),
    ):
        width, page = 80, 8 if rows < 32 else 48
        x = torch.randn(rows, width, device=DEVICE).to(kind)
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, device=DEVICE).to(kind)
        table = torch.polar(torch.ones(()), 6 * torch.rand(99, size // 2)).to(DEVICE)
        positions = torch.randint(0, 99, (rows,)).to(DEVICE)
        turns = table[positions]
        both = torch.full((2, 4, kv_heads, page, size), 7.0, device=DEVICE).to(kind)
        slots = torch.randperm(4 * page)[:rows].to(DEVICE)
        places = slots // page, slots % page
        norm = DeferredNorm(x, 0.3, 1.7)
        for late, bias in ((None, None), (norm, None), (norm, torch.randn_like(qkv[0]))):
            scale = 1.0 if late is None else 1.7 / (x.float().square().sum(1, keepdim=True) + 0.3).sqrt()
            said = qkv.float() * scale + (0 if bias is None else bias)
            q, k, v = said.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
            q, k = (
                torch.view_as_real(
                    torch.view_as_complex(p.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None]
                ).flatten(2)
                for p in (q, k)
            )
            mine, kept = qkv.clone(), both.clone()
            rotate_and_store(mine, RowPlacement(table, positions, *places), kept, heads, late, bias)
            near(mine[:, : heads * size], q.flatten(1))
            near(kept[0, places[0], :, places[1]], k)
            near(kept[1, places[0], :, places[1]], v)
            kept[:, places[0], :, places[1]] = 7.0
            assert kept.eq(7.0).all(), "rows that are not its own were written"
            normed = qkv.float() * 1.7 / (x.float().square().sum(1, keepdim=True) + 0.3).sqrt()
            gate, value = normed.chunk(2, 1)
            near(deferred_gate(qkv, norm), functional.silu(gate) * value)
        a, b, c, d = x, torch.randn_like(x), torch.randn(width, device=DEVICE), torch.randn(width, device=DEVICE)
        wanted = torch.cat([functional.rms_norm(y.float(), (width,), w, 1e-5) for y, w in ((a, c), (b, d))], 1)
        near(kernels.normed((a, b), (c, d), 1e-5), wanted)
        near(kernels.normed((b,), (d,), 1e-5), wanted[:, width:])
