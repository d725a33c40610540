"""The recurrence between chunks, the only sequential part of the PyTorch path.

Per sequence, with i the chunk:   held_0 = enter_0 * initial
                                  kept_i = keep_i * held_i + added_i
                                  held_(i+1) = enter_(i+1) * Rotate(kept_i)

Written by hand because autograd over the loop would record some ten small nodes a chunk. The state is carried in
float64: the same rotation is applied once a chunk, and a float32 cosine would drift by 1e-3 over a million tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def carry(
    counts: list[int],
    added: Tensor,
    initial: Tensor,
    *,
    enter: Tensor | None = None,
    keep: Tensor | None = None,
    angle: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over chunks in depth-major order (`segments.ChunkLayout`).

    counts:  sequences still alive at each depth, non-increasing.
    added:   [chunks, ...] (with angle [chunks, H, 2, D, Dv]).
    initial: [sequences, ...].
    enter, keep: factors that broadcast against `added`; the first a constant, the second differentiable.
    angle:   [H, D] float64, the rotation between two chunks, differentiable.
    Returns held [chunks, ...] in added's dtype and the last kept state [sequences, ...] in float64, not yet rotated
    (the initial state where a sequence has no chunk).
    """
    return _Carry.apply(counts, added, initial, enter, keep, angle)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        counts: list[int],
        added: Tensor,
        initial: Tensor,
        enter: Tensor | None,
        keep: Tensor | None,
        angle: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # copy=True: a float64 initial state must not be written to.
        state = initial.to(torch.float64, copy=True)
        held = torch.empty_like(added)
        table = None if angle is None else (angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1))
        start = 0
        for depth, count in enumerate(counts):
            rows = slice(start, start + count)
            current = state[:count]
            if table is not None and depth > 0:
                _rotate_(current, *table)
            if enter is not None:
                current *= enter[rows]
            held[rows] = current
            if keep is not None:
                current *= _at(keep, rows)
            current += added[rows]
            start += count
        ctx.counts, ctx.initial_dtype = counts, initial.dtype
        ctx.save_for_backward(held, enter, keep, angle)
        return held, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_held, grad_state = grads
        held, enter, keep, angle = ctx.saved_tensors
        grad = grad_state.to(torch.float64, copy=True)
        grad_added = torch.empty_like(held)
        grad_keep = torch.zeros_like(keep, dtype=torch.float64) if ctx.needs_input_grad[4] else None
        grad_angle = torch.zeros_like(angle) if ctx.needs_input_grad[5] else None
        table = None if angle is None else (angle.cos().unsqueeze(-1), -angle.sin().unsqueeze(-1))
        start = held.shape[0]
        for depth in range(len(ctx.counts) - 1, -1, -1):
            count = ctx.counts[depth]
            start -= count
            rows = slice(start, start + count)
            current = grad[:count]
            grad_added[rows] = current
            if grad_keep is not None:
                target = _at(grad_keep, rows)
                target += (current * held[rows]).sum_to_size(target.shape)
            if keep is not None:
                current *= _at(keep, rows)
            current += grad_held[rows]
            if grad_angle is not None and depth > 0:
                # <g, dh/dangle> is the same on either side of the rotation and of `enter`.
                cosine, sine = held[rows].unbind(-3)
                grad_cosine, grad_sine = current.unbind(-3)
                grad_angle += (grad_cosine * sine - grad_sine * cosine).sum(dim=(0, -1))
            if enter is not None:
                current *= enter[rows]
            if table is not None and depth > 0:
                _rotate_(current, *table)
        return (
            None,
            grad_added,
            grad.to(ctx.initial_dtype),
            None,
            None if grad_keep is None else grad_keep.to(keep.dtype),
            grad_angle,
        )


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
