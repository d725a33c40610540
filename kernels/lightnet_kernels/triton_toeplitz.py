"""Backend "triton" of the Toeplitz scan, on a GPU (or under TRITON_INTERPRET=1 on a CPU, for tests).

x is laid out channel by channel, scanned by one program a channel, and laid back; see `triton_toeplitz_kernels`. Beside
the tensors themselves and their channel-by-channel copies, memory holds one state for every TILE chunks.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import triton_toeplitz_kernels as kernels
from .checks import check_cu_seqlens
from .operators import Operator
from .state import ToeplitzState
from .toeplitz_torch import decay_powers
from .triton_launch import launch
from .triton_replay import by_bounds, replayed

CHUNK = 64  # C, tokens in a row
TILE = 64  # M, rows of one product


class Ends(NamedTuple):
    """Where sequences end."""

    lengths: Tensor  # [sequences] int64
    last: Tensor  # [sequences] int64, tokens of the last row, 0 in an empty sequence
    tail: Tensor  # [sequences, CHUNK] int64, tokens from a sequence's end backwards, as places in [B * N]


class RowTable(NamedTuple):
    """Chunks of a batch of sequences, on the device. Rows of a sequence are consecutive, all but its last full."""

    rows: Tensor  # [rows, 5] int32, see `triton_toeplitz_kernels.FIELDS`
    ends: Ends


@functools.lru_cache(maxsize=16)
def row_table(batch: int, tokens: int, bounds: tuple[int, ...] | None, reverse: bool, device: torch.device) -> RowTable:
    """Made on the host, once for all calls alike. `reverse` runs every sequence from its end."""
    with torch.inference_mode(False):  # training saves of it what evaluation may have made
        return _row_table(batch, tokens, bounds, reverse, device)


def _row_table(
    batch: int, tokens: int, bounds: tuple[int, ...] | None, reverse: bool, device: torch.device
) -> RowTable:
    edges = None if bounds is None else torch.tensor(bounds, dtype=torch.int64)
    begin, lengths, batches = _sequences(batch, tokens, edges, torch.device("cpu"))
    counts = (lengths + CHUNK - 1) // CHUNK
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    size = (lengths[owner] - place * CHUNK).clamp_max(CHUNK)
    base = begin[owner] + (lengths[owner] - 1 - place * CHUNK if reverse else place * CHUNK)
    ends = (place == 0).long() + 2 * (place == counts[owner] - 1).long()
    rows = torch.stack([batches[owner], base, size, ends, owner], 1).int()
    # Without waiting for the device, which is at the batch before.
    found = [x.to(device, non_blocking=True) for x in (rows, *_ends(begin, lengths, batches, tokens, reverse))]
    return RowTable(found[0], Ends(*found[1:]))


def _sequences(batch: int, tokens: int, edges: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First token, length and batch row of every sequence."""
    if edges is not None:
        return edges[:-1], edges.diff(), torch.zeros_like(edges[:-1])
    lengths = torch.full((batch,), tokens, dtype=torch.int64, device=device)
    return torch.zeros_like(lengths), lengths, torch.arange(batch, device=device)


def _ends(begin: Tensor, lengths: Tensor, batches: Tensor, tokens: int, reverse: bool) -> Ends:
    last = torch.where(lengths > 0, (lengths - 1) % CHUNK + 1, 0)
    back = torch.arange(CHUNK, device=begin.device)
    tail = begin[:, None] + (back if reverse else lengths[:, None] - 1 - back)
    return Ends(lengths, last, torch.where(back < last[:, None], batches[:, None] * tokens + tail, 0))


def _ends_of(x: Tensor, cu_seqlens: Tensor | None, reverse: bool) -> Ends:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # nothing to be looked at, nor to be kept
        edges = None if cu_seqlens is None else cu_seqlens.to(x.device, torch.int64)
        return _ends(*_sequences(x.shape[0], x.shape[1], edges, x.device), x.shape[1], reverse)
    return _table(x, check_cu_seqlens("toeplitz_scan", cu_seqlens, x.shape[0], x.shape[1]), reverse).ends


def _table(x: Tensor, bounds: list[int] | None, reverse: bool) -> RowTable:
    return row_table(x.shape[0], x.shape[1], None if bounds is None else tuple(bounds), reverse, x.device)


def _prepare(x: Tensor, bounds: list[int] | None, reverse: bool) -> None:
    """What a recording must find made."""
    _table(x, bounds, reverse)


def forward_scan(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    initial: ToeplitzState | None,
    *,
    reverse: bool,
    need_output: bool,
    need_state: bool,
) -> tuple[Tensor, ToeplitzState | None]:
    """See `toeplitz_torch.forward_scan`; x keeps its dtype, and so does y. No `initial` is one of zeros. cu_seqlens is
    checked by the operator."""
    y, held, _ = toeplitz_rows(
        x, decay, gain, None if initial is None else initial.hidden, cu_seqlens, reverse, need_output, need_state
    )
    state = initial
    if need_state:
        state = _final_state(x, decay, held, _ends_of(x, cu_seqlens, reverse), initial)
    return (y if need_output else x), state


def _final_state(x: Tensor, decay: Tensor, held: Tensor, ends: Ends, initial: ToeplitzState | None) -> ToeplitzState:
    """lambda^n held + sum_r lambda^r x_(n - 1 - r) over the n tokens of each sequence's last row."""
    powers = decay_powers(decay, CHUNK)  # [d, C + 1, e]
    tail = torch.zeros(*ends.tail.shape, x.shape[2], device=x.device)
    if x.numel():
        exists = torch.arange(CHUNK, device=x.device) < ends.last[:, None]
        tail = torch.where(exists[..., None], x.reshape(-1, x.shape[2])[ends.tail].float(), 0.0)
    hidden = torch.einsum("snd,dne->sde", tail, powers[:, :CHUNK])
    hidden = hidden + powers[:, ends.last].transpose(0, 1) * held
    return ToeplitzState(hidden, ends.lengths.clone() if initial is None else initial.length + ends.lengths)


class _Constants(NamedTuple):
    """What the kernels take of lambda and b, and their compile-time arguments."""

    log_decay: Tensor  # log2 lambda [d, e]
    full: Tensor  # lambda^CHUNK, from float64: it is applied once a chunk
    gain: Tensor
    taps: Tensor  # [d, CHUNK]
    rank: dict[str, int]

    def dots(self, dtype: torch.dtype) -> dict[str, Any]:
        """Tiles, precision and warps. 16-bit tensors are exact in tf32, and powers of lambda good to 5e-4 in it."""
        wide = dtype == torch.float32
        return {**self.rank, "M": TILE, "PREC": "tf32x3" if wide else "tf32", "num_stages": 1}


def _constants(decay: Tensor, gain: Tensor) -> _Constants:
    # Triton's log2 is good to 2^-22 absolute, which 64 times over is too little for lambda near 1.
    double = decay.double()
    channels, rank = decay.shape
    # Tiles of 32 in products raise illegal memory accesses with Triton 3.6 on an H100: pad to 64.
    sizes = {"E": rank, "EP": max(64, triton.next_power_of_2(rank)), "C": CHUNK}
    log_decay, gain = double.log2().float().contiguous(), gain.contiguous()
    taps = torch.empty(channels, CHUNK, device=decay.device)
    if channels:
        launch(kernels.sum_taps, (channels,))(log_decay, gain, taps, **sizes, num_warps=4)
    return _Constants(log_decay, (double**CHUNK).float(), gain, taps, sizes)


CHANNELS = 64  # of one program that changes the layout


def _pack(x: Tensor, rows: Tensor, reverse: bool) -> Tensor:
    channels, count = x.shape[2], rows.shape[0]
    packed = torch.empty(channels, count, CHUNK, dtype=x.dtype, device=x.device)
    if x.stride(2) != 1:
        x = x.contiguous()
    launch(kernels.pack_channels, (count, triton.cdiv(channels, CHANNELS)))(
        x, packed, rows, x.stride(0), x.stride(1), count, channels,
        REVERSE=reverse, C=CHUNK, BD=CHANNELS, num_warps=4,
    )  # fmt: skip
    return packed


def _unpack(packed: Tensor, x: Tensor, rows: Tensor, reverse: bool) -> None:
    """Into x, contiguous."""
    channels, count = x.shape[2], rows.shape[0]
    launch(kernels.unpack_channels, (count, triton.cdiv(channels, CHANNELS)))(
        packed, x, rows, x.stride(0), x.stride(1), count, channels,
        REVERSE=reverse, C=CHUNK, BD=CHANNELS, num_warps=4,
    )  # fmt: skip


def _rows(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    initial: Tensor | None,
    bounds: list[int] | None,
    reverse: bool,
    need_output: bool,
    need_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction: x [B, N, d], decay and gain [d, e], initial [sequences, d, e], bounds as in `forward_scan`.

    Returns y like x; the state that the last row of each sequence receives [sequences, d, e] (the initial one where it
    has no row); and what the backward pass needs [d, tiles, e]. The first two are empty where not needed.
    """
    rows = _table(x, bounds, reverse).rows
    channels, count = x.shape[2], rows.shape[0]
    sequences = x.shape[0] if bounds is None else len(bounds) - 1
    y, last, carry = _outputs(x, decay, sequences, _tiles(x, bounds), need_output, need_last)
    if need_last:
        last.zero_() if initial is None else last.copy_(initial)
    if not count or not channels:
        return y, last, carry
    constants = _constants(decay, gain)
    packed = _pack(x, rows, reverse)
    out = torch.empty_like(packed) if need_output else packed
    launch(kernels.scan_channels, (channels,))(
        packed, out, rows, constants.log_decay, constants.full, constants.gain, constants.taps,
        None if initial is None else initial.contiguous(), carry, last, count, channels,
        OUTPUT=need_output, INITIAL=initial is not None, FINAL=need_last, CENTRE=not reverse, num_warps=4,
        **constants.dots(x.dtype),
    )  # fmt: skip
    if need_output:
        _unpack(out, y, rows, reverse)
    return y, last, carry


def _fake_rows(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    need_output: bool,
    need_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens is None:
        return _outputs(x, decay, x.shape[0], _tiles(x, None), need_output, need_last)
    tiles = torch.library.get_ctx().new_dynamic_size()  # depends on where the segments end
    return _outputs(x, decay, cu_seqlens.shape[0] - 1, tiles, need_output, need_last)


def _tiles(x: Tensor, bounds: list[int] | None) -> int:
    if bounds is None:
        rows = x.shape[0] * ((x.shape[1] + CHUNK - 1) // CHUNK)
    else:
        rows = sum((end - begin + CHUNK - 1) // CHUNK for begin, end in pairwise(bounds))
    return (rows + TILE - 1) // TILE


def _outputs(
    x: Tensor, decay: Tensor, sequences: int, tiles: int, need_output: bool, need_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if need_output else (0,)),
        decay.new_empty((sequences, *decay.shape) if need_last else (0,)),
        decay.new_empty(decay.shape[0], tiles, decay.shape[1]),
    )


def _rows_backward(
    grad: Tensor,
    grad_last: Tensor | None,
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    initial: Tensor | None,
    bounds: list[int] | None,
    carry: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to x, decay, gain and initial (empty without one), from those to y [B, N, d] and to the last rows'
    states."""
    rows = _table(x, bounds, reverse).rows
    channels, count = x.shape[2], rows.shape[0]
    grad_x, grad_decay, grad_gain, grad_initial = _gradients(x, decay, initial)
    if initial is not None:
        grad_initial.zero_() if grad_last is None else grad_initial.copy_(grad_last)
    if not count or not channels:
        return grad_x, grad_decay.zero_(), grad_gain.zero_(), grad_initial
    constants = _constants(decay, gain)
    packed, grad_packed = _pack(x, rows, reverse), _pack(grad, rows, reverse)
    grad_rows = torch.empty_like(packed)
    grad_toeplitz = torch.empty(channels, CHUNK, CHUNK, device=x.device)
    states = {"INITIAL": initial is not None, "FINAL": grad_last is not None, **constants.dots(x.dtype)}
    initial = None if initial is None else initial.contiguous()
    grad_last = None if grad_last is None else grad_last.contiguous()
    launch(kernels.scan_input_grads, (channels,))(
        grad_packed, grad_rows, rows, constants.log_decay, constants.full, constants.gain, constants.taps,
        grad_last, grad_initial, count, channels, CENTRE=not reverse, num_warps=4, **states,
    )  # fmt: skip
    launch(kernels.scan_parameter_grads, (channels,))(
        packed, grad_packed, rows, constants.log_decay, constants.full, constants.gain, initial, carry, grad_last,
        grad_decay, grad_gain, count, channels, num_warps=4, **states,
    )  # fmt: skip
    launch(kernels.toeplitz_grads, (channels,))(
        packed, grad_packed, grad_toeplitz, count, C=CHUNK, M=TILE, PREC=states["PREC"], num_warps=4, num_stages=2
    )
    launch(kernels.add_tap_grads, (channels,))(
        grad_toeplitz, constants.log_decay, constants.gain, grad_decay, grad_gain,
        CENTRE=not reverse, **constants.rank, num_warps=4,
    )  # fmt: skip
    _unpack(grad_rows, grad_x, rows, reverse)
    return grad_x, grad_decay, grad_gain, grad_initial


def _fake_rows_backward(
    grad: Tensor,
    grad_last: Tensor | None,
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    carry: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(x, decay, initial)


def _gradients(x: Tensor, decay: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = decay.new_empty(0 if initial is None else initial.shape)
    return x.new_empty(x.shape), decay.new_empty(decay.shape), decay.new_empty(decay.shape), states


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, decay, gain, initial, cu_seqlens, ctx.reverse, ctx.need_output, _ = inputs
    ctx.save_for_backward(x, decay, gain, initial, cu_seqlens, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, decay, gain, initial, cu_seqlens, carry = ctx.saved_tensors
    grad, grad_last = grads[:2]
    if grad is None or not ctx.need_output:
        grad = torch.zeros_like(x)
    grad_x, grad_decay, grad_gain, grad_initial = toeplitz_rows_backward(
        grad, grad_last, x, decay, gain, initial, cu_seqlens, carry, ctx.reverse
    )
    return grad_x, grad_decay, grad_gain, None if initial is None else grad_initial, *[None] * 4


OPERANDS = "Tensor x, Tensor decay, Tensor gain, Tensor? initial, Tensor? cu_seqlens"
toeplitz_rows_backward = Operator(
    "lightnet_kernels::toeplitz_rows_backward",
    f"(Tensor grad, Tensor? grad_last, {OPERANDS}, Tensor carry, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)",
    by_bounds("toeplitz_scan", replayed(_rows_backward, lambda *given: _prepare(given[2], given[6], given[8])), at=6),
    _fake_rows_backward,
)
toeplitz_rows = Operator(
    "lightnet_kernels::toeplitz_rows",
    f"({OPERANDS}, bool reverse, bool need_output, bool need_last) -> (Tensor, Tensor, Tensor)",
    by_bounds("toeplitz_scan", replayed(_rows, lambda *given: _prepare(given[0], given[4], given[5])), at=4),
    _fake_rows,
)
toeplitz_rows.differentiable(_backward, _setup)
