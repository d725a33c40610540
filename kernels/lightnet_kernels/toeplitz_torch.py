"""Backend "torch" of the Toeplitz scan: chunks of matrix products (model-spec 3).

Inside a chunk the scan is a product with the Toeplitz matrix [C, C] of each channel's taps; between chunks goes the
state [d, e]. Cost per token and channel: C + 2 e products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .carry import carry
from .segments import ChunkLayout, chunk_layout
from .state import ToeplitzState


def forward_scan(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    initial: ToeplitzState,
    *,
    reverse: bool,
    need_output: bool,
    need_state: bool,
) -> tuple[Tensor, ToeplitzState]:
    """One direction of the scan. `reverse` runs every sequence from its end and leaves the centre out.

    Returns (y [B, N, d], state); where one is not needed its content is not meant to be read.
    """
    layout = chunk_layout(x.shape[0], x.shape[1], cu_seqlens, key_mask, x.device, reverse=reverse)
    chunk = layout.chunk
    packed = layout.pack(x).permute(2, 0, 1).contiguous()  # [d, chunks, C]
    powers = decay_powers(decay, chunk)  # [d, e, C + 1]

    # Sums to the end of each chunk, as if it were full: right wherever another chunk follows.
    to_end = powers[:, :, :chunk].flip(2).transpose(1, 2)  # [d, C, e]
    added = (packed @ to_end).transpose(0, 1)  # [chunks, d, e]
    per_chunk = powers[:, :, chunk].unsqueeze(0)
    held, _ = carry(layout.counts, added, layout.to_rows(initial.hidden), keep=per_chunk)

    output = x
    if need_output:
        reading = gain.unsqueeze(-1) * powers[:, :, 1:]  # [d, e, C]: the state is one token old at the first
        taps = torch.einsum("ci,cin->cn", gain, powers[:, :, :chunk])
        matrix = _toeplitz(taps, centre=not reverse)
        y = packed @ matrix + held.transpose(0, 1) @ reading
        output = layout.unpack(y.permute(1, 2, 0))
    state = _final_state(packed, held, powers, layout, initial) if need_state else initial
    return output, state


def _toeplitz(taps: Tensor, centre: bool) -> Tensor:
    """[d, C] -> [d, C, C] with entry (r, t) = taps[t - r] for r <= t, 0 elsewhere (and at r = t without the centre)."""
    channels, chunk = taps.shape
    if not centre:
        taps = torch.cat([torch.zeros_like(taps[:, :1]), taps[:, 1:]], dim=1)
    # Rows of 2C - 1 entries, each shifted by one from the last: a view of C zeros followed by the taps. The copy turns
    # the gradient of the view into sums along diagonals.
    padded = torch.cat([torch.zeros_like(taps), taps], dim=1)
    return padded.unfold(1, chunk, 1)[:, 1:].flip(1)


def _final_state(
    packed: Tensor, held: Tensor, powers: Tensor, layout: ChunkLayout, initial: ToeplitzState
) -> ToeplitzState:
    """lambda^n held + sum_r lambda^(n - 1 - r) x_r over the n tokens of each sequence's last chunk."""
    chunk = layout.chunk
    sizes = layout.to_rows(layout.tokens_in_last_chunk())
    starts = torch.tensor([0, *layout.counts], device=packed.device).cumsum(0)
    depth = -(-layout.to_rows(layout.lengths) // chunk)
    alive = depth > 0
    rows = torch.arange(layout.sequences, device=packed.device)
    last = torch.where(alive, starts[(depth - 1).clamp_min(0)] + rows, 0)
    exponent = sizes.unsqueeze(1) - 1 - torch.arange(chunk, device=packed.device)  # [sequences, C]
    weights = powers[:, :, exponent.clamp_min(0).reshape(-1)].unflatten(2, exponent.shape)  # [d, e, sequences, C]
    first = layout.to_rows(initial.hidden)
    if layout.chunks:
        x = torch.where(exponent >= 0, packed[:, last], 0.0)  # [d, sequences, C]
        local = torch.einsum("cisn,csn->sci", weights, x)
        before = torch.where(alive[:, None, None], held[last], first)
    else:
        local, before = torch.zeros_like(first), first
    hidden = powers[:, :, sizes].permute(2, 0, 1) * before + local
    return ToeplitzState(layout.from_rows(hidden), initial.length + layout.lengths)


def decay_powers(decay: Tensor, last: int) -> Tensor:
    """lambda^0 ... lambda^last: [d, e] -> [d, e, last + 1]."""
    return _Powers.apply(decay, last)


class _Powers(torch.autograd.Function):
    """exp(n log lambda) is as accurate as lambda allows; its own gradient would divide by lambda, so it is written
    out: d lambda^n = n lambda^(n-1), right at lambda = 0 too."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, last: int) -> Tensor:
        exponents = torch.arange(last + 1, device=decay.device, dtype=decay.dtype)
        powers = torch.exp(decay.log().unsqueeze(-1) * exponents)
        powers[..., 0] = 1.0  # 0^0
        ctx.save_for_backward(powers, exponents)
        return powers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        powers, exponents = ctx.saved_tensors
        # einsum over lags, without the [d, e, C] products
        return ((grads[0][..., 1:] * powers[..., :-1]) @ exponents[1:], None)
