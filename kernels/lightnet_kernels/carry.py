"""The recurrence between chunks, the only sequential part of the PyTorch path, and its adjoint.

Per sequence, with i the chunk:   held_0 = enter_0 * initial
                                  kept_i = keep_i * held_i + added_i
                                  held_(i+1) = enter_(i+1) * Rotate(kept_i)

Chunks are in depth-major order (`segments.ChunkLayout`); `counts` are the sequences still alive at each depth, not
increasing. Over long sequences the state is carried in float64: the same rotation is applied once a chunk, and a
float32 cosine would drift by 1e-3 over a million tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LONG = 64  # chunks in a sequence from which on the state is carried in float64


class Factors(NamedTuple):
    """What multiplies the state on its way.

    enter, keep: factors that broadcast against `added` (a single row serves all chunks); None: 1.
    angle: [H, D] float64, the rotation between two chunks; None: none.
    """

    enter: Tensor | None = None
    keep: Tensor | None = None
    angle: Tensor | None = None


def carry(
    counts: list[int], added: Tensor, initial: Tensor, factors: Factors, need_last: bool = True
) -> tuple[Tensor, Tensor]:
    """added [chunks, ...] ([chunks, H, 2, D, Dv] with an angle), initial [sequences, ...] -> held [chunks, ...] in
    added's dtype, and the last kept state [sequences, ...], not rotated (initial where there is no chunk), in the dtype
    of the carry: float64 for long sequences or where an operand is.

    Without need_last the last state's content is not meant to be read, nor is what a sequence's last chunk adds.
    """
    enter, keep, angle = factors
    double = initial.dtype == torch.float64 or len(counts) > LONG
    dtype = torch.float64 if double else added.dtype
    state = initial.to(dtype, copy=need_last or len(counts) > 1)  # the caller's tensor must not be written to
    held = torch.empty_like(added)
    table = _table(angle)
    start = 0
    for depth, count in enumerate(counts):
        rows = slice(start, start + count)
        current = state[:count]
        received = held[rows] if held.dtype == dtype else torch.empty_like(current)
        if table is not None and depth > 0:
            _rotate(current, _scaled(table, enter, rows, dtype), received)
        elif enter is not None:
            torch.mul(current, _at(enter, rows).to(dtype), out=received)
        else:
            received.copy_(current)
        if held.dtype != dtype:
            held[rows] = received
        through = count if need_last else followed(counts, depth)
        if through:
            passed = slice(start, start + through)
            received = received[:through]
            if keep is not None:
                received = received * _at(keep, passed)
            torch.add(received, added[passed], out=current[:through])
        start += count
    return held, state


def followed(counts: list[int], depth: int) -> int:
    """Chunks of a depth that another chunk of their sequence follows; they are the depth's first ones."""
    return counts[depth + 1] if depth + 1 < len(counts) else 0


class CarryGradients(NamedTuple):
    added: Tensor
    initial: Tensor  # in the dtype of the carry
    keep: Tensor | None  # [1, ...] float64, where asked for
    angle: Tensor | None  # [H, D] float64


def carry_backward(
    counts: list[int],
    held: Tensor,
    factors: Factors,
    grad_held: Tensor,
    grad_last: Tensor | None,
    last: Tensor,
    *,
    need_keep: bool = False,
) -> CarryGradients:
    """Adjoint of `carry`, given what it returned; need_keep is for a keep that one row holds for all chunks."""
    enter, keep, angle = factors
    grad = torch.zeros_like(last)
    dtype = grad.dtype
    if grad_last is not None:
        grad += grad_last
    grad_added = torch.empty_like(held)
    grad_keep = torch.zeros_like(keep, dtype=torch.float64) if need_keep and keep is not None else None
    grad_angle = None if angle is None else torch.zeros_like(angle)
    table = _table(angle, adjoint=True)
    start = held.shape[0]
    for depth in range(len(counts) - 1, -1, -1):
        start -= counts[depth]
        rows = slice(start, start + counts[depth])
        current = grad[: counts[depth]]
        grad_added[rows] = current
        if grad_keep is not None:
            grad_keep += (current * held[rows]).sum(0, keepdim=True)
        if keep is not None:
            current *= _at(keep, rows)
        current += grad_held[rows]
        if grad_angle is not None and depth > 0:
            # <g, dh/dangle> is the same on either side of the rotation and of `enter`.
            cosine, sine = held[rows].unbind(-3)
            grad_cosine, grad_sine = current.unbind(-3)
            torque = grad_cosine * sine
            grad_angle += torque.sub_(grad_sine * cosine).sum(dim=(0, -1))
        if table is not None and depth > 0:
            passed = torch.empty_like(current)
            _rotate(current, _scaled(table, enter, rows, dtype), passed)
            current.copy_(passed)
        elif enter is not None:
            current *= _at(enter, rows)
    return CarryGradients(grad_added, grad, grad_keep, grad_angle)


def _at(factor: Tensor, rows: slice) -> Tensor:
    """Factors of one depth; a single row serves all chunks."""
    return factor if factor.shape[0] == 1 else factor[rows]


def _table(angle: Tensor | None, adjoint: bool = False) -> tuple[Tensor, Tensor] | None:
    """cos and sin of the rotation between chunks, [H, 1, D, 1] float64."""
    if angle is None:
        return None
    angle = -angle if adjoint else angle
    return angle.cos()[:, None, :, None], angle.sin()[:, None, :, None]


def _scaled(
    table: tuple[Tensor, Tensor], enter: Tensor | None, rows: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotation and `enter` in one factor each: they commute, and a pass over the state costs more."""
    cos, sin = table if enter is None else (x * _at(enter, rows) for x in table)
    return cos.to(dtype), sin.to(dtype)


def _rotate(state: Tensor, factors: tuple[Tensor, Tensor], out: Tensor) -> None:
    """(cosine, sine) halves on dim -3 -> (cos c + sin s, cos s - sin c)."""
    cos, sin = (x.squeeze(-3) for x in factors)
    cosine, sine = state.unbind(-3)
    out_cosine, out_sine = out.unbind(-3)
    torch.mul(cosine, cos, out=out_cosine)
    out_cosine.addcmul_(sine, sin)
    torch.mul(sine, cos, out=out_sine)
    out_sine.addcmul_(cosine, sin, value=-1)
