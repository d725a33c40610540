"""Triton kernels of the norms: one forward and one backward for all forms, each tensor read and written once.

Tensors are [T, G, W]: a norm over the W features of each of G groups (heads; G = 1 for the block's norms). A tile is ROWS
rows of W padded to a power of two. What the backward pass needs beside its inputs is the inverse root per row; mean,
normalised values and gate are computed again from registers. Gradients of weights are summed in two stages in a fixed
order, without atomics: a program sums its tokens, and PyTorch sums the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import (
    cuda_norms,
    triton_parts,  # noqa: F401  (mends Triton's interpreter)
)
from .norms import output_tensors
from .triton_launch import launch
from .triton_replay import replayed

TILE = 4096  # elements of a tile
PROGRAMS = 1584  # that share the tokens where weights have gradients: twelve for each of an H100's multiprocessors


@triton.jit
def at(ptr, token, group, col, stride_t, stride_g, stride_w, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """PACKED: groups lie side by side, which the compiler needs to know for wide loads where WIDTH is no multiple of 16."""
    step = WIDTH if PACKED else stride_g
    return ptr + (token * stride_t + group * step)[:, None] + (col * stride_w)[None, :]


@triton.jit(do_not_specialize=["rows"])
def norm_forward(
    x_ptr, residual_ptr, gate_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, scale_ptr, rows, eps,
    x_t, x_g, x_w, residual_t, residual_g, residual_w, gate_t, gate_g, gate_w,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, LAYER: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, group = row // GROUPS, row % GROUPS
    col = tl.arange(0, PADDED)
    present = (row < rows)[:, None] & (col < WIDTH)[None, :]
    x = tl.load(at(x_ptr, token, group, col, x_t, x_g, x_w, WIDTH, PACKED), mask=present, other=0.0).to(tl.float32)
    out = row[:, None] * WIDTH + col[None, :]
    if RESIDUAL:
        where = at(residual_ptr, token, group, col, residual_t, residual_g, residual_w, WIDTH, PACKED)
        x += tl.load(where, mask=present, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)  # the norm is that of the sum as stored
        tl.store(sum_ptr + out, rounded, mask=present)
        x = rounded.to(tl.float32)
    if LAYER:
        x = tl.where(present, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    y = x * scale[:, None]
    if WEIGHT:
        place = (group * WIDTH)[:, None] + col[None, :]
        y *= tl.load(weight_ptr + place, mask=present, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + place, mask=present, other=0.0).to(tl.float32)
    if GATE:
        where = at(gate_ptr, token, group, col, gate_t, gate_g, gate_w, WIDTH, PACKED)
        y *= tl.sigmoid(tl.load(where, mask=present, other=0.0).to(tl.float32))
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["tokens"])
def norm_backward(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, scale_ptr, grad_ptr, grad_sum_ptr, grad_x_ptr, grad_gate_ptr,
    grad_weight_ptr, grad_bias_ptr, tokens, x_t, x_g, x_w, gate_t, gate_g, gate_w, grad_t, grad_g, grad_w,
    grad_sum_t, grad_sum_g, grad_sum_w, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr, LAYER: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (programs, 1), or (G, programs) with weights, where a program takes every so many blocks of one group."""
    col = tl.arange(0, PADDED)
    if WEIGHT:
        only = tl.program_id(0)
        start, step, rows = tl.program_id(1), tl.num_programs(1), tokens
        place = only * WIDTH + col
        weight = tl.load(weight_ptr + place, mask=col < WIDTH, other=0.0).to(tl.float32)
        bias = tl.zeros([PADDED], tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + place, mask=col < WIDTH, other=0.0).to(tl.float32)
    else:
        start, step, rows = tl.program_id(0), tl.num_programs(0), tokens * GROUPS
    weight_sum = tl.zeros([ROWS, PADDED], tl.float32)
    bias_sum = tl.zeros([ROWS, PADDED], tl.float32)
    for block in range(start, tl.cdiv(rows, ROWS), step):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # rows are fewer than 2**31, elements may not be
        if WEIGHT:
            token, group = row, tl.zeros_like(row) + only
        else:
            token, group = row // GROUPS, row % GROUPS
        present = (row < rows)[:, None] & (col < WIDTH)[None, :]
        x = tl.load(at(x_ptr, token, group, col, x_t, x_g, x_w, WIDTH, PACKED), mask=present, other=0.0).to(tl.float32)
        grad = tl.load(
            at(grad_ptr, token, group, col, grad_t, grad_g, grad_w, WIDTH, PACKED), mask=present, other=0.0
        ).to(tl.float32)
        scale = tl.load(scale_ptr + token * GROUPS + group, mask=row < rows, other=0.0)
        out = (token * GROUPS + group)[:, None] * WIDTH + col[None, :]
        if LAYER:
            x = tl.where(present, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
        x *= scale[:, None]
        if GATE:
            gate = tl.load(
                at(gate_ptr, token, group, col, gate_t, gate_g, gate_w, WIDTH, PACKED), mask=present, other=0.0
            )
            gate = tl.sigmoid(gate.to(tl.float32))
            y = x
            if WEIGHT:
                y = x * weight[None, :] + bias[None, :]
            grad_gate = grad * y * gate * (1.0 - gate)
            tl.store(grad_gate_ptr + out, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=present)
            grad *= gate
        if WEIGHT:
            weight_sum += grad * x
            bias_sum += grad
            grad *= weight[None, :]
        inner = grad - x * (tl.sum(grad * x, 1) / WIDTH)[:, None]
        if LAYER:
            inner -= (tl.sum(grad, 1) / WIDTH)[:, None]
        inner *= scale[:, None]
        if RESIDUAL:
            where = at(grad_sum_ptr, token, group, col, grad_sum_t, grad_sum_g, grad_sum_w, WIDTH, PACKED)
            inner += tl.load(where, mask=present, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + out, inner.to(grad_x_ptr.dtype.element_ty), mask=present)
    if WEIGHT:
        part = (tl.program_id(1) * GROUPS + tl.program_id(0)) * WIDTH + col
        tl.store(grad_weight_ptr + part, tl.sum(weight_sum, 0), mask=col < WIDTH)
        if BIAS:
            tl.store(grad_bias_ptr + part, tl.sum(bias_sum, 0), mask=col < WIDTH)


def _tile(groups: int, width: int, sums: bool = False) -> dict[str, int]:
    """`sums`: two more tiles are held, of the weights' gradients, so a thread takes half as many elements."""
    padded = max(16, triton.next_power_of_2(width))
    rows = max(1, (TILE // 2 if sums else TILE) // padded)
    return {"GROUPS": groups, "WIDTH": width, "PADDED": padded, "ROWS": rows, "num_warps": max(4, padded // 512)}


def _strides(*tensors: Tensor | None) -> list[int]:
    return [s for x in tensors for s in (x.stride() if x is not None else (0, 0, 0))]


def _packed(*tensors: Tensor | None) -> bool:
    return all(x is None or x.shape[1] == 1 or x.stride(1) == x.shape[2] for x in tensors)


@replayed
def forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """[T, G, W] inputs of any strides, contiguous weights [G * W]; returns what `norms._run` does."""
    y, total, scale = output_tensors(x, residual, gate)
    tokens, groups, width = x.shape
    rows, tile = tokens * groups, _tile(groups, width)
    if rows and cuda_norms.takes(x, weight, residual, gate, bias, y):
        cuda_norms.forward(x, residual, gate, weight, bias, y, total, scale, layer, eps)
    elif rows:
        launch(norm_forward, (triton.cdiv(rows, tile["ROWS"]),))(
            x, residual, gate, weight, bias, y, total, scale, rows, eps, *_strides(x, residual, gate), **tile,
            PACKED=_packed(x, residual, gate), LAYER=layer, RESIDUAL=residual is not None, GATE=gate is not None,
            WEIGHT=weight is not None, BIAS=bias is not None,
        )  # fmt: skip
    return y, total, scale


@replayed
def backward(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    grad: Tensor,
    grad_sum: Tensor | None,
    layer: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (x, gate, weight, bias), None where there is none; `x` is the sum, `grad_sum` its gradient."""
    tokens, groups, width = x.shape
    grad_x = x.new_empty(x.shape)
    grad_gate = None if gate is None else gate.new_empty(gate.shape)
    tile = _tile(groups, width, weight is not None)
    blocks = triton.cdiv(tokens, tile["ROWS"])
    programs = min(blocks, triton.cdiv(PROGRAMS, groups))
    by_rows = tokens > 0 and cuda_norms.takes(x, weight, gate, bias, grad, grad_sum)
    if by_rows:
        programs = cuda_norms.programs(x, weight is not None)
    count = (weight is not None) + (bias is not None)
    sums = x.new_empty((count, programs, groups * width), dtype=torch.float32) if count else None
    first, second = (None, None) if sums is None else (sums[0], sums[-1])
    if by_rows:
        given = (x, gate, weight, bias, scale, grad, grad_sum, grad_x, grad_gate, first, second)
        cuda_norms.backward(*given, layer)
    elif blocks:
        grid = (triton.cdiv(tokens * groups, tile["ROWS"]), 1) if weight is None else (groups, programs)
        launch(norm_backward, grid)(
            x, gate, weight, bias, scale, grad, grad_sum, grad_x, grad_gate, first, second, tokens,
            *_strides(x, gate, grad, grad_sum), **tile, PACKED=_packed(x, gate, grad, grad_sum), LAYER=layer,
            RESIDUAL=grad_sum is not None, GATE=gate is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        )  # fmt: skip
    if sums is None or weight is None:
        return grad_x, grad_gate, None, None
    totals = sums.sum(1)
    # The results of an operator share no memory.
    grad_bias = None if bias is None else totals[1].to(bias.dtype, copy=True)
    return grad_x, grad_gate, totals[0].to(weight.dtype, copy=True), grad_bias
