"""Backend "torch" of the Toeplitz scan: chunks of matrix products (model-spec 3).

Inside a chunk the scan is a product with the Toeplitz matrix [C, C] of each channel's taps; between chunks goes the
state [d, e]. Cost per token and channel: C + 2 e products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .carry import Factors, carry, carry_backward
from .checks import check_cu_seqlens
from .composed import composed
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
    packed = layout.pack_channels(x)  # [d, chunks, C]
    powers = decay_powers(decay, chunk)  # [d, C + 1, e]
    y, held = _ToeplitzChunks.apply(
        packed, powers, gain, layout.to_rows(initial.hidden), layout.counts, reverse, need_output
    )
    output = layout.unpack_channels(y) if need_output else x
    state = _final_state(packed, held, powers, layout, initial) if need_state else initial
    return output, state


def compiled_scan(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    initial: ToeplitzState,
    *,
    reverse: bool,
    need_output: bool,
    need_state: bool,
) -> tuple[Tensor, ToeplitzState]:
    """`forward_scan` as one operator of torch.compile's graph; cu_seqlens is checked inside."""
    flags = (reverse, need_output, need_state)
    y, hidden, length = _scan_op(x, decay, gain, cu_seqlens, key_mask, *initial, *flags)
    return (y if need_output else x), (ToeplitzState(hidden, length) if need_state else initial)


def _scan(
    x: Tensor, decay: Tensor, gain: Tensor, cu_seqlens: Any, key_mask: Any, hidden: Tensor, length: Tensor, reverse: bool,
    need_output: bool, need_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    bounds = check_cu_seqlens("toeplitz_scan", cu_seqlens, x.shape[0], x.shape[1])
    flags = {"reverse": reverse, "need_output": need_output, "need_state": need_state}
    y, state = forward_scan(x, decay, gain, bounds, key_mask, ToeplitzState(hidden, length), **flags)
    return y if need_output else None, *(state if need_state else (None, None))


def _fake_scan(x, decay, gain, cu_seqlens, key_mask, hidden, length, reverse, need_output, need_state):
    state = (hidden.new_empty(hidden.shape), length.new_empty(length.shape)) if need_state else (None, None)
    return x.new_empty(x.shape) if need_output else None, *state


_scan_op = composed(
    "lightnet::torch_toeplitz_scan",
    "Tensor x, Tensor decay, Tensor gain, Tensor? cu_seqlens, Tensor? key_mask, Tensor hidden, Tensor length, "
    "bool reverse, bool need_output, bool need_state",
    3,
    _scan,
    _fake_scan,
    constants=(2,),
)


class _ToeplitzChunks(torch.autograd.Function):
    """packed [d, chunks, C], powers [d, C + 1, e], gain [d, e], initial [rows, d, e] -> y like packed (None where not
    needed), and the state each chunk receives [d, chunks, e].

    Written by hand for the same reason as `chunk_scan`: element-wise passes and fresh buffers cost more than products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        powers: Tensor,
        gain: Tensor,
        initial: Tensor,
        counts: list[int],
        reverse: bool,
        need_output: bool,
    ) -> tuple[Tensor | None, Tensor]:
        chunk = packed.shape[2]
        # Sums to the end of each chunk, as if it were full: right wherever another chunk follows.
        added = packed @ powers[:, :chunk].flip(1)
        factors = Factors(keep=powers[:, chunk].unsqueeze(0))
        held, last = carry(counts, added.transpose(0, 1), initial, factors, need_last=False)
        held = held.transpose(0, 1)
        y = None
        if need_output:
            weighted = gain.unsqueeze(1) * powers
            y = packed @ _toeplitz(weighted[:, :chunk].sum(2), centre=not reverse)
            # The state a chunk receives is one token old at its first token: lambda^1 to lambda^C.
            y.baddbmm_(held, weighted[:, 1:].transpose(1, 2))
        ctx.counts, ctx.reverse = counts, reverse
        ctx.save_for_backward(packed, powers, gain, held, last)
        ctx.initial_dtype = initial.dtype
        ctx.set_materialize_grads(False)
        return y, held

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_y, grad_held = grads
        packed, powers, gain, held, last = ctx.saved_tensors
        chunk = packed.shape[2]
        grad_packed = grad_weighted = None
        if grad_y is not None:
            grad_y = grad_y.contiguous()
            weighted = gain.unsqueeze(1) * powers
            matrix = _toeplitz(weighted[:, :chunk].sum(2), centre=not ctx.reverse)
            grad_packed = grad_y @ matrix.transpose(1, 2)
            reading = grad_y @ weighted[:, 1:]
            grad_held = reading if grad_held is None else reading.add_(grad_held)
            grad_taps = _diagonal_sums(packed.transpose(1, 2) @ grad_y, centre=not ctx.reverse)
            grad_weighted = torch.empty_like(powers)
            grad_weighted[:, 0] = 0.0
            torch.bmm(grad_y.transpose(1, 2), held, out=grad_weighted[:, 1:])
            grad_weighted[:, :chunk] += grad_taps.unsqueeze(2)
        if grad_held is None:
            grad_held = torch.zeros_like(held)
        through = carry_backward(
            ctx.counts,
            held.transpose(0, 1),
            Factors(keep=powers[:, chunk].unsqueeze(0)),
            grad_held.transpose(0, 1),
            None,
            last,
            need_keep=True,
        )
        grad_added = through.added.transpose(0, 1)
        from_end = powers[:, :chunk].flip(1)
        if grad_packed is None:
            grad_packed = grad_added @ from_end.transpose(1, 2)
        else:
            grad_packed.baddbmm_(grad_added, from_end.transpose(1, 2))
        grad_powers = torch.zeros_like(powers)
        grad_powers[:, :chunk] = (packed.transpose(1, 2) @ grad_added).flip(1)
        if through.keep is not None:
            grad_powers[:, chunk] = through.keep[0]
        grad_gain = None
        if grad_weighted is not None:
            grad_gain = torch.einsum("cni,cni->ci", grad_weighted, powers)
            grad_powers.addcmul_(grad_weighted, gain.unsqueeze(1))
        return grad_packed, grad_powers, grad_gain, through.initial.to(ctx.initial_dtype), None, None, None


def _toeplitz(taps: Tensor, centre: bool) -> Tensor:
    """[d, C] -> [d, C, C] with entry (r, t) = taps[t - r] for r <= t, 0 elsewhere (and at r = t without the centre)."""
    chunk = taps.shape[1]
    padded = torch.cat([torch.zeros_like(taps), taps], dim=1)
    if not centre:
        padded[:, chunk] = 0.0
    return padded.unfold(1, chunk, 1)[:, 1:].flip(1)


def _diagonal_sums(matrix: Tensor, centre: bool) -> Tensor:
    """Adjoint of `_toeplitz`: [d, C, C] -> [d, C], the sums over t - r = n."""
    channels, chunk, _ = matrix.shape
    flipped = matrix.flip(1)
    padded = torch.ops.aten.unfold_backward(
        torch.cat([torch.zeros_like(flipped[:, :1]), flipped], dim=1), [channels, 2 * chunk], 1, chunk, 1
    )
    sums = padded[:, chunk:]
    if not centre:
        sums[:, 0] = 0.0
    return sums


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
    first = layout.to_rows(initial.hidden)
    if layout.chunks:
        # Each last chunk backwards, its last token first: one product with the powers then serves all sizes.
        place = sizes.unsqueeze(1) - 1 - torch.arange(chunk, device=packed.device)  # [sequences, C]
        slot = (last.unsqueeze(1) * chunk + place.clamp_min(0)).reshape(-1)
        x = packed.flatten(1).index_select(1, slot).unflatten(1, place.shape).masked_fill(place < 0, 0.0)
        local = (x @ powers[:, :chunk]).transpose(0, 1)
        before = torch.where(alive[:, None, None], held[:, last].transpose(0, 1), first)
    else:
        local, before = torch.zeros_like(first), first
    hidden = powers[:, sizes].transpose(0, 1) * before + local
    return ToeplitzState(layout.from_rows(hidden).contiguous(), initial.length + layout.lengths)


def decay_powers(decay: Tensor, last: int) -> Tensor:
    """lambda^0 ... lambda^last: [d, e] -> [d, last + 1, e]."""
    return _Powers.apply(decay, last)


class _Powers(torch.autograd.Function):
    """exp(n log lambda) is as accurate as lambda allows; its own gradient would divide by lambda, so it is written
    out: d lambda^n = n lambda^(n-1), right at lambda = 0 too."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, last: int) -> Tensor:
        exponents = torch.arange(last + 1, device=decay.device, dtype=decay.dtype).unsqueeze(-1)
        powers = torch.exp(decay.log().unsqueeze(1) * exponents)
        # Subnormals make the products ten times slower on a CPU and weigh nothing. Not in place: with this and the next line in
        # place torch.compile of torch 2.11 kept something else for the backward pass.
        powers = F.threshold(powers, torch.finfo(powers.dtype).tiny * 1e7, 0.0)
        powers = torch.where(exponents == 0, 1.0, powers)  # 0^0
        ctx.save_for_backward(powers, exponents)
        return powers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        powers, exponents = ctx.saved_tensors
        return (grads[0][:, 1:] * powers[:, :-1]).mul_(exponents[1:]).sum(1), None
