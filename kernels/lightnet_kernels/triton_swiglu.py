"""Triton kernels of SwiGLU: elementwise, on tiles of TILE elements."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import triton_parts  # noqa: F401  (mends Triton's interpreter)
from .swiglu import gradient_tensors, output_tensor
from .triton_launch import launch
from .triton_replay import replayed

TILE = 4096


@triton.jit
def tile_of(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    return row[:, None], col[None, :], (row < rows)[:, None] & (col < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def swiglu_forward(
    gate_ptr, up_ptr, y_ptr, rows, width, gate_t, gate_w, up_t, up_w, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, col, present = tile_of(rows, width, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_t + col * gate_w, mask=present, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_t + col * up_w, mask=present, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, rows, width, gate_t, gate_w, up_t, up_w, grad_t, grad_w,
    grad_gate_t, grad_up_t, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, col, present = tile_of(rows, width, ROWS, BLOCK)
    gate = tl.load(gate_ptr + row * gate_t + col * gate_w, mask=present, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_t + col * up_w, mask=present, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_t + col * grad_w, mask=present, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    grad_gate = grad * up * open_ * (1.0 + gate * (1.0 - open_))
    grad_up = grad * gate * open_
    tl.store(grad_gate_ptr + row * grad_gate_t + col, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=present)
    tl.store(grad_up_ptr + row * grad_up_t + col, grad_up.to(grad_up_ptr.dtype.element_ty), mask=present)


def _launch(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    block = min(1024, max(16, triton.next_power_of_2(width)))
    size = min(TILE // block, triton.next_power_of_2(rows))
    tile = {"ROWS": size, "BLOCK": block, "num_warps": 4}
    return (triton.cdiv(rows, size) * triton.cdiv(width, block),), tile


def _halves(joined: Tensor) -> tuple[Tensor, Tensor]:
    half = joined.shape[1] // 2
    return joined[:, :half], joined[:, half:]


def _one_row(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors whose width is no multiple of 16, as one row: only so are wide loads aligned."""
    plain = all(x.is_contiguous() and x.numel() < 2**31 for x in tensors)
    return tuple(x.view(1, -1) for x in tensors) if plain and tensors[0].shape[1] % 16 else tensors


@replayed
def forward(gate: Tensor, up: Tensor | None) -> Tensor:
    """As `swiglu.output_tensor`, filled."""
    y = output_tensor(gate, up)
    if y.numel():
        one, two, out = _one_row(*(_halves(gate) if up is None else (gate, up)), y)
        grid, tile = _launch(*out.shape)
        launch(swiglu_forward, grid)(one, two, out, *out.shape, *one.stride(), *two.stride(), **tile)
    return y


@replayed
def backward(gate: Tensor, up: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `swiglu.gradient_tensors`, filled."""
    grad_gate, grad_up = gradient_tensors(gate, up, grad)
    if grad.numel():
        inputs = _halves(gate) if up is None else (gate, up)
        outputs = _halves(grad_gate) if grad_up is None else (grad_gate, grad_up)
        one, two, upstream, grad_one, grad_two = _one_row(*inputs, grad, *outputs)
        grid, tile = _launch(*upstream.shape)
        launch(swiglu_backward, grid)(
            one, two, upstream, grad_one, grad_two, *upstream.shape, *one.stride(), *two.stride(), *upstream.stride(),
            grad_one.stride(0), grad_two.stride(0), **tile,
        )  # fmt: skip
    return grad_gate, grad_up
