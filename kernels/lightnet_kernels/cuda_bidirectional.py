"""The bidirectional scan in exact widths, by CUDA C++ (in `cuda/`): every sequence and head, or every piece of a long one, has a
block of threads to itself. One kernel a pass, or, with pieces, two about Triton's that merge them.

Called by `triton_bidirectional_scan` for the calls that `takes` and `takes_pieces` name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_launch
from .triton_bidirectional_plan import Where

DEVICE = "cuda"
PARTS = ("warp.cuh", "short_scan.cuh")
WIDTHS = range(40, 73, 8)  # a wider state wants more registers; narrower ones were not measured
TURNS = 16384  # tokens over which angles are carried from token to token: by then they are 2e-3 off
BLOCKS = 256  # of a grid at least: an H100 runs 528 of the forward pass at once, 264 of the backward pass


def takes(where: Where, tensors: Sequence[Tensor]) -> bool:
    """Whether these kernels do this call with a block a sequence and head, and faster than Triton's. `tensors`: query, key,
    value and perhaps the output's gradient."""
    shape = where.shape
    enough = shape.batch * shape.heads >= BLOCKS and (
        shape.tokens <= TURNS or where.theta is None or where.places is not None
    )
    return enough and _fits(where, tensors)


def takes_pieces(where: Where, tensors: Sequence[Tensor]) -> bool:
    """Whether they do it with a block a piece and head, as the plan cuts it."""
    return not where.plan.fused and where.plan.length <= TURNS and _fits(where, tensors)


def _fits(where: Where, tensors: Sequence[Tensor]) -> bool:
    shape, places = where.shape, where.places
    return (
        tensors[0].device.type == DEVICE
        and shape.D in WIDTHS
        and shape.V in WIDTHS
        and shape.batch * shape.heads > 0
        and shape.tokens > 0
        and where.mask is None
        and where.plan.table is None
        and not where.far
        and (places is None or shape.D % places.shape[2] == 0)
        and all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tensors)
        and all(x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3]) for x in tensors)
        and cuda_launch.available()
    )


def _constants(name: str, where: Where, activation: bool, part: int) -> dict[str, int]:
    """What the kernels are compiled for; the last five as measured (benchmarks/LOG.md)."""
    shape, places = where.shape, where.places
    tuned = {"BK": 32, "STAGES": 2, "WARPS": 3, "BLOCKS": 4, "TILES": 2}
    if name == "short_backward":
        tuned |= {"STAGES": 3, "WARPS": 4} | ({"BLOCKS": 2} if shape.lrpe else {"BLOCKS": 3, "TILES": 1})
    elif shape.halves * shape.D % 64 == 0:  # tiles of 16 features by four
        tuned |= {"WARPS": 4, "BLOCKS": 3}
    axes = 0 if places is None else places.shape[2]
    return {
        "PART": part, "D": shape.D, "V": shape.V, "LRPE": int(shape.lrpe), "AXES": axes, "SILU": int(activation), **tuned,
    }  # fmt: skip


def _launch(
    name: str, where: Where, activation: bool, part: int, tensors: Sequence[Tensor], others: Sequence[Tensor | None]
) -> None:  # fmt: skip
    """`tensors` [B, N, H, width] come with their strides, `others` without. Part 0 of the kernel is the whole of it."""
    shape, places, plan = where.shape, where.places, where.plan
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    places_stride = 0 if places is None or places.shape[0] == 1 else places.stride(0)
    splits, length = (plan.splits, plan.length) if part else (1, shape.tokens)
    arguments = [*tensors, *others, where.theta, places, *strides, places_stride, shape.heads, shape.tokens]
    constants = _constants(name, where, activation, part)
    blocks = shape.batch * splits * shape.heads
    cuda_launch.launch(name, (*PARTS, f"{name}.cu"), constants, blocks, [*arguments, splits, length])


def scan(query: Tensor, key: Tensor, value: Tensor, where: Where, activation: bool) -> tuple[Tensor, ...]:
    """Output, and for the backward pass a number near the keys' maximum, the mass in units of it, and G."""
    shape = where.shape
    output = value.new_empty(*value.shape[:3], shape.V)
    peak, mass = (query.new_empty(shape.batch, shape.heads, shape.D, dtype=torch.float32) for _ in range(2))
    state = query.new_empty(shape.batch, shape.heads, shape.rows, shape.V)
    _launch("short_forward", where, activation, 0, (query, key, value, output), (peak, mass, state, None))
    return output, peak, mass, state


def piece_states(key: Tensor, value: Tensor, where: Where, peaks: Tensor, masses: Tensor, kvs: Tensor) -> None:
    """What Triton's kernel of this name fills; maxima are numbers near them."""
    _launch("short_forward", where, True, 1, (key, key, value, value), (peaks, masses, None, kvs))


def read_pieces(query: Tensor, output: Tensor, state: Tensor, where: Where, activation: bool) -> None:
    """What Triton's kernel of this name fills: the output from G."""
    _launch("short_forward", where, activation, 2, (query, query, query, output), (None, None, state, None))


def scan_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
    peak: Tensor, mass: Tensor, state: Tensor, where: Where, activation: bool,
) -> Tensor | None:  # fmt: skip
    """Fills the gradients of query, key and value; gives that of theta [B, H, D], float32, a row a sequence."""
    torque = None if where.theta is None else torch.empty_like(peak)
    tensors = (query, key, value, grad, grad_query, grad_key, grad_value)
    _launch("short_backward", where, activation, 0, tensors, (peak, mass, state, torque, None, None, None))
    return torque


def read_grad_pieces(
    query: Tensor, grad: Tensor, grad_query: Tensor, peak: Tensor, mass: Tensor, state: Tensor, parts: Tensor,
    torque: Tensor | None, where: Where, activation: bool,
) -> None:  # fmt: skip
    """What Triton's kernel of this name fills: the gradient of queries, dG's sums and theta's gradient by piece."""
    tensors = (query, query, query, grad, grad_query, grad_query, grad_query)
    _launch("short_backward", where, activation, 1, tensors, (peak, mass, state, torque, parts, None, None))


def weight_grad_pieces(
    key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor, peak: Tensor, mass: Tensor, pressure: Tensor,
    grad_state: Tensor, torque: Tensor | None, where: Where,
) -> None:  # fmt: skip
    """What Triton's kernel of this name fills: the gradients of keys and values, and theta's by piece."""
    tensors = (key, key, value, value, grad_key, grad_key, grad_value)
    _launch("short_backward", where, True, 2, tensors, (peak, mass, None, torque, None, grad_state, pressure))
