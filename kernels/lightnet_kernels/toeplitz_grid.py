"""MD-TPE on a grid: the Toeplitz scan along every axis, summed (LightNet section 4.1, model-spec 3).

A sequence of few tokens is a sum over lags with one tap for each, sum_i gain_i decay_i^lag: with Triton an axis is one pass
over the tensor and no states are made. Longer axes are scanned by `toeplitz_scan`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_tensors
from .companions import choose_triton, kernels
from .operators import Operator
from .toeplitz import toeplitz_scan
from .toeplitz_torch import decay_powers

LONGEST = 32  # tokens of an axis; lags are added one by one


def toeplitz_grid(
    x: Tensor, decay: Tensor, gain: Tensor, *, bidirectional: bool = True, backend: str = "auto"
) -> Tensor:
    """x + sum over axes of `toeplitz_scan` along it.

    Args:
        x: [B, *grid, d], any floating dtype; computed in float32 (float64 where x is).
        decay, gain: [axes, d, e], of `toeplitz_scan` for each axis of the grid.
        bidirectional: as there.
        backend: auto, torch, or triton (axes of at most LONGEST tokens).

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: on shapes, or a backend that cannot serve.
    """
    check_tensors("toeplitz_grid", x=x, decay=decay, gain=gain)
    if x.ndim < 3 or decay.ndim != 3 or decay.shape[:2] != (x.ndim - 2, x.shape[-1]) or gain.shape != decay.shape:
        raise ValueError(
            f"toeplitz_grid: x {tuple(x.shape)}, decay {tuple(decay.shape)} and gain {tuple(gain.shape)} do not fit; "
            "expected [B, *grid, d] and twice [axes, d, e]"
        )
    grid = x.shape[1:-1]
    limit = f"an axis of {max(grid)} tokens, above {LONGEST}" if max(grid) > LONGEST else None
    if not choose_triton("toeplitz_grid", backend, "triton_toeplitz_grid", x, limit=limit):
        return _scanned(x, decay, gain, bidirectional, backend)
    with torch.autocast(device_type=x.device.type, enabled=False):
        found: Tensor = _toeplitz_grid(_rows(x), taps(decay, gain, grid), bidirectional)
    return found


def taps(decay: Tensor, gain: Tensor, grid: tuple[int, ...]) -> Tensor:
    """What x of each lag from 0 weighs, axis after axis: float32 [sum of the grid, d]."""
    found = []
    for one, weight, size in zip(decay.float(), gain.float(), grid, strict=True):
        powers = decay_powers(one, max(size, 1))[:, :size]  # [d, size, e]
        found.append(torch.einsum("dne,de->nd", powers, weight))
    return torch.cat(found)


def _scanned(x: Tensor, decay: Tensor, gain: Tensor, bidirectional: bool, backend: str) -> Tensor:
    if not x.numel():
        return x + 0 * (decay.sum() + gain.sum()).to(x.dtype)
    out = x
    for axis, size in enumerate(x.shape[1:-1]):
        rows = x.movedim(axis + 1, -2)
        lines = rows.reshape(-1, size, x.shape[-1])
        y = toeplitz_scan(lines, decay[axis], gain[axis], bidirectional=bidirectional, backend=backend)
        assert isinstance(y, Tensor)  # no state was asked for
        out = out + y.view(rows.shape).movedim(-2, axis + 1)
    return out


def _rows(x: Tensor) -> Tensor:
    """A tensor whose samples are contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()


def output_tensor(x: Tensor, _taps: Tensor, _both: bool) -> Tensor:
    """Empty, contiguous."""
    return x.new_empty(x.shape)


def gradient_tensors(x: Tensor, weights: Tensor, _grad: Tensor, _both: bool) -> tuple[Tensor, Tensor]:
    """Empty, of x and of the taps."""
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _run(x: Tensor, weights: Tensor, both: bool) -> Tensor:
    output: Tensor = kernels("triton_toeplitz_grid").forward(x, weights, both)
    return output


def _run_backward(x: Tensor, weights: Tensor, grad: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = kernels("triton_toeplitz_grid").backward(x, weights, grad, both)
    return grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ctx.both = inputs
    ctx.save_for_backward(x, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights = ctx.saved_tensors
    grad_x, grad_weights = _toeplitz_grid_backward(x, weights, _rows(grad), ctx.both)
    return grad_x, grad_weights, None


_toeplitz_grid_backward = Operator(
    "lightnet::toeplitz_grid_backward",
    "(Tensor x, Tensor taps, Tensor grad, bool both) -> (Tensor, Tensor)",
    _run_backward,
    gradient_tensors,
    simple=True,
)
_toeplitz_grid = Operator(
    "lightnet::toeplitz_grid", "(Tensor x, Tensor taps, bool both) -> Tensor", _run, output_tensor, simple=True
)
_toeplitz_grid.differentiable(_backward, _setup)
