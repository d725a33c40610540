"""Triton kernels of modulated norms and gated sums: each tensor of tokens is read and written once, forward and backward.

Tensors are [B, N, W], vectors [B, W] with any step from sample to sample. A program takes every so many blocks of ROWS tokens
of one sample, whose vectors it holds. Gradients of vectors and weights are summed in stages in a fixed order, without
atomics: a program sums its tokens, `sum_programs` a sample's programs, `sum_samples` the samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_parts  # noqa: F401  (mends Triton's interpreter)
from .modulation import gradient_tensors, output_tensors
from .triton_launch import launch
from .triton_replay import replayed

TILE = 2048  # elements of a tile
FORWARD, BACKWARD = 660, 528  # programs that share the tokens: five and four for each of an H100's multiprocessors
PARTS, COLUMNS = 32, 64  # tile of the kernels that sum parts


@triton.jit(do_not_specialize=["tokens"])
def modulate_forward(
    x_ptr, branch_ptr, gate_ptr, shift_ptr, scale_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, root_ptr, tokens, eps,
    gate_b, shift_b, scale_b, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs)."""
    sample, col = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = col < WIDTH
    if RESIDUAL:
        gate = tl.load(gate_ptr + sample * gate_b + col, mask=inside, other=0.0).to(tl.float32)
    if NORM:  # y = normalised * factor + offset
        factor = 1.0 + tl.load(scale_ptr + sample * scale_b + col, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift_ptr + sample * shift_b + col, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            offset += factor * tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            factor *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1)):
        token = block * ROWS + tl.arange(0, ROWS)
        present = (token < tokens)[:, None] & inside[None, :]
        row = sample * tokens + token
        place = row[:, None] * WIDTH + col[None, :]
        x = tl.load(x_ptr + place, mask=present, other=0.0).to(tl.float32)
        if RESIDUAL:
            x += gate[None, :] * tl.load(branch_ptr + place, mask=present, other=0.0).to(tl.float32)
            rounded = x.to(sum_ptr.dtype.element_ty)  # the norm is that of the sum as stored
            tl.store(sum_ptr + place, rounded, mask=present)
            x = rounded.to(tl.float32)
        if NORM:
            if LAYER:
                x = tl.where(present, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
            root = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
            tl.store(root_ptr + row, root, mask=token < tokens)
            y = x * root[:, None] * factor[None, :] + offset[None, :]
            tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["tokens"])
def modulate_backward(
    x_ptr, branch_ptr, gate_ptr, scale_ptr, weight_ptr, root_ptr, grad_ptr, grad_sum_ptr, grad_x_ptr, grad_branch_ptr,
    sums_ptr, tokens, gate_b, scale_b, plane, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    LAYER: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TOTAL: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Grid (B, programs). Sums [.., B, programs, W]: of a norm those of the gradient, and of it times the normalised values;
    of a residual those of the sum's gradient times the branch."""
    sample, col = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = col < WIDTH
    if RESIDUAL:
        gate = tl.load(gate_ptr + sample * gate_b + col, mask=inside, other=0.0).to(tl.float32)
        gate_sum = tl.zeros([ROWS, PADDED], tl.float32)
    if NORM:
        factor = 1.0 + tl.load(scale_ptr + sample * scale_b + col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT:
            factor *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
        first_sum = tl.zeros([ROWS, PADDED], tl.float32)
        second_sum = tl.zeros([ROWS, PADDED], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(tokens, ROWS), tl.num_programs(1)):
        token = block * ROWS + tl.arange(0, ROWS)
        present = (token < tokens)[:, None] & inside[None, :]
        row = sample * tokens + token
        place = row[:, None] * WIDTH + col[None, :]
        inner = tl.zeros([ROWS, PADDED], tl.float32)
        if TOTAL:  # loads come first, so that sums over a row do not wait for one after the other
            grad_sum = tl.load(grad_sum_ptr + place, mask=present, other=0.0)
        if RESIDUAL:
            branch = tl.load(branch_ptr + place, mask=present, other=0.0)
        if NORM:
            x = tl.load(x_ptr + place, mask=present, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + place, mask=present, other=0.0).to(tl.float32)
            root = tl.load(root_ptr + row, mask=token < tokens, other=0.0)
            if LAYER:
                x = tl.where(present, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
            x *= root[:, None]
            first_sum += grad
            second_sum += grad * x
            grad *= factor[None, :]
            inner = grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]
            if LAYER:
                inner -= (tl.sum(grad, 1) / WIDTH)[:, None]
            inner *= root[:, None]
        if TOTAL:
            inner += grad_sum.to(tl.float32)
        if NORM:
            tl.store(grad_x_ptr + place, inner.to(grad_x_ptr.dtype.element_ty), mask=present)
        if RESIDUAL:
            gate_sum += inner * branch.to(tl.float32)
            grad_branch = (inner * gate[None, :]).to(grad_branch_ptr.dtype.element_ty)
            tl.store(grad_branch_ptr + place, grad_branch, mask=present)
    part = sums_ptr + (sample * tl.num_programs(1) + tl.program_id(1)) * WIDTH + col
    if NORM:
        tl.store(part, tl.sum(first_sum, 0), mask=inside)
        tl.store(part + plane, tl.sum(second_sum, 0), mask=inside)
        part += 2 * plane
    if RESIDUAL:
        tl.store(part, tl.sum(gate_sum, 0), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def sum_programs(
    sums_ptr, scale_ptr, weight_ptr, bias_ptr, grad_shift_ptr, grad_scale_ptr, grad_gate_ptr, parts_ptr, programs, scale_b,
    plane, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks of columns): gradients of a sample's vectors, and its parts of the weights' [2, B, W]."""
    sample, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < WIDTH
    first = tl.zeros([PARTS, COLUMNS], tl.float32)
    second = tl.zeros([PARTS, COLUMNS], tl.float32)
    third = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        present = (part < programs)[:, None] & inside[None, :]
        place = sums_ptr + (sample * programs + part)[:, None] * WIDTH + col[None, :]
        if NORM:
            first += tl.load(place, mask=present, other=0.0)
            second += tl.load(place + plane, mask=present, other=0.0)
            place += 2 * plane
        if RESIDUAL:
            third += tl.load(place, mask=present, other=0.0)
    out = sample * WIDTH + col
    if NORM:
        of_shift, of_scale = tl.sum(first, 0), tl.sum(second, 0)
        tl.store(grad_shift_ptr + out, of_shift.to(grad_shift_ptr.dtype.element_ty), mask=inside)
        if WEIGHT:
            scale = 1.0 + tl.load(scale_ptr + sample * scale_b + col, mask=inside, other=0.0).to(tl.float32)
            tl.store(parts_ptr + out, of_scale * scale, mask=inside)
            of_scale *= tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
            if BIAS:
                tl.store(parts_ptr + tl.num_programs(0) * WIDTH + out, of_shift * scale, mask=inside)
                of_scale += of_shift * tl.load(bias_ptr + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_scale_ptr + out, of_scale.to(grad_scale_ptr.dtype.element_ty), mask=inside)
    if RESIDUAL:
        tl.store(grad_gate_ptr + out, tl.sum(third, 0).to(grad_gate_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["samples"])
def sum_samples(
    parts_ptr, grad_weight_ptr, grad_bias_ptr, samples, WIDTH: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns): gradients of the weights."""
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < WIDTH
    first = tl.zeros([PARTS, COLUMNS], tl.float32)
    second = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, samples, PARTS):
        sample = start + tl.arange(0, PARTS)
        present = (sample < samples)[:, None] & inside[None, :]
        place = sample.to(tl.int64)[:, None] * WIDTH + col[None, :]
        first += tl.load(parts_ptr + place, mask=present, other=0.0)
        if BIAS:
            second += tl.load(parts_ptr + samples * WIDTH + place, mask=present, other=0.0)
    tl.store(grad_weight_ptr + col, tl.sum(first, 0).to(grad_weight_ptr.dtype.element_ty), mask=inside)
    if BIAS:
        tl.store(grad_bias_ptr + col, tl.sum(second, 0).to(grad_bias_ptr.dtype.element_ty), mask=inside)


def _tile(width: int) -> dict[str, int]:
    padded = max(16, triton.next_power_of_2(width))
    warps = min(16, max(4, padded // 256))
    return {"WIDTH": width, "PADDED": padded, "ROWS": max(1, TILE // padded), "num_warps": warps}


def _programs(wanted: int, samples: int, tokens: int, rows: int) -> int:
    """Of one sample."""
    return max(1, min(triton.cdiv(tokens, rows), wanted // samples))


def _steps(*vectors: Tensor | None) -> list[int]:
    return [0 if x is None else x.stride(0) for x in vectors]


@replayed
def forward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    layer: bool,
    eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of contiguous x and branch [B, N, W], vectors [B, W] of step 1 and weights [W]: what `modulation._run` returns."""
    y, total, root = output_tensors(x, branch, shift is not None)
    samples, tokens, width = x.shape
    tile = _tile(width)
    launch(modulate_forward, (samples, _programs(FORWARD, samples, tokens, tile["ROWS"])))(
        x, branch, gate, shift, scale, weight, bias, y, total, root, tokens, eps, *_steps(gate, shift, scale), **tile,
        LAYER=layer, NORM=shift is not None, RESIDUAL=branch is not None, WEIGHT=weight is not None, BIAS=bias is not None,
    )  # fmt: skip
    return y, total, root


@replayed
def backward(
    x: Tensor | None,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    root: Tensor | None,
    grad: Tensor | None,
    grad_sum: Tensor | None,
    layer: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, branch, gate, shift, scale, weight, bias); `x` is what was normalised, `grad_sum` the sum's gradient."""
    like = branch if x is None else x
    assert like is not None
    samples, tokens, width = like.shape
    tile, norm, residual = _tile(width), x is not None, branch is not None
    found = gradient_tensors(x, branch, gate, scale, weight, bias)
    grad_x, grad_branch, grad_gate, grad_shift, grad_scale, grad_weight, grad_bias = found
    wanted = BACKWARD // 2 if norm and residual else BACKWARD  # which holds twice as much
    programs = _programs(wanted, samples, tokens, tile["ROWS"])
    sums = like.new_empty((2 * norm + residual, samples, programs, width), dtype=torch.float32)
    launch(modulate_backward, (samples, programs))(
        x, branch, gate, scale, weight, root, grad, grad_sum, grad_x, grad_branch, sums, tokens, *_steps(gate, scale),
        sums.stride(0), **tile, LAYER=layer, NORM=norm, RESIDUAL=residual, TOTAL=grad_sum is not None,
        WEIGHT=weight is not None,
    )  # fmt: skip
    columns = triton.cdiv(width, COLUMNS)
    parts = None if weight is None else like.new_empty((1 + (bias is not None), samples, width), dtype=torch.float32)
    launch(sum_programs, (samples, columns))(
        sums, scale, weight, bias, grad_shift, grad_scale, grad_gate, parts, programs, *_steps(scale), sums.stride(0),
        WIDTH=width, PARTS=PARTS, COLUMNS=COLUMNS, NORM=norm, RESIDUAL=residual, WEIGHT=weight is not None,
        BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    if weight is not None:
        launch(sum_samples, (columns,))(
            parts, grad_weight, grad_bias, samples, WIDTH=width, PARTS=PARTS, COLUMNS=COLUMNS, BIAS=bias is not None,
            num_warps=4,
        )  # fmt: skip
    return found
