"""Triton kernels of the head's loss, on a chunk's logits [T, V]: statistics of the rows, and the gradient in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_parts  # noqa: F401  (mends Triton's interpreter)
from .triton_launch import launch

BLOCK = 8192  # logits read at a time by a row's program
ROWS, COLUMNS = 4, 1024  # tile of the gradient
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def row_statistics(
    logits_ptr, labels_ptr, peak_ptr, mass_ptr, target_ptr, stride, start, valid, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Maximum, sum of exp(x - maximum) and the label's logit over the first `valid` columns, one row a program."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    col = tl.arange(0, BLOCK)
    peak = tl.full([], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        # Padding is read, too, and put aside: a bound that is no multiple of 16 would make single loads of wide ones.
        x = tl.load(logits + first + col, mask=first + col < width, other=0.0).to(tl.float32)
        x = tl.where(first + col < valid, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        mass = mass * tl.exp(peak - higher) + tl.exp(x - higher)
        peak = higher
    local = tl.load(labels_ptr + row).to(tl.int64) - start
    mine = (local >= 0) & (local < valid)
    target = tl.load(logits + local, mask=mine, other=0.0).to(tl.float32)
    tl.store(peak_ptr + row, peak)
    tl.store(mass_ptr + row, tl.sum(mass, 0))
    tl.store(target_ptr + row, target)


@triton.jit(do_not_specialize=["rows"])
def gradient_in_place(
    logits_ptr, labels_ptr, lse_ptr, grad_ptr, stride, start, valid, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad * (exp(x - lse) - [column is the label]), exactly 0 in padding and where grad is 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    lse = tl.load(lse_ptr + row, mask=there, other=0.0)
    grad = tl.load(grad_ptr + row, mask=there, other=0.0)
    local = tl.load(labels_ptr + row, mask=there, other=-1).to(tl.int64) - start
    at = logits_ptr + row[:, None] * stride + col[None, :]
    inside = there[:, None] & (col < width)[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x = tl.exp(x - lse[:, None]) - tl.where(local[:, None] == col[None, :], 1.0, 0.0)
    x = tl.where((grad != 0.0)[:, None] & (col < valid)[None, :], x * grad[:, None], 0.0)
    tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, labels: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `linear_cross_entropy._statistics`."""
    peak, mass, target = torch.empty(3, logits.shape[0], dtype=torch.float32, device=logits.device).unbind(0)
    launch(row_statistics, (logits.shape[0],))(
        logits, labels, peak, mass, target, logits.stride(0), start, valid, logits.shape[1], BLOCK=BLOCK, num_warps=8
    )
    return peak, mass, target


def to_gradient(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, start: int, valid: int) -> None:
    """As `linear_cross_entropy._to_gradient`, with contiguous vectors."""
    rows, width = logits.shape
    launch(gradient_in_place, (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS)))(
        logits, labels, lse, grad, logits.stride(0), start, valid, rows, width,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
