"""Norms of the model with what stands beside them (model-spec 4): a residual sum before, a sigmoid gate after.

Kinds: `srms` (root mean square, no weight), `rms` (with weight), `layer` (mean taken off, weight and bias). Statistics are
float32. The PyTorch form, `_reference`, is the definition; with Triton each tensor is read and written once, results are
rounded once, and of intermediate values only an inverse root per row is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_optional, check_tensors
from .companions import choose_triton, kernels
from .operators import Operator

KINDS = ("srms", "rms", "layer")
MAX_WIDTH = 8192  # of a row that the kernels hold in registers


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [.., W], bfloat16, float16, float32 (or float64 with PyTorch), any strides.
        weight: [W], needed by rms and layer.
        bias: [W], needed by layer.
        kind: srms, rms or layer.
        eps: added to the mean square, or variance.
        backend: auto, torch or triton.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: on shapes, a kind without its weights, or a backend that cannot serve.
    """
    _check("norm", kind, x, {}, weight, bias, 1)
    if not _by_triton("norm", backend, x, weight, bias):
        return _reference(x, weight, bias, kind, eps)
    return _call(x, None, None, weight, bias, kind, eps, 1)[0]


def norm_beside(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """x and its norm: what else is made of x goes on from the one returned, so that the norm's backward pass adds both
    gradients and no pass over memory of its own does.

    Args:
        x, weight, bias, kind, eps, backend: as for `norm`.

    Returns:
        (x, norm of x).

    Raises:
        ValueError: as `norm`.
    """
    _check("norm_beside", kind, x, {}, weight, bias, 1)
    by_triton = _by_triton("norm_beside", backend, x, weight, bias)
    if not by_triton or not torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor:
        return x, norm(x, weight, bias, kind=kind, eps=eps, backend=backend)
    both: tuple[Tensor, Tensor] = _Beside.apply(x, _flat(weight), _flat(bias), kind == "layer", eps)
    return both


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h = x + residual and its norm, both.

    Args:
        x: [.., W].
        residual: the same shape; the dtype may differ, and PyTorch's promotion of both is that of the results.
        weight, bias, kind, eps, backend: as for `norm`.

    Returns:
        (h, norm of h as rounded to its dtype), shape of ``x``.

    Raises:
        ValueError: as `norm`.
    """
    _check("add_norm", kind, x, {"residual": residual}, weight, bias, 1)
    if not _by_triton("add_norm", backend, x, residual, weight, bias):
        total = x + residual
        return total, _reference(total, weight, bias, kind, eps)
    y, total = _call(x, residual, None, weight, bias, kind, eps, 1)
    return total, y


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> Tensor:
    """norm(x) * sigmoid(gate), statistics per head: what follows the scan.

    Args:
        x: [.., H, D].
        gate: the same shape.
        weight, bias: [H * D], head by head.
        kind, eps, backend: as for `norm`.

    Returns:
        Shape of ``x``, contiguous, in PyTorch's promotion of both dtypes.

    Raises:
        ValueError: as `norm`.
    """
    _check("gated_norm", kind, x, {"gate": gate}, weight, bias, 2)
    if not _by_triton("gated_norm", backend, x, gate, weight, bias):
        return (_reference(x, weight, bias, kind, eps) * torch.sigmoid(gate)).contiguous()
    return _call(x, None, gate, weight, bias, kind, eps, x.shape[-2])[0]


def _reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """The definition. A weight of more than the last dimension's size spans the last two."""
    y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.view(x.shape[-2:] if weight.numel() != x.shape[-1] else (-1,))
    if bias is not None:
        y = y + bias.view(x.shape[-2:] if bias.numel() != x.shape[-1] else (-1,))
    return y.to(x.dtype)


def _check(
    name: str,
    kind: str,
    x: Tensor,
    others: dict[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    dims: int,
) -> None:
    """A weight has the size of the last `dims` dimensions of x, and others x's shape."""
    check_tensors(name, x=x, **others)
    check_optional(name, weight=weight, bias=bias)
    if kind not in KINDS:
        raise ValueError(f"{name}: unknown kind {kind!r}; choose one of {', '.join(KINDS)}")
    if not x.is_floating_point():
        raise ValueError(f"{name}: x has dtype {x.dtype}; pass a floating-point tensor")
    if x.ndim < dims:
        expected = "[.., W]" if dims == 1 else "[.., heads, head width]"
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected {expected}")
    features = x.shape[-dims:]
    for label, other in others.items():
        if other.shape != x.shape:
            raise ValueError(f"{name}: {label} has shape {tuple(other.shape)}; expected x's {tuple(x.shape)}")
    for label, given, wanted in (("weight", weight, kind != "srms"), ("bias", bias, kind == "layer")):
        if (given is not None) != wanted:
            raise ValueError(f"{name}: kind {kind!r} takes {'a' if wanted else 'no'} {label}; pass {label}=" + (
                f"a tensor of {features.numel()}" if wanted else "None"
            ))  # fmt: skip
        if given is not None and given.numel() != features.numel():
            raise ValueError(f"{name}: {label} has shape {tuple(given.shape)}; expected [{features.numel()}]")


def _by_triton(name: str, backend: str, x: Tensor, *others: Tensor | None) -> bool:
    limit = f"width {x.shape[-1]}, above {MAX_WIDTH}" if x.shape[-1] > MAX_WIDTH else None
    return choose_triton(name, backend, "triton_norms", x, *others, limit=limit)


def _call(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    groups: int,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // max(1, groups * width)
    flat = [None if t is None else t.reshape(rows, groups, width) for t in (x, residual, gate)]
    y, total, _ = _normalise(*flat, _flat(weight), _flat(bias), kind == "layer", eps)
    return y.view(x.shape), y if residual is None else total.view(x.shape)


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.reshape(-1).contiguous()


def _run(*arguments: Any) -> tuple[Tensor | None, ...]:
    """[T, G, W] to (y, x + residual or nothing, inverse root [T, G])."""
    return kernels("triton_norms").forward(*arguments)


def _run_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of (x, gate, weight, bias), nothing where there is none."""
    return kernels("triton_norms").backward(*arguments)


def _fake(x, residual, gate, weight, bias, layer, eps):
    return output_tensors(x, residual, gate)


def _fake_backward(x, gate, weight, bias, scale, grad, grad_sum, layer):
    others = [
        None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, weight, bias)
    ]
    return x.new_empty(x.shape), *others


def output_tensors(x: Tensor, residual: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Empty (y [T, G, W], x + residual of the same shape or None, inverse roots float32 [T, G])."""
    dtype = x.dtype
    for other in (residual, gate):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    total = None if residual is None else x.new_empty(x.shape, dtype=dtype)
    return y, total, x.new_empty(x.shape[:2], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, gate, weight, bias, ctx.layer, _ = inputs
    _, total, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else total, gate, weight, bias, scale)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, gate, weight, bias, scale = ctx.saved_tensors
    first, second = ctx.dtypes
    if grad is None:
        grad = x.new_zeros(x.shape)
    grads = _normalise_backward(x, gate, weight, bias, scale, grad, None if second is None else grad_sum, ctx.layer)
    present = [None if t is None else g for t, g in zip((gate, weight, bias), grads[1:], strict=True)]  # empty: none
    return grads[0].to(first), None if second is None else grads[0].to(second), *present, None, None


_normalise_backward = Operator(
    "lightnet::norm_backward",
    "(Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, Tensor grad, Tensor? grad_sum, bool layer)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    simple=True,
)
_normalise = Operator(
    "lightnet::norm",
    "(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, bool layer, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    simple=True,
)
_normalise.differentiable(_backward, _setup)


class _Beside(torch.autograd.Function):
    """No operator of torch.library's: one of its results is its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
    ) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, 1, x.shape[-1])
        y, _, scale = _normalise(flat, None, None, weight, bias, layer, eps)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(flat, weight, bias, scale)
        return x, y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, beside: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, scale = ctx.saved_tensors
        if grad is None:
            return beside, None, None, None, None
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("norm_beside has no second derivative; use backend='torch', which has")
        flat = [None if y is None else y.reshape(x.shape) for y in (grad, beside)]
        found = _normalise_backward(x, None, weight, bias, scale, *flat, ctx.layer)
        of_weights = [None if y is None else g for y, g in zip((weight, bias), found[2:], strict=True)]
        return found[0].view(grad.shape), *of_weights, None, None
