"""Backend "torch" under torch.compile: the scans of `torch_scan`, where what tensors hold decides their steps as one operator.

The signatures are those of `torch_scan`, but for cu_seqlens, which is the caller's tensor and checked inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import torch_scan
from .checks import check_cu_seqlens
from .composed import composed
from .state import ScanState, shift_state

WHERE = "Tensor? cu_seqlens, Tensor? key_mask"
OPTIONS = (
    "theta",
    "coordinates",
    "decay",
    "cu_seqlens",
    "key_mask",
)  # tensors of a bidirectional scan beside the three


def causal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    initial: ScanState,
    continued: bool,
    need_output: bool = True,
    need_state: bool = True,
) -> tuple[Tensor | None, ScanState | None]:
    """See `torch_scan.causal_scan`; the state is in the initial one's dtype."""
    if torch_scan.is_one_step(key, theta, cu_seqlens, key_mask):
        return torch_scan.one_token(query, key, value, activation, theta, decay, initial)
    output, *state = _causal_op(
        query, key, value, theta, decay, cu_seqlens, key_mask, *initial, activation, continued, need_output, need_state
    )
    return output if need_output else None, ScanState(*state) if need_state else None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, theta: Any, decay: Any, cu_seqlens: Any, key_mask: Any, top: Tensor,
    total: Tensor, kv: Tensor, length: Tensor, activation: bool, continued: bool, need_output: bool, need_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    output, state = torch_scan.causal_scan(
        query,
        key,
        value,
        activation=activation,
        theta=theta,
        decay=decay,
        cu_seqlens=check_cu_seqlens("additive_scan", cu_seqlens, *key.shape[:2]),
        key_mask=key_mask,
        initial=ScanState(top, total, kv, length),
        continued=continued,
        need_output=need_output,
        need_state=need_state,
    )
    if not need_state:
        return output, None, None, None, None
    assert state is not None
    return output, *(x.to(kv.dtype) for x in state[:3]), state.length


def _fake_causal(query, key, value, theta, decay, cu_seqlens, key_mask, top, total, kv, length, *flags):
    *_, need_output, need_state = flags
    output = value.new_empty(value.shape) if need_output else None
    if not need_state:
        return output, None, None, None, None
    return output, *(x.new_empty(x.shape, dtype=kv.dtype) for x in (top, total, kv)), length.new_empty(length.shape)


_causal_op = composed(
    "lightnet::torch_causal_scan",
    f"Tensor query, Tensor key, Tensor value, Tensor? theta, Tensor? decay, {WHERE}, Tensor max, Tensor sum, Tensor kv, "
    "Tensor length, bool activation, bool continued, bool need_output, bool need_state",
    5,
    _causal,
    _fake_causal,
    constants=(1, 4),
)


def bidirectional_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    combine: Callable[[ScanState], ScanState],
    **options: Any,
) -> tuple[Tensor, ScanState]:
    """See `torch_scan.bidirectional_scan`."""
    if options["cu_seqlens"] is None and options["key_mask"] is None:  # shapes decide
        return torch_scan.bidirectional_scan(query, key, value, combine=combine, **options)
    given = query, key, value, *(options[name] for name in OPTIONS)
    output, *parts = _bidirectional_op(*given, None, None, options["activation"])
    local = ScanState(*parts)
    whole = combine(local)
    if whole.kv is not local.kv:
        output = _bidirectional_op(*given, whole.sum, whole.kv, options["activation"])[0]
    if options["coordinates"] is None:
        whole = shift_state(whole, local.length, options["theta"])
    return output, whole


def _bidirectional(
    query: Tensor, key: Tensor, value: Tensor, theta: Any, coordinates: Any, decay: Any, cu_seqlens: Any, key_mask: Any,
    whole_sum: Tensor | None, whole_kv: Tensor | None, activation: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output read from the state of all tokens, where given, else from that of the local ones; and the latter."""
    found: list[ScanState] = []

    def combine(local: ScanState) -> ScanState:
        found.append(local)
        return local if whole_sum is None or whole_kv is None else local._replace(sum=whole_sum, kv=whole_kv)

    output, _ = torch_scan.bidirectional_scan(
        query,
        key,
        value,
        activation=activation,
        theta=theta,
        coordinates=coordinates,
        decay=decay,
        cu_seqlens=check_cu_seqlens("additive_scan", cu_seqlens, *key.shape[:2]),
        key_mask=key_mask,
        combine=combine,
    )
    return output, *found[0]


def _fake_bidirectional(query, key, value, theta, coordinates, decay, cu_seqlens, *_):
    sequences = key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, width = key.shape[2:]
    vector = key.new_empty(sequences, heads, width)
    kv = key.new_empty(sequences, heads, width if theta is None else 2 * width, value.shape[3])
    length = key.new_empty(sequences, dtype=torch.int64)
    return value.new_empty(value.shape), vector, torch.empty_like(vector), kv, length


_bidirectional_op = composed(
    "lightnet::torch_bidirectional_scan",
    f"Tensor query, Tensor key, Tensor value, Tensor? theta, Tensor? coordinates, Tensor? decay, {WHERE}, "
    "Tensor? whole_sum, Tensor? whole_kv, bool activation",
    5,
    _bidirectional,
    _fake_bidirectional,
    constants=(1, 4),
)
