"""Norms and residual sums of a block under shift, scale and gate of each sample (adaLN; Peebles and Xie 2023, section 3.2).

The PyTorch forms are the definitions. With Triton a norm with its shift and scale, and the residual sum before it with its
gate, are one pass forward and one backward; results are rounded once, sums over a sample's tokens are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_tensors
from .companions import choose_triton, kernels
from .norms import MAX_WIDTH, _check, add_norm, norm
from .operators import Operator


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (1 + scale) + shift, of x's dtype, by PyTorch.

    Args:
        x: [B, N, W], or [1, B * N, W].
        shift, scale: [B, W].

    Raises:
        ValueError: on shapes.
    """
    _check_vectors("modulate", x, {"shift": shift, "scale": scale})
    return _modulated(x, shift, scale)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    rows, one = x.view(len(shift), -1, x.shape[-1]), torch.ones((), dtype=x.dtype, device=x.device)
    return torch.addcmul(shift.to(x.dtype)[:, None], rows, one + scale.to(x.dtype)[:, None]).view(x.shape)


def modulated_norm(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> Tensor:
    """norm(x) (1 + scale) + shift.

    Args:
        x: [B, N, W], or [1, B * N, W]; bfloat16, float16, float32 (or float64 with PyTorch).
        shift, scale: [B, W].
        weight, bias, kind, eps, backend: as of `norm`.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: on shapes, or as `norm`.
    """
    _check("modulated_norm", kind, x, {}, weight, bias, 1)
    vectors = {"shift": shift, "scale": scale}
    if not _by_triton("modulated_norm", backend, x, None, vectors, weight, bias):
        return _modulated(norm(x, weight, bias, kind=kind, eps=eps, backend="torch"), shift, scale)
    return _call(x, None, None, shift, scale, weight, bias, kind, eps)[0]


def gated_add_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor,
    shift: Tensor,
    scale: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: str,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h = x + gate branch, and norm(h) (1 + scale) + shift.

    Args:
        x, branch: [B, N, W], or [1, B * N, W]; PyTorch's promotion of both dtypes is that of the results.
        gate, shift, scale: [B, W].
        weight, bias, kind, eps, backend: as of `norm`.

    Returns:
        (h, its modulated norm), shape of ``x``.

    Raises:
        ValueError: on shapes, or as `norm`.
    """
    _check("gated_add_norm", kind, x, {"branch": branch}, weight, bias, 1)
    vectors = {"gate": gate, "shift": shift, "scale": scale}
    if not _by_triton("gated_add_norm", backend, x, branch, vectors, weight, bias):
        total, y = add_norm(x, _gated(branch, gate), weight, bias, kind=kind, eps=eps, backend="torch")
        return total, _modulated(y, shift, scale)
    y, total = _call(x, branch, gate, shift, scale, weight, bias, kind, eps)
    return total, y


def gated_add(x: Tensor, branch: Tensor, gate: Tensor, *, backend: str = "auto") -> Tensor:
    """x + gate branch; arguments and result as of `gated_add_norm`."""
    check_tensors("gated_add", x=x, branch=branch)
    if branch.shape != x.shape:
        raise ValueError(f"gated_add: branch has shape {tuple(branch.shape)}; expected x's {tuple(x.shape)}")
    if not _by_triton("gated_add", backend, x, branch, {"gate": gate}):
        return x + _gated(branch, gate)
    return _call(x, branch, gate, None, None, None, None, "srms", 0.0)[1]


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x.view(len(gate), -1, x.shape[-1]) * gate.to(x.dtype)[:, None]).view(x.shape)


def _by_triton(
    name: str, backend: str, x: Tensor, branch: Tensor | None, vectors: dict[str, Tensor], *weights: Tensor | None
) -> bool:
    _check_vectors(name, x, vectors)
    limit = f"width {x.shape[-1]}, above {MAX_WIDTH}" if x.shape[-1] > MAX_WIDTH else None
    return choose_triton(name, backend, "triton_modulation", x, branch, *vectors.values(), *weights, limit=limit)


def _check_vectors(name: str, x: Tensor, vectors: dict[str, Tensor]) -> None:
    check_tensors(name, x=x, **vectors)
    if x.ndim < 1:
        raise ValueError(f"{name}: x has shape (); expected [B, N, W]")
    rows, first = x.shape[:-1].numel(), next(iter(vectors.values()))
    wanted = (first.shape[0] if first.ndim else 0, x.shape[-1])
    for label, vector in vectors.items():
        if vector.shape != wanted:
            raise ValueError(f"{name}: {label} has shape {tuple(vector.shape)}; expected samples, width {wanted}")
    if wanted[0] == 0 or rows % wanted[0]:
        raise ValueError(f"{name}: {rows} tokens are not {wanted[0]} samples of one length; pass vectors [B, W]")


def _call(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    vector = gate if shift is None else shift
    assert vector is not None
    shape = (len(vector), x.shape[:-1].numel() // len(vector), x.shape[-1])
    flat = [None if t is None else t.reshape(shape).contiguous() for t in (x, branch)]
    rows = [t if t is None or t.stride(1) == 1 else t.contiguous() for t in (gate, shift, scale)]
    weights = [None if t is None else t.reshape(-1).contiguous() for t in (weight, bias)]
    y, total, _ = _modulate(*flat, *rows, *weights, kind == "layer", eps)
    return (y if shift is None else y.view(x.shape)), (total if branch is None else total.view(x.shape))


def output_tensors(
    x: Tensor, branch: Tensor | None, normed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Empty (modulated norm and x + gate branch, [B, N, W], inverse roots float32 [B, N]), None where there is none."""
    dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    y, total = (x.new_empty(x.shape, dtype=dtype) if wanted else None for wanted in (normed, branch is not None))
    return y, total, x.new_empty(x.shape[:2], dtype=torch.float32) if normed else None


def gradient_tensors(
    x: Tensor | None,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Empty, for the gradients of (x, branch, gate, shift, scale, weight, bias), None where there is none."""
    return tuple(
        None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x, branch, gate, scale, scale, weight, bias)
    )


def _run(*arguments: Any) -> tuple[Tensor | None, ...]:
    """As `output_tensors`, filled."""
    return kernels("triton_modulation").forward(*arguments)


def _run_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """As `gradient_tensors`, filled."""
    return kernels("triton_modulation").backward(*arguments)


def _fake(x, branch, gate, shift, scale, weight, bias, layer, eps):
    return output_tensors(x, branch, shift is not None)


def _fake_backward(x, branch, gate, scale, weight, bias, root, grad, grad_sum, layer):
    return gradient_tensors(x, branch, gate, scale, weight, bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, branch, gate, shift, scale, weight, bias, ctx.layer, _ = inputs
    _, total, root = output
    ctx.normed, ctx.dtype = shift is not None, x.dtype
    if ctx.normed:
        ctx.mark_non_differentiable(root)
    ctx.set_materialize_grads(False)
    read = (total if branch is not None else x, root) if ctx.normed else (None, None)
    ctx.save_for_backward(*read, branch, gate, scale, weight, bias)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, root, branch, gate, scale, weight, bias = ctx.saved_tensors
    if ctx.normed and grad is None:
        grad = torch.zeros_like(x)
    grads = _modulate_backward(
        x, branch, gate, scale, weight, bias, root,
        grad.contiguous() if ctx.normed and grad is not None else None,
        None if branch is None or grad_sum is None else grad_sum.contiguous(), ctx.layer,
    )  # fmt: skip
    inputs = (x, branch, gate, scale, scale, weight, bias)
    of_x, *others = [None if t is None else g for t, g in zip(inputs, grads, strict=True)]  # empty: none
    of_x = of_x if ctx.normed else grad_sum
    return None if of_x is None else of_x.to(ctx.dtype), *others, None, None


_modulate_backward = Operator(
    "lightnet::modulate_backward",
    "(Tensor? x, Tensor? branch, Tensor? gate, Tensor? scale, Tensor? weight, Tensor? bias, Tensor? root, Tensor? grad,"
    " Tensor? grad_sum, bool layer) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    simple=True,
)
_modulate = Operator(
    "lightnet::modulate",
    "(Tensor x, Tensor? branch, Tensor? gate, Tensor? shift, Tensor? scale, Tensor? weight, Tensor? bias, bool layer,"
    " float eps) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    simple=True,
)
_modulate.differentiable(_backward, _setup)
