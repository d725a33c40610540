"""The Triton causal scan as torch.library operators, so that torch.compile and activation checkpointing go through it.

`lightnet::causal_scan` and its backward are opaque to the compiler; their fake kernels give shapes and dtypes. An operator
returns tensors only: what is not asked for comes back empty.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import triton_bidirectional_scan, triton_scan, triton_scan_grads
from .checks import check_cu_seqlens
from .operators import Operator
from .packed import apart
from .state import ScanState
from .triton_launch import compiled_together
from .triton_replay import replayed
from .triton_shape import shape_of

OPTIONAL = "Tensor? theta, Tensor? initial_max, Tensor? initial_sum, Tensor? initial_kv, Tensor? cu_seqlens"
FORWARD = f"(Tensor query, Tensor? key, Tensor? value, {OPTIONAL}, bool silu, bool return_state)"
# What the forward pass leaves for the backward pass, the fields of triton_scan.Blocks.
SAVED = "Tensor kv, Tensor enter, Tensor leave, Tensor mass, Tensor flag, Tensor? cos, Tensor? sin, Tensor? turn"
FINAL = "Tensor? final_max, Tensor? final_kv, Tensor? grad_sum, Tensor? grad_kv"
BACKWARD = f"(Tensor grad, Tensor query, Tensor? key, Tensor? value, {OPTIONAL}, {SAVED}, {FINAL}, bool silu)"


def _bounds(cu_seqlens: Tensor | None, query: Tensor) -> tuple[int, ...] | None:
    """Free where cu_seqlens is on the CPU; else the one thing that waits for the device."""
    bounds = check_cu_seqlens("additive_scan", cu_seqlens, query.shape[0], query.shape[1])
    return None if bounds is None else tuple(bounds)


def _group(*tensors: Tensor | None) -> tuple[Tensor, ...] | None:
    kept = tuple(x.contiguous() for x in tensors if x is not None)
    return kept if len(kept) == len(tensors) else None


def _case(query: Tensor, value: Tensor, theta: Tensor | None, initial: Any, silu: bool, state: bool) -> tuple[Any, ...]:
    """What decides which kernels a call launches, but for the cut into spans: those of one and of several are compiled."""
    return shape_of(query, value, theta, silu), query.dtype, query.device, initial is None, state


def _forward(
    query: Any, key: Any, value: Any, theta: Any, initial_max: Any, initial_sum: Any, initial_kv: Any,
    cu_seqlens: Any, silu: bool, return_state: bool,
) -> Any:  # fmt: skip
    bounds = _bounds(cu_seqlens, query)
    return _replay_forward(query, key, value, theta, initial_max, initial_sum, initial_kv, bounds, silu, return_state)


def _run_forward(query, key, value, theta, initial_max, initial_sum, initial_kv, bounds, silu, return_state):
    query, key, value = apart(query, key, value)
    arguments = (
        query, key, value, None if theta is None else theta.contiguous(),
        _group(initial_max, initial_sum, initial_kv), bounds, silu, return_state,
    )  # fmt: skip
    runs = [functools.partial(triton_scan.forward, *arguments, spans) for spans in (False, True)]
    compiled_together(("forward", *_case(query, value, *arguments[3:5], silu, return_state)), query.device, *runs)
    output, state, found = triton_scan.forward(*arguments)
    return output, *(state or (None,) * 3), *found


def _prepare_forward(*arguments: Any) -> None:
    query, _, value = apart(*arguments[:3])
    theta, *_, bounds, silu, _ = arguments[3:]
    triton_scan.tables_of(query, shape_of(query, value, theta, silu), bounds, forward=True)


_replay_forward = replayed(_run_forward, _prepare_forward, shared=True)


def _fake_forward(query, key, value, theta, initial_max, initial_sum, initial_kv, cu_seqlens, silu, return_state):
    query, key, value = apart(query, key, value)
    shape = shape_of(query, value, theta, silu)
    batch, tokens = query.shape[:2]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cu_seqlens is None:
        blocks = batch * ((tokens + triton_scan.BLOCK - 1) // triton_scan.BLOCK)
    else:  # depends on where the segments end
        blocks = torch.library.get_ctx().new_dynamic_size()
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    state = triton_scan.empty_states(shape, sequences, query.device) if return_state else (None,) * 3
    return output, *state, *triton_scan.empty_blocks(shape, blocks, query.device)


causal_scan_op = Operator(
    "lightnet::causal_scan", f"{FORWARD} -> ({', '.join(['Tensor'] * 12)})", _forward, _fake_forward
)


def _gradients(
    grad: Any, query: Any, key: Any, value: Any, theta: Any, initial_max: Any, initial_sum: Any, initial_kv: Any,
    cu_seqlens: Any, *others: Any,
) -> Any:  # fmt: skip
    bounds = _bounds(cu_seqlens, query)
    return _replay_gradients(grad, query, key, value, theta, initial_max, initial_sum, initial_kv, bounds, *others)


def _run_gradients(
    grad, query, key, value, theta, initial_max, initial_sum, initial_kv, bounds, kv, enter, leave, mass, flag, cos, sin,
    turn, final_max, final_kv, grad_sum, grad_kv, silu,
):  # fmt: skip
    final = _group(final_max, final_kv, grad_sum, grad_kv)
    arguments = (
        grad, (query, key, value), None if theta is None else theta.contiguous(),
        _group(initial_max, initial_sum, initial_kv), bounds, silu,
        triton_scan.Blocks(kv, enter, leave, mass, flag, cos, sin, turn),
        None if final is None else triton_scan_grads.StateGrads(*final),
    )  # fmt: skip
    one, _, other = apart(query, key, value)
    case = (key is None, *_case(one, other, *arguments[2:4], silu, final is None))
    runs = [functools.partial(triton_scan_grads.backward, *arguments, spans) for spans in (False, True)]
    compiled_together(("backward", *case), query.device, *runs)
    return triton_scan_grads.backward(*arguments)


def _prepare_gradients(_grad: Tensor, *arguments: Any) -> None:
    query, _, value = apart(*arguments[:3])
    theta, bounds, silu = arguments[3], arguments[7], arguments[-1]
    triton_scan.tables_of(query, shape_of(query, value, theta, silu), bounds)


_replay_gradients = replayed(_run_gradients, _prepare_gradients, shared=True)


def _fake_gradients(grad, query, key, value, theta, initial_max, initial_sum, initial_kv, *_):
    given = (query, key, value, theta, initial_sum, initial_kv)
    return tuple(None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


causal_scan_backward_op = Operator(
    "lightnet::causal_scan_backward",
    f"{BACKWARD} -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *tensors, silu, return_state = inputs
    ctx.silu, ctx.return_state = silu, return_state
    found = output[4:] if tensors[3] is not None else (*output[4:9], None, None, None)
    ctx.save_for_backward(*tensors, *found, *((output[1], output[3]) if return_state else (None, None)))
    ctx.mark_non_differentiable(*[x for x in (output[1], *output[4:]) if x is not None])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: Tensor | None, _max: Any, grad_sum: Tensor | None, grad_kv: Tensor | None, *_found: Any
) -> Any:
    saved = ctx.saved_tensors
    query, key, value, theta, initial_max, initial_sum, initial_kv, cu_seqlens = saved[:8]
    found, (final_max, final_kv) = saved[8:16], saved[16:]
    if grad is None:
        grad = torch.zeros_like(apart(query, key, value)[2])
    final: list[Tensor | None] = [None] * 4
    if ctx.return_state and (grad_sum is not None or grad_kv is not None):
        grad_sum = torch.zeros_like(final_max) if grad_sum is None else grad_sum
        grad_kv = torch.zeros_like(final_kv) if grad_kv is None else grad_kv
        final = [final_max, final_kv, grad_sum, grad_kv]
    of_query, of_key, of_value, of_theta, of_sum, of_kv = causal_scan_backward_op(
        grad, query, key, value, theta, initial_max, initial_sum, initial_kv, cu_seqlens, *found, *final, ctx.silu
    )
    theta_grad = None if theta is None else of_theta
    states = (None, None, None) if initial_max is None else (None, of_sum, of_kv)
    if key is None:
        of_key = of_value = None
    return of_query, of_key, of_value, theta_grad, *states, None, None, None


causal_scan_op.differentiable(_backward, _save)


def causal_scan(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    activation: bool,
    theta: Tensor | None,
    cu_seqlens: Tensor | None,
    initial: ScanState | None,
    return_state: bool,
) -> tuple[Tensor, ScanState | None]:
    """See `scan.additive_scan`; inputs keep their dtype. Queries, keys and values may be one tensor, see `packed`."""
    start = [None] * 3 if initial is None else [initial.max.detach().float(), initial.sum.float(), initial.kv.float()]
    theta = None if theta is None else theta.float()
    output, *state = causal_scan_op(  # and what the backward pass needs
        query, key, value, theta, *start, cu_seqlens, activation, return_state
    )
    if not return_state:
        return output, None
    if cu_seqlens is None:
        length = torch.full(query.shape[:1], query.shape[1], dtype=torch.int64, device=query.device)
    else:
        length = cu_seqlens.diff().to(query.device, torch.int64)
    return output, ScanState(state[0].detach(), state[1], state[2], length + (0 if initial is None else initial.length))


@functools.lru_cache(maxsize=16)
def _places_from_the_end(tokens: int, bounds: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """int32 [1, N, 1]: -1 for the last token of its sequence, so that place 0 is the token after."""
    with torch.inference_mode(False):  # kept for training as well, which saves it
        places = torch.arange(tokens)
        if bounds is None:
            places = places - tokens
        else:
            edges = torch.tensor(bounds)
            places = places - torch.repeat_interleave(edges[1:], edges.diff())
        return places.int()[None, :, None].to(device, non_blocking=True)


@functools.lru_cache(maxsize=16)
def lengths(batch: int, tokens: int, bounds: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Tokens of each sequence, int64; the same tensor for all layers."""
    with torch.inference_mode(False):
        if bounds is None:
            return torch.full((batch,), tokens, dtype=torch.int64, device=device)
        return torch.tensor(bounds).diff().to(device, non_blocking=True)


def causal_state(key: Tensor, value: Tensor, theta: Tensor | None, cu_seqlens: list[int] | None) -> ScanState:
    """The state after each sequence's tokens, without their outputs: what sequence-parallel ranks exchange.

    The order of tokens matters only for their angles, so the bidirectional operator serves: one read of key and value
    forward; one read of both and one write of their gradients backward.
    """
    bounds = None if cu_seqlens is None else tuple(cu_seqlens)
    places = None if theta is None else _places_from_the_end(key.shape[1], bounds, key.device)
    edges = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    peak, mass, kv = triton_bidirectional_scan.states_op(key, value, theta, places, None, edges)
    return ScanState(peak, mass, kv, lengths(key.shape[0], key.shape[1], bounds, key.device))
