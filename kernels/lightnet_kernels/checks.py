"""Argument checks. Every error is a ValueError of one line: what, where, and a way out."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from .compiling import constant_result
from .recording import python_looks

MAX_WIDTH = 128


def check_tensors(name: str, **given: Any) -> None:
    """Each is a tensor."""
    for argument, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: {argument} is of type {type(x).__name__}; pass a tensor")


def check_optional(name: str, **given: Any) -> None:
    """Each is a tensor or None."""
    for argument, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            check_tensors(name, **{argument: x})


def check_kind(name: str, where: str, state: Any, kind: type) -> None:
    """A state is of the scan that it is given to."""
    if not isinstance(state, kind):
        raise ValueError(f"{name}: {where} is of type {type(state).__name__}; pass a {kind.__name__}")


def check_theta(name: str, theta: Any, features: Tensor) -> None:
    """Angles of LRPE beside what has `features` [.., H, D]; [D] alone would be broadcast over heads."""
    check_tensors(name, theta=theta)
    if theta.shape != features.shape[-2:]:
        raise ValueError(f"{name}: theta has shape {tuple(theta.shape)}; expected [H, D] = {list(features.shape[-2:])}")
    if not theta.is_floating_point():
        raise ValueError(f"{name}: theta has dtype {theta.dtype}; pass floating-point angles, in radians a token")
    if theta.device != features.device:
        raise ValueError(f"{name}: theta is on {theta.device}, what it turns on {features.device}; move it")


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_scan_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    coordinates: Tensor | None,
    decay: Tensor | None,
    key_mask: Tensor | None,
    causal: bool,
    exchange: Any,
) -> None:
    """Shapes and combinations of `additive_scan`, apart from cu_seqlens and the initial state."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"additive_scan: {name} has shape {tuple(tensor.shape)}; expected [B, N, H, width]")
        if not tensor.is_floating_point():
            raise ValueError(f"additive_scan: {name} has dtype {tensor.dtype}; pass a floating-point tensor")
        if not 1 <= tensor.shape[3] <= MAX_WIDTH:
            raise ValueError(
                f"additive_scan: {name} has head width {tensor.shape[3]}; widths 1 to {MAX_WIDTH} work, use more heads"
            )
        if tensor.device != query.device:
            raise ValueError(f"additive_scan: {name} is on {tensor.device}, query on {query.device}; move it")
    if key.shape != query.shape:
        raise ValueError(f"additive_scan: key shape {tuple(key.shape)} differs from query's {tuple(query.shape)}")
    if value.shape[:3] != query.shape[:3]:
        raise ValueError(
            f"additive_scan: value shape {tuple(value.shape)} must begin as query's {tuple(query.shape)} does (B, N, H)"
        )
    if decay is not None and decay.shape != key.shape:
        raise ValueError(f"additive_scan: decay shape {tuple(decay.shape)} differs from key's {tuple(key.shape)}")
    if decay is not None and decay.device != key.device:
        raise ValueError(f"additive_scan: decay is on {decay.device}, key on {key.device}; move it")
    if theta is not None:
        check_theta("additive_scan", theta, query)
    check_mask("additive_scan", key_mask, query)
    if coordinates is not None:
        _check_coordinates(coordinates, query, causal)
    elif exchange is not None and theta is not None and not causal:
        raise ValueError(
            "additive_scan: a bidirectional exchange with theta needs coordinates: pass this rank's positions in the "
            "whole sequence, so that all ranks share one origin"
        )


def _check_coordinates(coordinates: Tensor, query: Tensor, causal: bool) -> None:
    tokens, width = query.shape[1], query.shape[3]
    if causal:
        raise ValueError("additive_scan: coordinates were given with causal=True, where only lags matter; drop them")
    if not is_integer(coordinates):
        raise ValueError(f"additive_scan: coordinates have dtype {coordinates.dtype}; pass integers")
    if coordinates.ndim not in (1, 2) or coordinates.shape[0] != tokens:
        raise ValueError(
            f"additive_scan: coordinates have shape {tuple(coordinates.shape)}; expected [N] or [N, axes], N = {tokens}"
        )
    axes = coordinates.shape[1] if coordinates.ndim == 2 else 1
    if axes == 0 or width % axes:
        raise ValueError(
            f"additive_scan: {axes} coordinate axes do not divide the head width {width}; "
            "choose a head width that is a multiple of the number of axes"
        )


def check_mask(name: str, key_mask: Tensor | None, query: Tensor) -> None:
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"{name}: key_mask has dtype {key_mask.dtype}; pass bool, true for a real token")
    if key_mask.shape != query.shape[:2]:
        raise ValueError(f"{name}: key_mask has shape {tuple(key_mask.shape)}; expected {list(query.shape[:2])}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[int] | None:
    """The boundaries as a list, checked: starts at 0, never falls, ends at N."""
    if cu_seqlens is None:
        return None
    global _met
    met = _met
    for one in met:
        if one[0]() is cu_seqlens and one[1:4] == (cu_seqlens._version, batch, tokens):
            python_looks()
            return one[4]
    bounds = _checked(name, cu_seqlens, batch, tokens)
    if not cu_seqlens.is_inference():
        _met = ((weakref.ref(cu_seqlens), cu_seqlens._version, batch, tokens, bounds), *met[: MET - 1])
    return bounds


# tolist() waits for the device, checks take time where documents are many, and all layers of a model share one tensor; of a
# pipeline's micro-batches several are under way. Replaced whole, as autograd's threads look at it too.
MET = 8
_met: tuple[tuple[Any, int, int, int, list[int]], ...] = ()


def _checked(name: str, cu_seqlens: Tensor, batch: int, tokens: int) -> list[int]:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: cu_seqlens has dtype {cu_seqlens.dtype}; pass int32 or int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; expected [segments + 1], at least 2")
    if batch != 1:
        raise ValueError(f"{name}: cu_seqlens needs B = 1 but B = {batch}; flatten the batch to [1, B * N, ...]")
    python_looks()
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{name}: cu_seqlens[0] is {bounds[0]}; the first boundary must be 0")
    for i in range(1, len(bounds)):
        if bounds[i] < bounds[i - 1]:
            raise ValueError(
                f"{name}: cu_seqlens[{i}] = {bounds[i]} is below cu_seqlens[{i - 1}] = {bounds[i - 1]}; boundaries "
                "must not fall (equal ones make an empty segment)"
            )
        if bounds[i] > tokens:
            raise ValueError(f"{name}: cu_seqlens[{i}] = {bounds[i]} is beyond the {tokens} tokens; clip it")
    if bounds[-1] != tokens:
        raise ValueError(
            f"{name}: cu_seqlens[{len(bounds) - 1}] = {bounds[-1]}, the last, must be N = {tokens}; append it"
        )
    return bounds


def check_state_tensors(name: str, where: str, expected: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Compare each field of a state with the shape it must have."""
    for field, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}: {where}.{field} has shape {tuple(tensor.shape)}; expected {shape} for these inputs"
                " (one state per segment with cu_seqlens, kv with 2D rows with theta)"
            )


def check_exchange(name: str, exchange: Any, method: str) -> None:
    if exchange is not None and not callable(getattr(exchange, method, None)):
        raise ValueError(
            f"{name}: exchange of type {type(exchange).__name__} has no method {method}(state), which this call needs"
        )


@constant_result
def only_torch() -> bool:
    """Whether the environment has LIGHTNET_KERNELS=torch: "auto" is then PyTorch everywhere, as for finding out whether a
    kernel is at fault."""
    return _only_torch()


@functools.cache
def _only_torch() -> bool:
    value = os.environ.get("LIGHTNET_KERNELS", "auto")
    if value not in ("auto", "torch"):
        raise ValueError(f"LIGHTNET_KERNELS is {value!r} in the environment; set auto or torch, or unset it")
    return value == "torch"


def check_backend(name: str, backend: str, known: tuple[str, ...]) -> str:
    """The backend that is meant, "auto" still where the inputs decide."""
    if backend not in known:
        raise ValueError(f"{name}: unknown backend {backend!r}; choose one of {', '.join(known)}")
    return "torch" if backend == "auto" and only_torch() else backend
