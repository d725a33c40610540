"""States of the two scans and the operators that merge them.

A state is all that later tokens need to know of earlier ones. One associative merge serves chunks, sequence-parallel
ranks, decoding, and resuming a prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_kind, check_tensors, check_theta, is_integer
from .lrpe import move_origin


class ScanState(NamedTuple):
    """State of `additive_scan` (LightNet section 3, model-spec 1 and 2).

    max:    [B, H, D], running maximum of the log-masses; -inf before any token. A constant: whoever produces a state
            detaches it, whoever consumes one gives it no gradient.
    sum:    [B, H, D], normaliser in units of exp(max).
    kv:     [B, H, D, Dv], weighted values in units of exp(max); with theta [B, H, 2D, Dv], the cosine half first,
            angle 0 being the token that comes next (with explicit grid coordinates: coordinate 0).
    length: [B], int64, the number of real tokens seen.

    float32, or float64 where the inputs or the initial state are. With `cu_seqlens` B is the number of segments.
    """

    max: Tensor
    sum: Tensor
    kv: Tensor
    length: Tensor


class ToeplitzState(NamedTuple):
    """State of `toeplitz_scan` (model-spec 3): hidden [B, d, e] = sum_m lambda^(N - m) x_m, length [B] int64."""

    hidden: Tensor
    length: Tensor


def identity_state(
    batch: int,
    heads: int,
    key_width: int,
    value_width: int,
    *,
    lrpe: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> ScanState:
    """The state before any token, neutral under `merge_states`. `lrpe` doubles the rows of kv."""
    rows = 2 * key_width if lrpe else key_width
    return ScanState(
        torch.full((batch, heads, key_width), float("-inf"), dtype=dtype, device=device),
        torch.zeros(batch, heads, key_width, dtype=dtype, device=device),
        torch.zeros(batch, heads, rows, value_width, dtype=dtype, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )


def scale_between(source: Tensor, target: Tensor) -> Tensor:
    """exp(source - target) for source <= target, and 0 where source is -inf (also where both are)."""
    return torch.where(source == float("-inf"), 0.0, torch.exp(source - target))


def merge_states(left: ScanState, right: ScanState, theta: Tensor | None = None) -> ScanState:
    """State of the tokens of `left` followed by those of `right` (model-spec 1).

    With LRPE pass the scan's `theta` [H, D]: the left kv is moved to the right's frame by right.length tokens, with
    cos and sin in float64. States on a shared origin (bidirectional calls with coordinates) are merged without theta.
    Associative; commutative only without theta. Differentiable in sum, kv and theta; max is a constant.
    """
    for where, state in (("left", left), ("right", right)):
        check_kind("merge_states", where, state, ScanState)
    if left.kv.shape != right.kv.shape:
        raise ValueError(
            f"merge_states: kv shapes {tuple(left.kv.shape)} and {tuple(right.kv.shape)} differ; "
            "merge states of the same model and batch (identity_state makes a neutral one)"
        )
    _check_doubled("merge_states", left, theta)
    left_max, right_max = left.max.detach(), right.max.detach()
    new_max = torch.maximum(left_max, right_max)
    left_scale, right_scale = scale_between(left_max, new_max), scale_between(right_max, new_max)
    left_kv = left.kv if theta is None else move_origin(left.kv, theta, right.length)
    return ScanState(
        new_max,
        left.sum * left_scale + right.sum * right_scale,
        left_kv * _rows(left_scale, left_kv) + right.kv * _rows(right_scale, right.kv),
        left.length + right.length,
    )


def shift_state(state: ScanState, tokens: Tensor | int, theta: Tensor | None) -> ScanState:
    """The same state with angle 0 moved `tokens` later (int or [B]; negative: earlier). A no-op without theta."""
    check_kind("shift_state", "state", state, ScanState)
    batch = state.kv.shape[0]
    if isinstance(tokens, Tensor):
        if not is_integer(tokens) or tokens.shape not in ((), (batch,)):
            raise ValueError(
                f"shift_state: tokens are {tokens.dtype} {tuple(tokens.shape)}; pass an int, or integers [B] = [{batch}]"
            )
    elif not isinstance(tokens, int):
        raise ValueError(f"shift_state: tokens are of type {type(tokens).__name__}; pass an int, or integers [B]")
    if theta is None:
        return state
    _check_doubled("shift_state", state, theta)
    steps = torch.as_tensor(tokens, dtype=torch.int64, device=state.kv.device).expand(batch)
    return state._replace(kv=move_origin(state.kv, theta, steps))


def merge_toeplitz_states(left: ToeplitzState, right: ToeplitzState, decay: Tensor) -> ToeplitzState:
    """State of the tokens of `left` followed by those of `right`: lambda^(right.length) h_left + h_right."""
    for where, state in (("left", left), ("right", right)):
        check_kind("merge_toeplitz_states", where, state, ToeplitzState)
    check_tensors("merge_toeplitz_states", decay=decay)
    if left.hidden.shape != right.hidden.shape:
        raise ValueError(
            f"merge_toeplitz_states: hidden shapes {tuple(left.hidden.shape)} and {tuple(right.hidden.shape)} differ; "
            "merge states of the same layer and batch"
        )
    if decay.shape != left.hidden.shape[1:]:
        raise ValueError(
            f"merge_toeplitz_states: decay has shape {tuple(decay.shape)}; expected [d, e] = {list(left.hidden.shape[1:])}"
        )
    # pow keeps the gradient right at lambda = 0, where exp(n log lambda) has none; float64 for n up to millions.
    factor = decay.double() ** right.length.double()[:, None, None]
    hidden = factor.to(right.hidden.dtype) * left.hidden + right.hidden
    return ToeplitzState(hidden, left.length + right.length)


def _rows(scale: Tensor, kv: Tensor) -> Tensor:
    """Per-feature factors [B, H, D] as a column for kv [B, H, D or 2D, Dv]."""
    repeats = kv.shape[2] // scale.shape[2] if scale.shape[2] else 1
    return scale.repeat(1, 1, repeats).unsqueeze(-1)


def _check_doubled(name: str, state: ScanState, theta: Tensor | None) -> None:
    if theta is None:
        return
    check_theta(name, theta, state.max)
    rows, width = state.kv.shape[2], state.max.shape[2]
    if rows != 2 * width:
        raise ValueError(
            f"{name}: theta was given but state.kv has {rows} rows for {width} features, not twice "
            "as many; pass theta only for states of a scan with theta"
        )
