"""Backend "reference" of the Toeplitz scan: the explicit matrix, sequence by sequence (model-spec 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import sequence_indices
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
    """One direction; see `toeplitz_torch.forward_scan`."""
    output = torch.zeros_like(x)
    hidden, lengths = [], []
    for row, place in enumerate(sequence_indices(x, cu_seqlens, key_mask)):
        batch, token = (index.flip(0) for index in place) if reverse else place
        count = len(token)
        step = torch.arange(count, device=x.device)
        lag = step[:, None] - step
        taps = torch.einsum("ci,cin->cn", gain, decay.unsqueeze(-1) ** step)  # [d, lag]
        matrix = torch.where(lag >= int(reverse), taps[:, lag.abs()], 0.0)  # [d, t, r]; the centre counts once
        y = torch.einsum("ctr,rc->tc", matrix, x[batch, token])
        y = y + torch.einsum("ci,cin,ci->nc", gain, decay.unsqueeze(-1) ** (step + 1), initial.hidden[row])
        output = output.index_put((batch, token), y)
        to_end = decay.unsqueeze(-1) ** (count - 1 - step)
        state = torch.einsum("cin,nc->ci", to_end, x[batch, token])
        hidden.append(state + decay**count * initial.hidden[row])
        lengths.append(initial.length[row] + count)
    if not hidden:
        return output, initial
    return output, ToeplitzState(torch.stack(hidden), torch.stack(lengths))
