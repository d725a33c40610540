"""Backend "triton", bidirectional: the one-scan form on a GPU (or under TRITON_INTERPRET=1 on a CPU, for tests).

Four operators of torch.library, so that torch.compile and activation checkpointing pass through: the scan as a whole, and
for calls that give, ask for or exchange states its two halves, the state of the tokens and what is read from a state.
Nothing of the size of [B, N, H, D] is held but the tensors themselves; kernels in `triton_bidirectional`, and for many
sequences of widths that are no powers of two in `cuda_bidirectional`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from . import cuda_bidirectional
from . import triton_bidirectional as kernels
from .operators import Operator
from .packed import Gradients, apart
from .state import ScanState, shift_state
from .triton_bidirectional_plan import (
    INTERPRETED,
    Optional,
    Where,
    addressable,
    prepare,
    sequence_lengths,
    shape_of,
    strides_of,
    token_places,
    where_of,
)
from .triton_launch import launch
from .triton_replay import by_bounds, replayed

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INPUTS = "Tensor query, Tensor? key, Tensor? value"
WHERE = "Tensor? theta, Tensor? places, Tensor? mask, Tensor? cu_seqlens"


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    theta: Tensor | None,
    causal: bool,
    options: dict[str, Any],
    initial_state: ScanState | None,
    return_state: bool,
) -> str | None:
    """What of these arguments the kernels do not do, or None; arguments as for `triton_scan.unsupported`."""
    if options["decay"] is not None:
        return "decay"
    if not query.dtype == key.dtype == value.dtype:
        return f"different dtypes ({query.dtype}, {key.dtype}, {value.dtype})"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if query.device.type == "cpu":
        if not INTERPRETED:
            return "tensors on a CPU (except under TRITON_INTERPRET=1)"
    elif query.device.type != "cuda" or torch.version.hip is not None:
        return f"tensors on {query.device}"
    elif torch.cuda.get_device_capability(query.device)[0] < 8:
        return f"the card {torch.cuda.get_device_name(query.device)}, older than sm_80"
    if initial_state is not None and initial_state.kv.dtype == torch.float64:
        return "a float64 initial_state"
    return None


def bidirectional_scan(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    activation: bool,
    theta: Tensor | None,
    coordinates: Tensor | None,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    combine: Callable[[ScanState], ScanState] | None,
) -> tuple[Tensor, ScanState | None]:
    """See `scan.additive_scan`; inputs keep their dtype, and may be one tensor (see `packed`). cu_seqlens is checked by the
    operators. `combine` takes the state of the local tokens to that of all tokens; None: there are no others, and nobody
    asks for the state."""
    given = query, key, value
    query, key, value = apart(query, key, value)
    places = token_places(key, theta, coordinates, cu_seqlens, key_mask)
    rest = (theta, places, key_mask, cu_seqlens)
    if combine is None:
        return scan_op(*given, *rest, activation)[0], None
    peak, mass, kv = states_op(key, value, *rest)  # which checks cu_seqlens
    lengths = sequence_lengths(key, cu_seqlens, key_mask)
    whole = combine(ScanState(peak, mass, kv, lengths))
    rows = whole.kv.shape[2] // whole.sum.shape[2]
    read = whole.kv / torch.where(whole.sum > 0, whole.sum, 1.0).repeat(1, 1, rows).unsqueeze(-1)
    output = read_op(query, read, *rest, activation)
    return output, whole if coordinates is not None else shift_state(whole, lengths, theta)


def _launch(name: str, where: Where, tensors: Sequence[Tensor], others: Sequence[Optional], **extra: Any) -> None:
    """Run a kernel over all pieces. `tensors` [B, N, H, width] come with their strides, `others` without."""
    if not where.plan.pieces or not where.shape.heads:
        return
    constants = {**where.constants(name, *tensors), **extra}
    grid = (where.plan.pieces * where.shape.heads * constants.get("NF", 1),)
    strides = strides_of(constants["ALIGN"], *tensors)
    launch(getattr(kernels, name), grid)(*tensors, *others, *where.tensors, *strides, *where.sizes, **constants)


def _merge(name: str, where: Where, *arguments: Optional, **extra: Any) -> None:
    plan, shape = where.plan, where.shape
    if not plan.sequences or not shape.heads:
        return
    rows = 16
    launch(getattr(kernels, name), (plan.sequences, shape.heads, triton.cdiv(shape.D, rows)))(
        *arguments, plan.ranges, shape.heads, plan.splits, D=shape.D, V=shape.V, ROWS=rows,
        VP=max(16, triton.next_power_of_2(shape.V)), HALVES=shape.halves, TABLE=plan.ranges is not None, num_warps=4,
        **extra,
    )  # fmt: skip


def _collect(
    key: Tensor, value: Tensor, where: Where, norm: bool, by_cuda: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, mass, and G (`norm`) or the state of every sequence."""
    shape, plan, device = where.shape, where.plan, key.device
    peaks, masses = torch.empty(2, plan.pieces, shape.heads, shape.D, device=device).unbind(0)
    kvs = torch.empty(plan.pieces, shape.heads, shape.rows, shape.V, device=device)
    if by_cuda:
        cuda_bidirectional.piece_states(key, value, where, peaks, masses, kvs)
    else:
        _launch("piece_states", where, (key, value), (peaks, masses, kvs))
    peak, mass = (torch.empty(plan.sequences, shape.heads, shape.D, device=device) for _ in range(2))
    dtype = shape.operand if norm else torch.float32
    state = torch.empty(plan.sequences, shape.heads, shape.rows, shape.V, device=device, dtype=dtype)
    _merge("merge_states", where, peaks, masses, kvs, peak, mass, state, NORM=norm)
    return peak, mass, state


def _empty(x: Tensor, width: int) -> Tensor:
    return torch.empty(*x.shape[:3], width, dtype=x.dtype, device=x.device)


def _torque(where: Where, parts: int) -> list[Optional]:
    """Buffers for theta's gradient, one a pass."""
    if where.theta is None:
        return [None] * parts
    return list(
        torch.empty(parts, where.plan.pieces, where.shape.heads, where.shape.D, device=where.theta.device).unbind(0)
    )


def _theta_grad(torques: list[Optional], theta: Optional) -> Optional:
    if theta is None:
        return None
    totals = [x.sum(0) for x in torques if x is not None]
    return (totals[0] if len(totals) == 1 else torch.stack(totals).sum(0)).to(theta.dtype)


def _scan(
    query: Tensor, key: Tensor | None, value: Tensor | None, theta: Tensor | None, places: Tensor | None, mask: Tensor | None,
    bounds: Sequence[int] | None, activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and for the backward pass maximum, mass and G of every sequence."""
    query, key, value = apart(query, key, value)
    shape = shape_of(query, key.shape[3], value.shape[3], theta)
    query, key, value = addressable(query), addressable(key), addressable(value)
    where = where_of(shape, theta, places, mask, bounds, query.device)
    if cuda_bidirectional.takes(where, (query, key, value)):
        return cuda_bidirectional.scan(query, key, value, where, activation)
    output = _empty(value, shape.V)
    if not where.plan.fused:
        by_cuda = cuda_bidirectional.takes_pieces(where, (query, key, value))
        peak, mass, state = _collect(key, value, where, True, by_cuda)
        if by_cuda:
            cuda_bidirectional.read_pieces(query, output, state, where, activation)
        else:
            _launch("read_pieces", where, (query, output), (state,), SILU=activation)
        return output, peak, mass, state
    rest = where.plan.sequences, shape.heads
    peak, mass = (torch.empty(*rest, shape.D, device=query.device) for _ in range(2))
    state = torch.empty(*rest, shape.rows, shape.V, device=query.device, dtype=shape.operand)
    _launch("fused_forward", where, (query, key, value, output), (peak, mass, state), SILU=activation)
    return output, peak, mass, state


def _fake_scan(
    query: Tensor, key: Tensor | None, value: Tensor | None, theta: Optional, places: Optional, mask: Optional,
    cu_seqlens: Optional, activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value = apart(query, key, value)
    peak, mass, state = _state_shapes(key, value, theta, cu_seqlens)
    dtype = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
    return torch.empty_like(value, memory_format=torch.contiguous_format), peak, mass, state.to(dtype)


def _state_shapes(key: Tensor, value: Tensor, theta: Optional, cu_seqlens: Optional) -> tuple[Tensor, Tensor, Tensor]:
    sequences = key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, width = key.shape[2:]
    rows = width if theta is None else 2 * width
    vector = key.new_empty(sequences, heads, width, dtype=torch.float32)
    return vector, torch.empty_like(vector), vector.new_empty(sequences, heads, rows, value.shape[3])


def _scan_backward(
    grad: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None, peak: Tensor, mass: Tensor, state: Tensor,
    theta: Tensor | None, places: Tensor | None, mask: Tensor | None, bounds: Sequence[int] | None, activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, as they are given, and of theta."""
    grads = Gradients(query, key, value)
    query, key, value = apart(query, key, value)
    shape = shape_of(query, key.shape[3], value.shape[3], theta)
    query, key, value, grad = addressable(query), addressable(key), addressable(value), addressable(grad)
    where = where_of(shape, theta, places, mask, bounds, query.device)
    if cuda_bidirectional.takes(where, (query, key, value, grad)):
        made = grads.next(), grads.next(), grads.next()
        saved = peak, mass, state
        torque = cuda_bidirectional.scan_backward(grad, query, key, value, *made, *saved, where, activation)
        return *grads.all(), _theta_grad([torque], theta)
    grad_query = grads.next()
    if where.plan.fused:
        grad_key, grad_value = grads.next(), grads.next()
        torques = _torque(where, 1)
        tensors = (query, key, value, grad, grad_query, grad_key, grad_value)
        _launch(
            "fused_backward",
            where,
            tensors,
            (peak, mass, state, torch.empty_like(state), torch.empty_like(peak), *torques),
            SILU=activation,
        )
    else:
        torques, by_cuda = _torque(where, 2), cuda_bidirectional.takes_pieces(where, (query, key, value, grad))
        parts = torch.empty(where.plan.pieces, *state.shape[1:], device=query.device)
        if by_cuda:
            given = (peak, mass, state, parts, torques[0])
            cuda_bidirectional.read_grad_pieces(query, grad, grad_query, *given, where, activation)
        else:
            _launch("read_grad_pieces", where, (query, grad, grad_query), (state, parts, torques[0]), SILU=activation)
        grad_state, pressure = torch.empty_like(state), torch.empty_like(peak)
        _merge("merge_grads", where, parts, state, grad_state, pressure)
        del parts
        grad_key, grad_value = grads.next(), grads.next()
        others = (peak, mass, pressure, grad_state, torques[1])
        if by_cuda:
            cuda_bidirectional.weight_grad_pieces(key, value, grad_key, grad_value, *others, where)
        else:
            _launch("weight_grad_pieces", where, (key, value, grad_key, grad_value), others, NORM=True)
    return *grads.all(), _theta_grad(torques, theta)


def _fake_scan_backward(
    grad: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None, peak: Tensor, mass: Tensor, state: Tensor,
    theta: Optional, places: Optional, mask: Optional, cu_seqlens: Optional, activation: bool,
) -> tuple[Optional, ...]:  # fmt: skip
    return _fake_grads((query, key, value), theta)


def _fake_grads(inputs: tuple[Optional, ...], theta: Optional) -> tuple[Optional, ...]:
    grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    return *grads, None if theta is None else theta.new_empty(theta.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, theta, places, mask, cu_seqlens, ctx.activation = inputs
    ctx.save_for_backward(query, key, value, *output[1:], theta, places, mask, cu_seqlens)
    ctx.mark_non_differentiable(*output[1:])


def _backward_scan(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # to be asked for once
    *grads, theta = scan_backward_op(grad, *saved, ctx.activation)
    if saved[1] is None:  # one tensor
        grads[1:] = None, None
    return (*grads, theta if ctx.needs_input_grad[3] else None, None, None, None, None)


scan_backward_op = Operator(
    "lightnet::bidirectional_scan_backward",
    f"(Tensor grad, {INPUTS}, Tensor peak, Tensor mass, Tensor state, {WHERE}, bool activation) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    by_bounds(
        "additive_scan",
        replayed(_scan_backward, lambda *given: prepare(apart(*given[1:4]), given[10]), shared=True),
        at=10,
    ),
    _fake_scan_backward,
)
scan_op = Operator(
    "lightnet::bidirectional_scan",
    f"({INPUTS}, {WHERE}, bool activation) -> (Tensor, Tensor, Tensor, Tensor)",
    by_bounds("additive_scan", replayed(_scan, lambda *given: prepare(apart(*given[:3]), given[6]), shared=True), at=6),
    _fake_scan,
)
scan_op.differentiable(_backward_scan, _setup)


def _states(
    key: Tensor, value: Tensor, theta: Tensor | None, places: Tensor | None, mask: Tensor | None,
    bounds: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Maximum, mass and weighted values of every sequence's tokens, float32, angle 0 at place 0."""
    shape = shape_of(key, key.shape[3], value.shape[3], theta)
    key, value = addressable(key), addressable(value)
    return _collect(key, value, where_of(shape, theta, places, mask, bounds, key.device, split=True), False)


def _fake_states(
    key: Tensor, value: Tensor, theta: Optional, places: Optional, mask: Optional, cu_seqlens: Optional
) -> tuple[Tensor, Tensor, Tensor]:
    return _state_shapes(key, value, theta, cu_seqlens)


def _states_backward(
    grad_mass: Tensor, grad_kv: Tensor, key: Tensor, value: Tensor, peak: Tensor, theta: Tensor | None,
    places: Tensor | None, mask: Tensor | None, bounds: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = shape_of(key, key.shape[3], value.shape[3], theta)
    key, value = addressable(key), addressable(value)
    where = where_of(shape, theta, places, mask, bounds, key.device, split=True)
    grad_key, grad_value = _empty(key, shape.D), _empty(value, shape.V)
    torques = _torque(where, 1)
    # A state is sum_t e^(k_t - max) (1, v_t): what the whole scan subtracts as p is here -dmass.
    others = (peak, None, -grad_mass.contiguous(), grad_kv.to(shape.operand).contiguous(), torques[0])
    _launch("weight_grad_pieces", where, (key, value, grad_key, grad_value), others, NORM=False)
    return grad_key, grad_value, _theta_grad(torques, theta)


def _fake_states_backward(
    grad_mass: Tensor, grad_kv: Tensor, key: Tensor, value: Tensor, peak: Tensor, theta: Optional,
    places: Optional, mask: Optional, cu_seqlens: Optional,
) -> tuple[Optional, ...]:  # fmt: skip
    return _fake_grads((key, value), theta)


def _setup_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    key, value, theta, places, mask, cu_seqlens = inputs
    ctx.save_for_backward(key, value, output[0], theta, places, mask, cu_seqlens)
    ctx.mark_non_differentiable(output[0])


def _backward_states(ctx: Any, _: Any, grad_mass: Tensor, grad_kv: Tensor) -> tuple[Any, ...]:
    *grads, theta = states_backward_op(grad_mass, grad_kv, *ctx.saved_tensors)
    return (*grads, theta if ctx.needs_input_grad[2] else None, None, None, None)


states_backward_op = Operator(
    "lightnet::bidirectional_states_backward",
    f"(Tensor grad_mass, Tensor grad_kv, Tensor key, Tensor value, Tensor peak, {WHERE}) -> (Tensor, Tensor, Tensor)",
    by_bounds(
        "additive_scan",
        replayed(_states_backward, lambda *given: prepare((given[2], *given[2:4]), given[8], True), shared=True),
        at=8,
        like=2,
    ),
    _fake_states_backward,
)
states_op = Operator(
    "lightnet::bidirectional_states",
    f"(Tensor key, Tensor value, {WHERE}) -> (Tensor, Tensor, Tensor)",
    by_bounds(
        "additive_scan",
        replayed(_states, lambda *given: prepare((given[0], *given[:2]), given[5], True), shared=True),
        at=5,
    ),
    _fake_states,
)
states_op.differentiable(_backward_states, _setup_states)


def _read(
    query: Tensor, state: Tensor, theta: Tensor | None, places: Tensor | None, mask: Tensor | None,
    bounds: Sequence[int] | None, activation: bool,
) -> Tensor:  # fmt: skip
    """phi(q) read from G [sequences, H, D or 2D, Dv] float32."""
    shape = shape_of(query, query.shape[3], state.shape[3], theta)
    query = addressable(query)
    where = where_of(shape, theta, places, mask, bounds, query.device, split=True)
    output = _empty(query, shape.V)
    _launch("read_pieces", where, (query, output), (state.to(shape.operand).contiguous(),), SILU=activation)
    return output


def _fake_read(
    query: Tensor, state: Tensor, theta: Optional, places: Optional, mask: Optional, cu_seqlens: Optional,
    activation: bool,
) -> Tensor:  # fmt: skip
    return query.new_empty(*query.shape[:3], state.shape[3])


def _read_backward(
    grad: Tensor, query: Tensor, state: Tensor, theta: Tensor | None, places: Tensor | None, mask: Tensor | None,
    bounds: Sequence[int] | None, activation: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = shape_of(query, query.shape[3], state.shape[3], theta)
    query, grad = addressable(query), addressable(grad)
    where = where_of(shape, theta, places, mask, bounds, query.device, split=True)
    grad_query = _empty(query, shape.D)
    torques = _torque(where, 1)
    held = state.to(shape.operand).contiguous()
    parts = torch.empty(where.plan.pieces, *state.shape[1:], device=query.device)
    _launch("read_grad_pieces", where, (query, grad, grad_query), (held, parts, torques[0]), SILU=activation)
    grad_state = torch.empty(state.shape, device=query.device)
    pressure = torch.empty(*state.shape[:2], shape.D, device=query.device)
    _merge("merge_grads", where, parts, held, grad_state, pressure)
    return grad_query, grad_state.to(state.dtype), _theta_grad(torques, theta)


def _fake_read_backward(
    grad: Tensor, query: Tensor, state: Tensor, theta: Optional, places: Optional, mask: Optional,
    cu_seqlens: Optional, activation: bool,
) -> tuple[Optional, ...]:  # fmt: skip
    return _fake_grads((query, state), theta)


def _setup_read(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, state, theta, places, mask, cu_seqlens, ctx.activation = inputs
    ctx.save_for_backward(query, state, theta, places, mask, cu_seqlens)


def _backward_read(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *grads, theta = read_backward_op(grad, *ctx.saved_tensors, ctx.activation)
    return (*grads, theta if ctx.needs_input_grad[2] else None, None, None, None, None)


read_backward_op = Operator(
    "lightnet::bidirectional_read_backward",
    f"(Tensor grad, Tensor query, Tensor state, {WHERE}, bool activation) -> (Tensor, Tensor, Tensor)",
    by_bounds("additive_scan", replayed(_read_backward), at=6),
    _fake_read_backward,
)
read_op = Operator(
    "lightnet::bidirectional_read",
    f"(Tensor query, Tensor state, {WHERE}, bool activation) -> Tensor",
    by_bounds("additive_scan", replayed(_read), at=5),
    _fake_read,
)
read_op.differentiable(_backward_read, _setup_read)
