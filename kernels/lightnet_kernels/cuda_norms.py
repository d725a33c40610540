"""Norms of rows whose widths are no powers of two, a warp a row, by CUDA C++ (in `cuda/`). Called by `triton_norms`."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda_launch

PARTS = ("warp.cuh", "norm_rows.cuh")
DEVICE = "cuda"
WIDEST = 1536  # of a row: its weights' gradients stay in registers
WARPS = 4
HEAVY = 1024  # features of a row above which a lane has more than four chunks


def takes(x: Tensor, weight: Tensor | None, *others: Tensor | None) -> bool:
    """Whether these kernels do this call, and faster than Triton's (benchmarks/LOG.md): x [T, G, W] and what is of its
    shape, weights [G * W], or None."""
    _, groups, width = x.shape
    row = groups * width
    given = [y for y in (x, weight, *others) if y is not None]
    return (
        (weight is not None or (groups > 1 and width & (width - 1) != 0))
        and x.device.type == DEVICE
        and 64 <= row <= WIDEST
        and row & (row - 1) != 0
        and width % 8 == 0
        and all(y.dtype == torch.bfloat16 and y.data_ptr() % 16 == 0 and _rows(y) for y in given)
        and cuda_launch.available()
    )


def _rows(y: Tensor) -> bool:
    """Whether a token's features lie side by side."""
    if y.ndim == 1:
        return y.is_contiguous()
    return y.stride(2) == 1 and (y.shape[1] == 1 or y.stride(1) == y.shape[2]) and y.stride(0) % 8 == 0


def programs(x: Tensor, weighted: bool) -> int:
    """Blocks of the backward pass, each with a row of the weights' gradients."""
    return min(-(-x.shape[0] // WARPS), _at_once("norm_rows_backward", x, weighted) * _multiprocessors(x.device))


def _at_once(name: str, x: Tensor, weighted: bool) -> int:
    """Blocks on a multiprocessor, as measured."""
    heavy = x.shape[1] * x.shape[2] > HEAVY
    if name == "norm_rows_forward":
        return 4 if heavy else 5
    return 4 if not weighted else 2 if heavy else 3


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    name: str,
    x: Tensor,
    pointers: Sequence[Tensor | None],
    strided: Sequence[Tensor | None],
    *numbers: int,
    **which: bool,
) -> None:
    tokens, groups, width = x.shape
    at_once = _at_once(name, x, which["WEIGHT"])
    constants = {"WIDTH": width, "GROUPS": groups, "WARPS": WARPS, "BLOCKS": at_once}
    constants |= {key: int(value) for key, value in which.items()}
    strides = [0 if y is None else y.stride(0) for y in strided]
    blocks = min(-(-tokens // WARPS), at_once * _multiprocessors(x.device))
    cuda_launch.launch(name, (*PARTS, f"{name}.cu"), constants, blocks, [*pointers, *strides, tokens, blocks, *numbers])


def forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, y: Tensor,
    total: Tensor | None, scale: Tensor, layer: bool, eps: float,
) -> None:  # fmt: skip
    """Fills y, total and scale: see `triton_norms.norm_forward`."""
    (bits,) = struct.unpack("I", struct.pack("f", eps))
    _launch(
        "norm_rows_forward", x, (x, residual, gate, weight, bias, y, total, scale), (x, residual, gate), bits,
        LAYER=layer, RESIDUAL=residual is not None, GATE=gate is not None, WEIGHT=weight is not None,
        BIAS=bias is not None,
    )  # fmt: skip


def backward(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor, grad: Tensor,
    grad_sum: Tensor | None, grad_x: Tensor, grad_gate: Tensor | None, grad_weight: Tensor | None,
    grad_bias: Tensor | None, layer: bool,
) -> None:  # fmt: skip
    """Fills grad_x and grad_gate, and `programs` rows of the weights' gradients, to be summed."""
    pointers = (x, gate, weight, bias, scale, grad, grad_sum, grad_x, grad_gate, grad_weight, grad_bias)
    _launch(
        "norm_rows_backward", x, pointers, (x, gate, grad, grad_sum), LAYER=layer, RESIDUAL=grad_sum is not None,
        GATE=gate is not None, WEIGHT=weight is not None, BIAS=bias is not None,
    )  # fmt: skip
