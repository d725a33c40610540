"""Backend "reference": the naive form, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from . import naive
from .state import ScanState, identity_state, merge_states, shift_state


def causal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    initial: ScanState,
    continued: bool,
    need_output: bool = True,
    need_state: bool = True,
) -> tuple[Tensor | None, ScanState]:
    """See `scan.additive_scan`; inputs are in the computing dtype."""
    phi, mass, gain = _parts(query, key, decay, activation)
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    places = sequence_indices(key, cu_seqlens, key_mask)
    locals_ = []
    for row, place in enumerate(places):
        state = ScanState(*(x[row] for x in initial))
        count = place[1].shape[0]
        if count and need_output:
            one = naive.causal_sequence(phi[place], mass[place], gain[place], value[place], theta, state)
            output = output.index_put(place, one)
        positions = torch.arange(count, device=key.device) - count  # the next token is at angle 0
        length = torch.as_tensor(count, device=key.device)
        locals_.append(naive.sequence_state(mass[place], gain[place], value[place], theta, positions, length))
    return output, merge_states(initial, _stack(locals_, initial), theta)


def bidirectional_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    coordinates: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: list[int] | None,
    key_mask: Tensor | None,
    combine: Callable[[ScanState], ScanState],
) -> tuple[Tensor, ScanState]:
    """See `scan.additive_scan`; `combine` takes the state of the local tokens to that of all tokens."""
    phi, mass, gain = _parts(query, key, decay, activation)
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    places = sequence_indices(key, cu_seqlens, key_mask)
    lengths = torch.tensor([len(place[1]) for place in places], dtype=torch.int64, device=key.device)
    positions = [
        torch.arange(len(place[1]), device=key.device) if coordinates is None else coordinates[place[1]]
        for place in places
    ]
    locals_ = [
        naive.sequence_state(mass[place], gain[place], value[place], theta, where, length)
        for place, where, length in zip(places, positions, lengths, strict=True)
    ]
    _, _, heads, width = key.shape
    empty = identity_state(
        0, heads, width, value.shape[3], lrpe=theta is not None, dtype=value.dtype, device=value.device
    )
    whole = combine(_stack(locals_, empty))
    for row, (place, where) in enumerate(zip(places, positions, strict=True)):
        if len(where):
            one = naive.read_state(phi[place], theta, where, ScanState(*(x[row] for x in whole)))
            output = output.index_put(place, one)
    return output, whole if coordinates is not None else shift_state(whole, lengths, theta)


def _parts(query: Tensor, key: Tensor, decay: Tensor | None, activation: bool) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), the log-mass, and the factor on the values (silu(k) in the no-share ablation, model-spec 4)."""
    phi = F.silu(query) if activation else query
    return (phi, key, torch.ones_like(key)) if decay is None else (phi, decay, F.silu(key))


def sequence_indices(key: Tensor, cu_seqlens: list[int] | None, key_mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Batch and token indices of the real tokens of each sequence."""
    batch, tokens = key.shape[:2]
    if cu_seqlens is None:
        spans = [(row, 0, tokens) for row in range(batch)]
    else:
        spans = [(0, begin, end) for begin, end in pairwise(cu_seqlens)]
    places = []
    for row, begin, end in spans:
        index = torch.arange(begin, end, device=key.device)
        if key_mask is not None:
            index = index[key_mask[row, begin:end]]
        places.append((torch.full_like(index, row), index))
    return places


def _stack(states: list[ScanState], empty: ScanState) -> ScanState:
    return ScanState(*(torch.stack(parts) for parts in zip(*states, strict=True))) if states else empty
