"""Decoding: one token a sequence, on states that are changed in place (model-spec 1 to 3).

Tokens are added to the state in blocks. A block of up to BLOCK tokens is kept as keys and values beside the state of the
tokens before it; a new token reads both, and a full block enters the state at once. That is exact where adding token by
token is not: a float32 sum stops growing when one key lies 17 nats above very many others, and a state that is rotated
at every token drifts. It is faster, too: a state is read at every token, but written once a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_kind, check_tensors, check_theta
from .companions import choose_triton, kernels
from .compiling import constant_result
from .lrpe import double, move_origin, rotation
from .state import ScanState, ToeplitzState, scale_between

BLOCK = 64
LOSES_BEGINNINGS = torch.__version__ < "2.13"  # seen in 2.11, not in 2.13
TABLES = ("theta", "angles", "turn")  # of a state: what no step changes


class DecodeState(NamedTuple):
    """State of one layer's scan while decoding, for sequences at any positions; `decode_step` changes it in place.

    max, sum, kv: as in `ScanState`, of the tokens before the block; kv's angle 0 is the block's first token.
    sum_low, kv_low: what float32 leaves of sum and kv (kv_low in bfloat16): blocks that add alike round alike.
    keys: [B, H, BLOCK, D], values: [B, H, BLOCK, Dv], the block's tokens in the dtype of the model.
    count: [B] int32, tokens in the block. length: [B] int64, tokens in all.
    theta: [H, D] of LRPE, and tables made of it in float64: angles [2, BLOCK, H, D], cos and sin of a lag; turn
        [2, H, D], those of BLOCK tokens, float64. None without LRPE.
    """

    max: Tensor
    sum: Tensor
    kv: Tensor
    sum_low: Tensor
    kv_low: Tensor
    keys: Tensor
    values: Tensor
    count: Tensor
    length: Tensor
    theta: Tensor | None = None
    angles: Tensor | None = None
    turn: Tensor | None = None

    def clone(self) -> DecodeState:
        """A copy that shares only the tables: a fork."""
        return self._replace(**{name: getattr(self, name).clone() for name in self._fields if name not in TABLES})


def decode_state(state: ScanState, theta: Tensor | None = None, dtype: torch.dtype = torch.float32) -> DecodeState:
    """A copy of a scan's state to decode from.

    theta: [H, D], of the scan; it is kept. dtype: of the keys and values to come; the state itself is float32, or
    float64 where dtype is.
    """
    check_kind("decode_state", "state", state, ScanState)
    batch, heads, width = state.max.shape
    if state.kv.shape[2] != width * (1 if theta is None else 2):
        raise ValueError(
            f"decode_state: kv has {state.kv.shape[2]} rows for {width} features; pass theta for the state of a scan "
            "with theta, and only for one"
        )
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    angles = turn = None
    if theta is not None:
        check_theta("decode_state", theta, state.max)
        theta = theta.detach()
        angles = torch.stack(rotation(theta, torch.arange(BLOCK, device=theta.device), kind))
        turn = torch.stack(rotation(theta, torch.tensor(BLOCK, device=theta.device), torch.float64))
    keys, values = (
        torch.zeros(batch, heads, BLOCK, size, dtype=dtype, device=state.kv.device)
        for size in (width, state.kv.shape[3])
    )
    # The maximum is a unit of account, so any rounding of it will do, with sum and kv in that unit.
    top = state.max.detach().to(kind, copy=True).contiguous()
    unit = scale_between(state.max, top.to(state.max.dtype)).detach()
    mass, mass_low = _split(state.sum.detach() * unit, kind)
    kv, kv_low = _split(state.kv.detach() * unit.repeat(1, 1, state.kv.shape[2] // width).unsqueeze(-1), kind)
    return DecodeState(
        top,
        mass,
        kv,
        mass_low,
        kv_low.bfloat16(),
        keys,
        values,
        torch.zeros(batch, dtype=torch.int32, device=state.kv.device),
        state.length.clone(),
        theta,
        angles,
        turn,
    )


def _split(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in `kind`, and what that leaves of it."""
    high = x.to(kind, copy=True).contiguous()
    return high, (x.double() - high.double()).to(kind)


def scan_state(state: DecodeState) -> ScanState:
    """What `additive_scan` continues from: a copy, at any time. Its angle 0 is the next token."""
    check_kind("scan_state", "state", state, DecodeState)
    top, mass, kv = _entered(state)
    kind = state.kv.dtype
    return ScanState(top, mass.to(kind), kv.to(kind), state.length.clone())


def _entered(state: DecodeState) -> tuple[Tensor, Tensor, Tensor]:
    """Max, and sum and kv in float64, with the block entered; the angle 0 is the next token."""
    present = torch.arange(BLOCK, device=state.count.device) < state.count[:, None]
    top, mass, scale = _masses(state, present)
    tables = None
    if state.angles is not None:
        tables = (state.angles[0].transpose(0, 1), state.angles[1].transpose(0, 1))  # [H, BLOCK, D]
    added = double(mass, tables).transpose(2, 3) @ state.values.to(mass.dtype)
    kv = state.kv.double() + state.kv_low.double()
    kv = kv * scale.repeat(1, 1, kv.shape[2] // scale.shape[2]).unsqueeze(-1) + added
    if state.theta is not None:
        kv = move_origin(kv, state.theta, state.count)
    return top, (state.sum.double() + state.sum_low.double()) * scale + mass.sum(2), kv


def _masses(state: DecodeState, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Running maximum [B, H, D] over state and block, exp(key - it) [B, H, BLOCK, D], and exp(max - it)."""
    keys = torch.where(present[:, None, :, None], state.keys.to(state.kv.dtype), float("-inf"))
    top = torch.maximum(state.max, keys.amax(2))
    return top, scale_between(keys, top.unsqueeze(2)), scale_between(state.max, top)


def decode_step(
    state: DecodeState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: str | None = "silu",
    backend: str = "auto",
) -> Tensor:
    """`additive_scan` of one more token a sequence; the state is changed in place.

    query, key: [B, H, D], value: [B, H, Dv], in the dtype of state.keys. activation: as in `additive_scan`.
    backend: "auto", "torch" or "triton" ("auto" on a GPU). On a GPU neither waits for the device: a step can be captured
        in a CUDA graph.

    Returns the output [B, H, Dv] in value's dtype. There are no gradients. Raises ValueError for what does not fit.
    """
    _check_step(state, query, key, value, activation)
    silu = activation == "silu"
    backend = _choose_backend("decode_step", backend, query, float64=state.kv.dtype == torch.float64)
    if _as_operator(backend):
        _check_beginnings("decode_step", state)
        token = (query.detach(), key.detach(), value.detach())
        output: Tensor = _decode_step_op(*state, *token, silu, backend)
        return output
    return _decode_step_by(backend, state, query, key, value, silu)


def _as_operator(backend: str) -> bool:
    """Whether a call is one operator: torch.compile does not look into it, nor do fake tensors' modes into kernels."""
    return torch.compiler.is_compiling() or (backend == "triton" and torch._C._len_torch_dispatch_stack() > 0)


@constant_result
def _beginning(x: Tensor) -> int:
    return x.storage_offset()


def _check_beginnings(name: str, state: DecodeState | ToeplitzState) -> None:
    """Before torch 2.13 Inductor hands an operator that changes a tensor which begins within its storage other memory."""
    if LOSES_BEGINNINGS and torch.compiler.is_compiling():
        for field, x in zip(state._fields, state, strict=True):
            if x is not None and field not in TABLES and _beginning(x):
                raise ValueError(
                    f"{name}: state.{field} is a part of a larger tensor, which torch.compile of torch {torch.__version__} "
                    "does not follow; pass a clone of it"
                )


def _decode_step_by(backend: str, state: DecodeState, query: Tensor, key: Tensor, value: Tensor, silu: bool) -> Tensor:
    if backend == "triton":
        output: Tensor = kernels("triton_decode").decode_step(state, query, key, value, silu)
        return output
    return _decode_step(state, query, key, value, silu)


def _decode_step(state: DecodeState, query: Tensor, key: Tensor, value: Tensor, silu: bool) -> Tensor:
    full = state.count == BLOCK
    if full.is_cuda or bool(full.any()):  # a GPU does not wait to hear whether it must
        top, total, kv = _entered(state)
        (mass, mass_low), (kv, kv_low) = _split(total, state.sum.dtype), _split(kv, state.kv.dtype)
        for old, new in zip(state[:5], (top, mass, kv, mass_low, kv_low.bfloat16()), strict=True):
            old.copy_(torch.where(full.view(-1, *[1] * (old.ndim - 1)), new, old))
    slot = torch.where(full, 0, state.count).long()
    rows = torch.arange(slot.shape[0], device=slot.device)
    state.keys[rows, :, slot], state.values[rows, :, slot] = key, value
    place = torch.arange(BLOCK, device=slot.device)
    _, mass, scale = _masses(state, place <= slot[:, None])
    total = state.sum * scale + mass.sum(2)
    query = query.to(total.dtype)
    weight = (F.silu(query) if silu else query) / total
    mass, features = mass * weight.unsqueeze(2), weight * scale
    if state.angles is not None:
        mass = mass * state.angles[0][(slot[:, None] - place).clamp_min(0)].transpose(1, 2)
        features = double(features, (state.angles[0][slot], state.angles[1][slot]))
    output = features.unsqueeze(2) @ state.kv + mass.sum(3).unsqueeze(2) @ state.values.to(total.dtype)
    state.count.copy_(slot + 1)
    state.length.add_(1)
    return output.squeeze(2).to(value.dtype)


def toeplitz_step(state: ToeplitzState, x: Tensor, decay: Tensor, gain: Tensor, *, backend: str = "auto") -> Tensor:
    """`toeplitz_scan` of one more token a sequence; the state is changed in place.

    state: hidden [B, d, e] float32 (or float64), contiguous. x: [B, d], any floating dtype. decay, gain: [d, e].
    backend: as in `decode_step`. Returns y [B, d] in x's dtype; no gradients.
    """
    check_kind("toeplitz_step", "state", state, ToeplitzState)
    check_tensors("toeplitz_step", x=x, decay=decay, gain=gain)
    if x.shape != state.hidden.shape[:2] or decay.shape != state.hidden.shape[1:] or gain.shape != decay.shape:
        raise ValueError(
            f"toeplitz_step: x {tuple(x.shape)}, decay {tuple(decay.shape)}, gain {tuple(gain.shape)} and state.hidden "
            f"{tuple(state.hidden.shape)} do not fit; expected [B, d], [d, e], [d, e] and [B, d, e]"
        )
    if not state.hidden.is_contiguous():
        raise ValueError(
            "toeplitz_step: state.hidden is not contiguous; it is changed in place, so make it so once before"
        )
    backend = _choose_backend("toeplitz_step", backend, x, float64=state.hidden.dtype == torch.float64)
    if backend == "triton":
        if _as_operator(backend):
            _check_beginnings("toeplitz_step", state)
            y: Tensor = _toeplitz_step_op(*state, x.detach(), decay.detach(), gain.detach())
        else:
            y = kernels("triton_decode").toeplitz_step(state, x, decay, gain)
        return y
    state.hidden.mul_(decay).add_(x.unsqueeze(-1))
    state.length.add_(1)
    return torch.einsum("bde,de->bd", state.hidden, gain.to(state.hidden.dtype)).to(x.dtype)


def _choose_backend(name: str, backend: str, x: Tensor, float64: bool) -> str:
    limit = "a float64 state" if float64 else None
    return "triton" if choose_triton(name, backend, "triton_decode", x, limit=limit) else "torch"


def _decode_step_of(*given: Any) -> Tensor:
    *fields, query, key, value, silu, backend = given
    return _decode_step_by(backend, DecodeState(*fields), query, key, value, silu)


def _fake_decode_step(*given: Any) -> Tensor:
    value: Tensor = given[-3]
    return value.new_empty(value.shape)


def _toeplitz_step_of(hidden: Tensor, length: Tensor, x: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
    y: Tensor = kernels("triton_decode").toeplitz_step(ToeplitzState(hidden, length), x, decay, gain)
    return y


def _fake_toeplitz_step(_hidden: Tensor, _length: Tensor, x: Tensor, _decay: Tensor, _gain: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_CHANGED = [name for name in DecodeState._fields if name not in TABLES]
_STATE = ", ".join(
    [f"Tensor(a{i}!) {name}" for i, name in enumerate(_CHANGED)] + [f"Tensor? {name}" for name in TABLES]
)
_decode_step_op = torch.library.custom_op(
    "lightnet::decode_step",
    _decode_step_of,
    mutates_args=_CHANGED,
    schema=f"({_STATE}, Tensor query, Tensor key, Tensor value, bool silu, str backend) -> Tensor",
)
_decode_step_op.register_fake(_fake_decode_step)
_toeplitz_step_op = torch.library.custom_op(
    "lightnet::toeplitz_step",
    _toeplitz_step_of,
    mutates_args=("hidden", "length"),
    schema="(Tensor(a!) hidden, Tensor(b!) length, Tensor x, Tensor decay, Tensor gain) -> Tensor",
)
_toeplitz_step_op.register_fake(_fake_toeplitz_step)


def _check_step(state: DecodeState, query: Tensor, key: Tensor, value: Tensor, activation: str | None) -> None:
    if activation not in ("silu", "none", None):
        raise ValueError(f"decode_step: unknown activation {activation!r}; choose 'silu', 'none' or None")
    check_kind("decode_step", "state", state, DecodeState)
    check_tensors("decode_step", query=query, key=key, value=value)
    batch, heads, _, width = state.keys.shape
    for name, x, last in (("query", query, width), ("key", key, width), ("value", value, state.values.shape[3])):
        if tuple(x.shape) != (batch, heads, last):
            raise ValueError(
                f"decode_step: {name} has shape {tuple(x.shape)}; expected {(batch, heads, last)}, one token for each "
                "sequence of the state"
            )
        if x.dtype != state.keys.dtype:
            raise ValueError(
                f"decode_step: {name} is {x.dtype}, the state keeps {state.keys.dtype}; name the model's dtype in "
                "decode_state(..., dtype=)"
            )
