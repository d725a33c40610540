"""The bidirectional scan where every sequence and head has a block of threads to itself: one kernel a pass, exact widths.

Called by `triton_bidirectional_scan` for the calls that `takes` names; the kernels are CUDA C++, in `cuda/`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_launch
from .triton_bidirectional_plan import Where

PARTS = ("warp.cuh", "short_scan.cuh")
WIDTHS = range(40, 73, 8)  # a wider state wants more registers; narrower ones were not measured
TURNS = 16384  # tokens over which angles are carried from token to token: by then they are 2e-3 off
BLOCKS = 256  # of a grid at least: an H100 runs 528 of the forward pass at once, 264 of the backward pass


def takes(where: Where, tensors: Sequence[Tensor]) -> bool:
    """Whether these kernels do this call, and faster than Triton's. `tensors`: query, key, value and perhaps the
    output's gradient."""
    shape, places = where.shape, where.places
    return (
        tensors[0].device.type == "cuda"
        and shape.D in WIDTHS
        and shape.V in WIDTHS
        and shape.batch * shape.heads >= BLOCKS
        and shape.tokens > 0
        and where.mask is None
        and where.plan.table is None
        and not where.far
        and (places is None or shape.D % places.shape[2] == 0)
        and (where.theta is None or places is not None or shape.tokens <= TURNS)
        and all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tensors)
        and all(x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3]) for x in tensors)
        and cuda_launch.available()
    )


def _constants(name: str, where: Where, activation: bool) -> dict[str, int]:
    """What the kernels are compiled for; the last five as measured (benchmarks/LOG.md)."""
    shape, places = where.shape, where.places
    tuned = {"BK": 32, "STAGES": 2, "WARPS": 3, "BLOCKS": 4, "TILES": 2}
    if name == "short_backward":
        tuned |= {"STAGES": 3, "WARPS": 4} | ({"BLOCKS": 2} if shape.lrpe else {"BLOCKS": 3, "TILES": 1})
    elif shape.halves * shape.D % 64 == 0:  # tiles of 16 features by four
        tuned |= {"WARPS": 4, "BLOCKS": 3}
    axes = 0 if places is None else places.shape[2]
    return {
        "D": shape.D, "V": shape.V, "LRPE": int(shape.lrpe), "AXES": axes, "SILU": int(activation), **tuned,
    }  # fmt: skip


def _launch(
    name: str, where: Where, activation: bool, tensors: Sequence[Tensor], others: Sequence[Tensor | None]
) -> None:
    """`tensors` [B, N, H, width] come with their strides, `others` without."""
    shape, places = where.shape, where.places
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    places_stride = 0 if places is None or places.shape[0] == 1 else places.stride(0)
    arguments = [*tensors, *others, where.theta, places, *strides, places_stride, shape.heads, shape.tokens]
    constants = _constants(name, where, activation)
    cuda_launch.launch(name, (*PARTS, f"{name}.cu"), constants, shape.batch * shape.heads, arguments)


def scan(query: Tensor, key: Tensor, value: Tensor, where: Where, activation: bool) -> tuple[Tensor, ...]:
    """Output, and for the backward pass a number near the keys' maximum, the mass in units of it, and G."""
    shape = where.shape
    output = value.new_empty(*value.shape[:3], shape.V)
    peak, mass = (query.new_empty(shape.batch, shape.heads, shape.D, dtype=torch.float32) for _ in range(2))
    state = query.new_empty(shape.batch, shape.heads, shape.rows, shape.V)
    _launch("short_forward", where, activation, (query, key, value, output), (peak, mass, state))
    return output, peak, mass, state


def scan_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
    peak: Tensor, mass: Tensor, state: Tensor, where: Where, activation: bool,
) -> Tensor | None:  # fmt: skip
    """Fills the gradients of query, key and value; gives that of theta [B, H, D], float32, a row a sequence."""
    torque = None if where.theta is None else torch.empty_like(peak)
    tensors = (query, key, value, grad, grad_query, grad_key, grad_value)
    _launch("short_backward", where, activation, tensors, (peak, mass, state, torque))
    return torque
