"""`additive_scan`, the one entry to LightNet attention's scan, and the choice of its backend."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from . import reference, torch_ops, torch_scan
from .checks import (
    check_backend,
    check_cu_seqlens,
    check_exchange,
    check_kind,
    check_optional,
    check_scan_arguments,
    check_state_tensors,
    check_tensors,
)
from .companions import fallen_back, kernels, without_triton
from .compiling import constant_result, uncompiled
from .state import ScanState, identity_state, merge_states


class ScanExchange(Protocol):
    """What sequence parallelism supplies: both are differentiable and keep the state's shapes.

    States with LRPE are merged with `merge_states(left, right, theta)` in `prefix`, and without theta in `total`,
    because bidirectional calls put all ranks on one origin. With `cu_seqlens` a state holds every local segment: the
    exchange knows which of them continue from another rank, and returns the identity for the rest. What a method is given
    is only to be merged into what it returns elsewhere: in float32 its gradient is lost where earlier ranks' keys lie 80
    nats above.
    """

    def prefix(self, state: ScanState) -> ScanState:
        """State of all earlier ranks, in the frame of this rank's first token; the identity on the first rank."""
        ...

    def total(self, state: ScanState) -> ScanState:
        """State of all ranks together."""
        ...


# The one place to add a backend: a module with causal_scan and bidirectional_scan of these signatures. "triton" takes
# the inputs in their own dtype instead, and only what its `unsupported` lets through.
_BACKENDS: dict[str, Any] = {"reference": reference, "torch": torch_scan}


@constant_result
def _has_triton() -> bool:
    return _import_triton()


@functools.cache
def _import_triton() -> bool:
    """On first use: Triton is not a core dependency."""
    module, ops, bidirectional = map(kernels, ("triton_scan", "triton_ops", "triton_bidirectional_scan"))
    if module is None or ops is None or bidirectional is None:
        return False
    module.ops, module.bidirectional = ops, bidirectional
    return True


def _triton() -> Any:
    """The Triton backend or None, in a way that torch.compile can follow."""
    if not _has_triton():
        return None
    from . import triton_scan

    return triton_scan


def backends() -> list[str]:
    """Names that `backend` of `additive_scan` takes on this machine, apart from "auto"."""
    return [*_BACKENDS, *(["triton"] if _triton() is not None else [])]


def choose_backend(backend: str, query: Tensor, **request: Any) -> str:
    """Resolve "auto" for these inputs; `request` as for `triton_scan.unsupported`."""
    backend = check_backend("additive_scan", backend, ("auto", *_BACKENDS, "triton"))
    if backend == "auto":
        if query.device.type != "cuda" or query.shape[1] == 1:
            return "torch"
        reason = _unsupported(query, request)
        if reason:
            fallen_back("additive_scan", reason)
        return "torch" if reason else "triton"
    if backend == "triton":
        reason = _unsupported(query, request)
        if reason:
            raise ValueError(
                f"additive_scan: backend 'triton' does not take {reason}; use backend='auto', which falls back to "
                "'torch' there"
            )
    return backend


def _unsupported(query: Tensor, request: dict[str, Any]) -> str | None:
    triton = _triton()
    if triton is None:
        return without_triton()
    reason: str | None = (triton if request["causal"] else triton.bidirectional).unsupported(query, **request)
    return reason


def additive_scan(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    activation: str | None = "silu",
    theta: Tensor | None = None,
    coordinates: Tensor | None = None,
    decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None,
    initial_state: ScanState | None = None,
    causal: bool = True,
    return_state: bool = False,
    exchange: ScanExchange | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ScanState]:
    """LightNet attention without its projections (paper section 3; model-spec 1, 2 and 4).

    Causal, per head: s_t = sum_{r<=t} exp(k_r);
    o_t = sum_{r<=t} sum_j phi(q_tj) exp(k_rj) / s_tj cos((t - r) theta_j) v_r.
    Bidirectional: both sums run over the whole sequence.

    query, key: [B, N, H, D]; the key is the raw logit, any finite value. value: [B, N, H, Dv]. D, Dv up to 128. The
        product is computed in float32 (float64 where an input is), whatever the autocast state. Without key and value,
        query is [B, N, H, 3, D], all three as a joint projection gives them, whose gradient is one tensor too.
    activation: phi, "silu", or None or "none" for the identity.
    theta: [H, D], angles of LRPE; None: no LRPE.
    coordinates: integers [N] or [N, axes], bidirectional only; with k axes each head's D features fall into k equal
        groups, one an axis. None: the places 1..N. Causally only lags matter.
    decay: [B, N, H, D], log-mass of the "no share" ablation: s sums exp(decay), and the values are weighted by
        exp(decay) silu(key). None: the key itself.
    cu_seqlens: [segments + 1], int32 or int64, packed segments that do not see each other; needs B = 1. May be padded
        by repeating N. States are then per segment.
    key_mask: bool [B, N], true for a real token. Other tokens do not exist: their outputs are 0, their inputs get
        gradients of 0, and neither lags nor lengths count them (coordinates, where given, stay as given).
    initial_state: state of earlier tokens, which the scan (each segment, with cu_seqlens) continues. Give it in
        float64 to carry the state in float64: one token at a time, a float32 normaliser stops growing when one key
        lies 17 nats above very many others.
    return_state: also return the state after all tokens, earlier ones included. Its angle 0 is the next token; in a
        bidirectional call with coordinates it is coordinate 0, and such states are merged without theta.
    exchange: sequence parallelism, see `ScanExchange`.
    backend: "auto", "reference" (O(N^2 D), the specification), "torch" or "triton" (GPU; without decay, and causally
        without key_mask; inputs bfloat16, float16 or float32, the same for all three). "auto" is "triton" on a GPU
        where it does the case, else "torch". "triton" does not wait for the device, unless cu_seqlens
        lies there: keep it on the CPU.

    Returns the output [B, N, H, Dv] in value's dtype (0 at masked tokens), or (output, state).
    Gradients reach every floating-point input and initial_state's sum and kv; states' max is a constant.
    Raises ValueError for arguments that do not fit, naming the argument and the entry.
    """
    given = query, key, value
    check_tensors("additive_scan", query=query)
    check_optional(
        "additive_scan", key=key, value=value, theta=theta, coordinates=coordinates, decay=decay,
        cu_seqlens=cu_seqlens, key_mask=key_mask,
    )  # fmt: skip
    if key is None and value is None and query.ndim == 5 and query.shape[3] == 3:
        query, key, value = query.unbind(3)
    elif key is None or value is None:
        raise ValueError(
            f"additive_scan: query has shape {tuple(query.shape)}; give key and value, or all three as [B, N, H, 3, D]"
        )
    check_scan_arguments(query, key, value, theta, coordinates, decay, key_mask, causal, exchange)
    name = choose_backend(
        backend,
        query,
        key=key,
        value=value,
        theta=theta,
        causal=causal,
        options={"coordinates": coordinates, "decay": decay, "key_mask": key_mask},
        initial_state=initial_state,
        return_state=return_state,
    )
    if activation not in ("silu", "none", None):
        raise ValueError(f"additive_scan: unknown activation {activation!r}; choose 'silu', 'none' or None")
    check_exchange("additive_scan", exchange, "prefix" if causal else "total")
    sequences = query.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    _check_state("initial_state", initial_state, sequences, query, value, theta)
    if name == "triton":
        triton = _triton()
        assert triton is not None
        if not causal:

            def whole(local: ScanState) -> ScanState:
                return _combined(local, initial_state, exchange, sequences, query, value, theta, torch.float32)

            alone = initial_state is None and exchange is None and not return_state
            output, state = triton.bidirectional.bidirectional_scan(
                *given,
                activation=activation == "silu",
                theta=theta,
                coordinates=coordinates,
                cu_seqlens=cu_seqlens,  # checked inside, as below
                key_mask=None if key_mask is None else key_mask.to(query.device),
                combine=None if alone else whole,
            )
            return (output, _in_dtype(state, torch.float32)) if return_state else output
        if exchange is not None:
            return _of_a_rank(
                query, key, value, activation == "silu", theta, cu_seqlens, initial_state, return_state, exchange
            )
        output, state = triton.ops.causal_scan(  # cu_seqlens is checked inside, where torch.compile does not look
            *given,
            activation=activation == "silu",
            theta=theta,
            cu_seqlens=cu_seqlens,
            initial=initial_state,
            return_state=return_state,
        )
        return (output, state) if return_state else output

    module: Any = _BACKENDS[name]
    bounds: Any = cu_seqlens
    if name == "torch" and torch.compiler.is_compiling():
        module = torch_ops  # which checks cu_seqlens inside
    else:
        bounds = check_cu_seqlens("additive_scan", cu_seqlens, query.shape[0], query.shape[1])
    floats = [x for x in (query, key, value, decay) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in floats) else torch.float32
    state_dtype = dtype
    if initial_state is not None and initial_state.kv.dtype == torch.float64:
        state_dtype = torch.float64
    heads, width = key.shape[2:]
    identity = identity_state(
        sequences, heads, width, value.shape[3], lrpe=theta is not None, dtype=state_dtype, device=key.device
    )
    initial = identity if initial_state is None else _in_dtype(initial_state, state_dtype)
    common = {
        "activation": activation == "silu",
        "theta": None if theta is None else theta.to(dtype),
        "decay": None if decay is None else decay.to(dtype),
        "cu_seqlens": bounds,
        "key_mask": None if key_mask is None else key_mask.to(query.device),
    }
    if coordinates is not None:
        coordinates = coordinates.to(query.device)
    operands = (query.to(dtype), key.to(dtype), value.to(dtype))
    with torch.autocast(device_type=query.device.type, enabled=False):
        if causal:
            if exchange is not None:
                _, local = module.causal_scan(*operands, **common, initial=identity, continued=False, need_output=False)
                local = _in_dtype(local, state_dtype)
                before = _received("prefix", exchange.prefix(local), sequences, query, value, theta, state_dtype)
                initial = before if initial_state is None else merge_states(initial, before, common["theta"])
            continued = initial_state is not None or exchange is not None
            output, state = module.causal_scan(
                *operands, **common, initial=initial, continued=continued, need_state=return_state
            )
        else:

            def combine(local: ScanState) -> ScanState:
                return _combined(local, initial_state, exchange, sequences, query, value, theta, state_dtype)

            output, state = module.bidirectional_scan(*operands, **common, coordinates=coordinates, combine=combine)
    output = output.to(value.dtype)
    if not return_state:
        return output
    return output, _in_dtype(state, state_dtype)


@uncompiled
def _of_a_rank(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    silu: bool,
    theta: Tensor | None,
    cu_seqlens: Tensor | None,
    initial: ScanState | None,
    return_state: bool,
    exchange: ScanExchange,
) -> Tensor | tuple[Tensor, ScanState]:
    """The causal scan by Triton of one of several ranks."""
    from . import triton_ops, triton_scan_ranks

    bounds = check_cu_seqlens("additive_scan", cu_seqlens, query.shape[0], query.shape[1])
    sequences = query.shape[0] if bounds is None else len(bounds) - 1
    after: list[ScanState] = []

    def prefix(local: ScanState) -> ScanState:
        before = _received("prefix", exchange.prefix(local), sequences, query, value, theta, torch.float32)
        if initial is not None:
            before = merge_states(_in_dtype(initial, torch.float32), before, theta)
        if return_state:
            after.append(merge_states(before, local, theta))
        return before

    output = triton_scan_ranks.causal_scan(
        query,
        key,
        value,
        activation=silu,
        theta=theta,
        bounds=bounds,
        lengths=triton_ops.lengths(*key.shape[:2], None if bounds is None else tuple(bounds), key.device),
        prefix=prefix,
    )
    return (output, after[0]) if return_state else output


def _combined(
    local: ScanState,
    initial: ScanState | None,
    exchange: ScanExchange | None,
    sequences: int,
    query: Tensor,
    value: Tensor,
    theta: Tensor | None,
    dtype: torch.dtype,
) -> ScanState:
    """Bidirectional: the state of all tokens from that of the local ones."""
    if exchange is not None:
        local = _received("total", exchange.total(local), sequences, query, value, theta, dtype)
    if initial is None:
        return local
    # On a shared origin (coordinates) nothing turns; else both count from this call's first token.
    return merge_states(_in_dtype(initial, dtype), local)


def _in_dtype(state: ScanState, dtype: torch.dtype) -> ScanState:
    """The state as a consumer takes it: in one dtype, its maximum a constant."""
    return ScanState(state.max.detach().to(dtype), state.sum.to(dtype), state.kv.to(dtype), state.length)


def _received(
    method: str,
    state: ScanState,
    sequences: int,
    query: Tensor,
    value: Tensor,
    theta: Tensor | None,
    dtype: torch.dtype,
) -> ScanState:
    _check_state(f"exchange.{method}()", state, sequences, query, value, theta)
    return _in_dtype(state, dtype)


def _check_state(
    where: str, state: ScanState | None, sequences: int, query: Tensor, value: Tensor, theta: Tensor | None
) -> None:
    if state is None:
        return
    check_kind("additive_scan", where, state, ScanState)
    heads, width = query.shape[2:]
    rows = width if theta is None else 2 * width
    check_state_tensors(
        "additive_scan",
        where,
        {
            "max": (state.max, (sequences, heads, width)),
            "sum": (state.sum, (sequences, heads, width)),
            "kv": (state.kv, (sequences, heads, rows, value.shape[3])),
            "length": (state.length, (sequences,)),
        },
    )
