"""SwiGLU, the activation of the gated linear unit (model-spec 4): silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_optional, check_tensors
from .companions import choose_triton, kernels
from .operators import Operator


def swiglu(gate: Tensor, up: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up.

    With Triton each tensor is read and written once, and sigmoid is computed again in the backward pass.

    Args:
        gate: [.., W], any strides; without ``up`` [.., 2 W], gate and up side by side, whose gradient is one tensor too.
        up: shape of ``gate``; the dtype may differ.
        backend: auto, torch or triton.

    Returns:
        [.., W], contiguous, in PyTorch's promotion of both dtypes.

    Raises:
        ValueError: on shapes, or a backend that cannot serve.
    """
    check_tensors("swiglu", gate=gate)
    check_optional("swiglu", up=up)
    if gate.ndim < 1 or not gate.is_floating_point():
        raise ValueError(f"swiglu: gate is {gate.dtype} {tuple(gate.shape)}; expected a floating-point [.., W]")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"swiglu: up has shape {tuple(up.shape)}; expected gate's {tuple(gate.shape)}")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"swiglu: {gate.shape[-1]} features do not split into gate and up; pass an even number, or up")
    if not choose_triton("swiglu", backend, "triton_swiglu", gate, up):
        one, two = gate.chunk(2, -1) if up is None else (gate, up)
        return F.silu(one) * two
    rows = gate.shape[:-1].numel()
    flat = gate.reshape(rows, gate.shape[-1])
    y = _swiglu(flat, None if up is None else up.reshape(rows, gate.shape[-1]))
    return y.view(*gate.shape[:-1], y.shape[-1])


def output_tensor(gate: Tensor, up: Tensor | None) -> Tensor:
    """Empty, [T, W], for gate and up [T, W], or gate [T, 2 W] alone."""
    if up is None:
        return gate.new_empty(gate.shape[0], gate.shape[1] // 2)
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def gradient_tensors(gate: Tensor, up: Tensor | None, _grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Empty, for the gradients of gate and up; with both in one tensor, of that, and None."""
    return gate.new_empty(gate.shape), None if up is None else up.new_empty(up.shape)


def _run(gate: Tensor, up: Tensor | None) -> Tensor:
    output: Tensor = kernels("triton_swiglu").forward(gate, up)
    return output


def _run_backward(gate: Tensor, up: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    grads: tuple[Tensor, Tensor | None] = kernels("triton_swiglu").backward(gate, up, grad)
    return grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = _swiglu_backward(gate, up, grad)
    return grad_gate, None if up is None else grad_up


_swiglu_backward = Operator(
    "lightnet::swiglu_backward",
    "(Tensor gate, Tensor? up, Tensor grad) -> (Tensor, Tensor)",
    _run_backward,
    gradient_tensors,
    simple=True,
)
_swiglu = Operator("lightnet::swiglu", "(Tensor gate, Tensor? up) -> Tensor", _run, output_tensor, simple=True)
_swiglu.differentiable(_backward, _setup)
