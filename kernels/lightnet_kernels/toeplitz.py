"""`toeplitz_scan`, one axis of MD-TPE (LightNet section 4.1, model-spec 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from . import toeplitz_reference, toeplitz_torch
from .checks import (
    check_backend,
    check_cu_seqlens,
    check_exchange,
    check_kind,
    check_mask,
    check_optional,
    check_state_tensors,
    check_tensors,
)
from .companions import choose_triton
from .state import ToeplitzState, merge_toeplitz_states


class ToeplitzExchange(Protocol):
    """What sequence parallelism supplies, differentiable; states are merged with `merge_toeplitz_states`.

    With `cu_seqlens` a state holds every local segment: the exchange knows which of them continue on another rank, and
    returns zeros for the rest. A bidirectional call also needs `suffix`.
    """

    def prefix(self, state: ToeplitzState) -> ToeplitzState:
        """State of all earlier ranks; zeros on the first rank."""
        ...

    def suffix(self, state: ToeplitzState) -> ToeplitzState:
        """The same from the other end: given sum_m lambda^(m - 1) x_m, returns that of all later ranks."""
        ...


# The one place to add a backend: a function of toeplitz_torch.forward_scan's signature. "triton" takes x in its own dtype
# instead, cu_seqlens as it is given, and only what `_choose_backend` lets through.
_BACKENDS: dict[str, Callable[..., Any]] = {
    "reference": toeplitz_reference.forward_scan,
    "torch": toeplitz_torch.forward_scan,
}
MAX_RANK = 128  # of Triton


def _choose_backend(backend: str, x: Tensor, decay: Tensor, key_mask: Tensor | None) -> str:
    backend = check_backend("toeplitz_scan", backend, ("auto", *_BACKENDS, "triton"))
    if backend in _BACKENDS:
        return backend
    limit = "key_mask" if key_mask is not None else None
    if decay.shape[1] > MAX_RANK:
        limit = f"{decay.shape[1]} exponentials a channel (at most {MAX_RANK})"
    return "triton" if choose_triton("toeplitz_scan", backend, "triton_toeplitz", x, limit=limit) else "torch"


def _scan_by(backend: str) -> tuple[Callable[..., Any], bool]:
    """The scan of a backend, and whether cu_seqlens is checked inside, where torch.compile does not look."""
    if backend == "triton":
        from . import triton_toeplitz

        return triton_toeplitz.forward_scan, True
    if backend == "torch" and torch.compiler.is_compiling():
        return toeplitz_torch.compiled_scan, True
    return _BACKENDS[backend], False


def toeplitz_scan(
    x: Tensor,
    decay: Tensor,
    gain: Tensor,
    *,
    bidirectional: bool = False,
    cu_seqlens: Tensor | None = None,
    key_mask: Tensor | None = None,
    initial_state: ToeplitzState | None = None,
    return_state: bool = False,
    exchange: ToeplitzExchange | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ToeplitzState]:
    """y_n = sum_{m<=n} sum_i gain_ci decay_ci^(n - m) x_m, per channel c (paper section 4.1; model-spec 3).

    x: [B, N, d], any floating dtype, computed in float32 (float64 where x is).
    decay, gain: lambda and b [d, e]; lambda in [0, 1].
    bidirectional: adds the mirrored sum over m > n, the centre once.
    cu_seqlens, key_mask: as in `additive_scan`: segments reset the sum; masked tokens do not exist.
    initial_state: state of earlier tokens; it enters the forward sum only.
    return_state: also return the state h_N = sum_m lambda^(N - m) x_m [B, d, e] of the forward sum, with [segments,
        ...] under cu_seqlens. The last token has weight 1. Merge with `merge_toeplitz_states`.
    exchange: sequence parallelism, see `ToeplitzExchange`.
    backend: "auto", "reference" (the explicit Toeplitz matrix, O(N^2)), "torch" (O(N e)) or "triton" (the same on a GPU;
        no key_mask; bfloat16, float16 or float32). "auto" is "triton" on a GPU where it does the case, else "torch".

    Returns y [B, N, d] in x's dtype (0 at masked tokens), or (y, state). Gradients reach x, decay, gain and the state.
    Raises ValueError for arguments that do not fit.
    """
    name = "toeplitz_scan"
    check_tensors(name, x=x, decay=decay, gain=gain)
    check_optional(name, cu_seqlens=cu_seqlens, key_mask=key_mask)
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(f"{name}: x is {x.dtype} {tuple(x.shape)}; expected a floating-point [B, N, d]")
    for label, parameter in (("decay", decay), ("gain", gain)):
        if parameter.ndim != 2 or parameter.shape[0] != x.shape[2] or parameter.shape != decay.shape:
            raise ValueError(
                f"{name}: {label} has shape {tuple(parameter.shape)}; expected [d, e] with d = {x.shape[2]}, "
                "alike for decay and gain"
            )
        if parameter.device != x.device:
            raise ValueError(f"{name}: {label} is on {parameter.device}, x on {x.device}; move it")
    check_mask(name, key_mask, x)
    chosen = _choose_backend(backend, x, decay, key_mask)
    check_exchange(name, exchange, "prefix")
    if bidirectional:
        check_exchange(name, exchange, "suffix")
    scan, inside = _scan_by(chosen)
    bounds: Any = cu_seqlens
    if not (inside and torch.compiler.is_compiling()):  # the number of states decides steps outside of operators, too
        checked = check_cu_seqlens(name, cu_seqlens, x.shape[0], x.shape[1])
        bounds = cu_seqlens if inside else checked
    sequences = x.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    shapes = (sequences, *decay.shape)

    if key_mask is not None:
        key_mask = key_mask.to(x.device)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    operands = (x if chosen == "triton" else x.to(dtype), decay.to(dtype), gain.to(dtype))
    empty = ToeplitzState(x.new_zeros(shapes, dtype=dtype), torch.zeros(sequences, dtype=torch.int64, device=x.device))

    def run(reverse: bool, start: ToeplitzState | None) -> tuple[Tensor, ToeplitzState]:
        def direction(first: ToeplitzState | None, output: bool, state: bool) -> tuple[Tensor, ToeplitzState]:
            result: tuple[Tensor, ToeplitzState] = scan(
                *operands, bounds, key_mask, first, reverse=reverse, need_output=output, need_state=state
            )
            return result

        first = empty if start is None else ToeplitzState(start.hidden.to(dtype), start.length)
        if exchange is not None:
            _, local = direction(empty, False, True)
            method = "suffix" if reverse else "prefix"
            before: ToeplitzState = getattr(exchange, method)(local)
            _check(f"exchange.{method}()", before, shapes)
            first = before if start is None else merge_toeplitz_states(first, before, operands[1])
        return direction(first, True, return_state and not reverse)

    if initial_state is not None:
        _check("initial_state", initial_state, shapes)
    with torch.autocast(device_type=x.device.type, enabled=False):
        output, state = run(False, initial_state)
        if bidirectional:
            output = output + run(True, None)[0]
    output = output.to(x.dtype)
    return (output, state) if return_state else output


def _check(where: str, state: ToeplitzState, shapes: tuple[int, ...]) -> None:
    check_kind("toeplitz_scan", where, state, ToeplitzState)
    expected = {"hidden": (state.hidden, shapes), "length": (state.length, shapes[:1])}
    check_state_tensors("toeplitz_scan", where, expected)
