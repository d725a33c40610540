"""The recurrence between chunks, the only sequential part of the PyTorch path, and its adjoint.

Per sequence, with i the chunk:   held_0 = enter_0 * initial
                                  kept_i = keep_i * held_i + added_i
                                  held_(i+1) = enter_(i+1) * Rotate(kept_i)

Chunks are in depth-major order (`segments.ChunkLayout`); `counts` are the sequences still alive at each depth, not
increasing. The state is carried in float64: the same rotation is applied once a chunk, and a float32 cosine would drift
by 1e-3 over a million tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """What multiplies the state on its way.

    enter, keep: factors that broadcast against `added` (a single row serves all chunks); None: 1.
    angle: [H, D] float64, the rotation between two chunks; None: none.
    """

    enter: Tensor | None = None
    keep: Tensor | None = None
    angle: Tensor | None = None


def carry(counts: list[int], added: Tensor, initial: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """added [chunks, ...] ([chunks, H, 2, D, Dv] with an angle), initial [sequences, ...] -> held [chunks, ...] in
    added's dtype, and the last kept state [sequences, ...] in float64, not rotated (initial where there is no chunk).
    """
    enter, keep, angle = factors
    state = initial.to(torch.float64, copy=True)  # the caller's tensor must not be written to
    held = torch.empty_like(added)
    table = None if angle is None else (angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1))
    start = 0
    for depth, count in enumerate(counts):
        rows = slice(start, start + count)
        current = state[:count]
        if table is not None and depth > 0:
            _rotate_(current, *table)
        if enter is not None:
            current *= _at(enter, rows)
        held[rows] = current
        if keep is not None:
            current *= _at(keep, rows)
        current += added[rows]
        start += count
    return held, state


class CarryGradients(NamedTuple):
    added: Tensor
    initial: Tensor  # float64
    keep: Tensor | None  # [1, ...] float64, where asked for
    angle: Tensor | None  # [H, D] float64


def carry_backward(
    counts: list[int],
    held: Tensor,
    factors: Factors,
    grad_held: Tensor,
    grad_state: Tensor | None,
    initial: Tensor,
    *,
    need_keep: bool = False,
) -> CarryGradients:
    """Adjoint of `carry`, given what it returned; need_keep is for a keep that one row holds for all chunks."""
    enter, keep, angle = factors
    grad = torch.zeros_like(initial, dtype=torch.float64)
    if grad_state is not None:
        grad += grad_state
    grad_added = torch.empty_like(held)
    grad_keep = torch.zeros_like(keep, dtype=torch.float64) if need_keep and keep is not None else None
    grad_angle = None if angle is None else torch.zeros_like(angle)
    table = None if angle is None else (angle.cos().unsqueeze(-1), -angle.sin().unsqueeze(-1))
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
            grad_angle += (grad_cosine * sine).sub_(grad_sine * cosine).sum(dim=(0, -1))
        if enter is not None:
            current *= _at(enter, rows)
        if table is not None and depth > 0:
            _rotate_(current, *table)
    return CarryGradients(grad_added, grad, grad_keep, grad_angle)


def _at(factor: Tensor, rows: slice) -> Tensor:
    """Factors of one depth; a single row serves all chunks."""
    return factor if factor.shape[0] == 1 else factor[rows]


def _rotate_(state: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place: (cosine, sine) halves on dim -3 -> (cos c + sin s, cos s - sin c). The adjoint has sin negated."""
    cosine, sine = state.unbind(-3)
    moved = cosine * cos
    moved.addcmul_(sine, sin)
    sine *= cos
    sine.addcmul_(cosine, sin, value=-1)
    cosine.copy_(moved)
