# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The Triton kernels of `fused.py`. Importing this file imports triton, so only `fused.py` does, and only on a GPU.

One program per row, so that no row depends on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # columns of one program, if a row is split
_TOKENS = 4096  # tokens of a row that are read at a time


@triton.jit
def _unit_norm(x, out, eps, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, 0) + eps * eps)
    tl.store(out + row * width + columns, (values / length).to(out.dtype.element_ty), mask=columns < width)


def unit_norm(x: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / hypot(|x|, eps) of each row of [rows, width]."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if rows:
        _unit_norm[(rows,)](x, out, eps, x.stride(0), width, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _rotate(x, turns, out, x_stride, out_stride, pairs, period, BACK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    first = tl.load(x + row * x_stride + 2 * pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
    turn = turns + ((row % period) * pairs + pair) * 2
    real = tl.load(turn, mask=inside, other=0.0)
    imaginary = tl.load(turn + 1, mask=inside, other=0.0)
    if BACK:
        imaginary = -imaginary
    kind = out.dtype.element_ty
    tl.store(out + row * out_stride + 2 * pair, (first * real - second * imaginary).to(kind), mask=inside)
    tl.store(out + row * out_stride + 2 * pair + 1, (first * imaginary + second * real).to(kind), mask=inside)


def rotate(x: torch.Tensor, turns: torch.Tensor, out: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Pairs of x [rows, 2n] times complex turns [period, n] or their conjugates; row r uses turns[r % period]."""
    rows, width = x.shape
    if rows:
        grid = (rows, triton.cdiv(width // 2, _COLUMNS))
        block = min(_COLUMNS, triton.next_power_of_2(width // 2))
        numbers = torch.view_as_real(turns)
        _rotate[grid](
            x, numbers, out, x.stride(0), out.stride(0), width // 2, len(turns), BACK=back, BLOCK=block
        )  # fmt: skip
    return out


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def gate(both: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times the second half: [rows, 2n] -> [rows, n]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    if rows:
        _gate[(rows, triton.cdiv(width, _COLUMNS))](both, out, width, BLOCK=_COLUMNS)
    return out


@triton.jit
def _gate_back(both, wanted, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    here = row * 2 * width + columns
    gate = tl.load(both + here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + here + width, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(wanted + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    open = tl.sigmoid(gate)
    kind = out.dtype.element_ty
    tl.store(out + here, (slope * up * open * (1.0 + gate * (1.0 - open))).to(kind), mask=inside)
    tl.store(out + here + width, (slope * gate * open).to(kind), mask=inside)


def gate_back(both: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The gradient of `gate`: [rows, 2n] and [rows, n] -> [rows, 2n]."""
    rows, width = slope.shape
    out = torch.empty_like(both)
    if rows:
        _gate_back[(rows, triton.cdiv(width, _COLUMNS))](both, slope, out, width, BLOCK=_COLUMNS)
    return out


@triton.jit
def _cross_entropy(logits, probabilities, losses, facts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), float("-inf"), tl.float32)
    total, weighted, mass = 0.0, 0.0, 0.0
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        scores = tl.load(logits + row * WIDTH + columns, mask=inside, other=float("-inf")).to(tl.float32)
        share = tl.load(probabilities + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, tl.max(scores, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(scores - higher), 0)
        peak = higher
        weighted += tl.sum(tl.where(inside, share * scores, 0.0), 0)
        mass += tl.sum(share, 0)
    norm = peak + tl.log(total)
    tl.store(losses + row, norm * mass - weighted)
    tl.store(facts + 2 * row, norm)
    tl.store(facts + 2 * row + 1, mass)


@triton.jit
def _cross_entropy_back(logits, probabilities, slopes, facts, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    slope, norm, mass = tl.load(slopes + row), tl.load(facts + 2 * row), tl.load(facts + 2 * row + 1)
    scores = tl.load(logits + row * width + columns, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.load(probabilities + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gradient = slope * (tl.exp(scores - norm) * mass - share)
    tl.store(out + row * width + columns, gradient.to(out.dtype.element_ty), mask=inside)


def cross_entropy(logits: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows [rows, tokens] each: the losses, float32 [rows], and what their gradient needs, [rows, 2]."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    facts = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    if rows:
        _cross_entropy[(rows,)](logits, probabilities, losses, facts, WIDTH=width, BLOCK=_TOKENS)
    return losses, facts


def cross_entropy_back(
    logits: torch.Tensor, probabilities: torch.Tensor, slopes: torch.Tensor, facts: torch.Tensor
) -> torch.Tensor:
    """The gradient of the logits, [rows, tokens], from those of the losses, float32 [rows]."""
    rows, width = logits.shape
    out = torch.empty_like(logits)
    if rows:
        grid = (rows, triton.cdiv(width, _TOKENS))
        _cross_entropy_back[grid](logits, probabilities, slopes, facts, out, width, BLOCK=_TOKENS)
    return out
