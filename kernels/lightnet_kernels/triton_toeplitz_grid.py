"""Triton kernels of `toeplitz_grid`: along an axis, sums over lags of tokens times taps.

A program holds the tokens of one line of the grid for some channels; the tokens that a lag away are read again, from the
first cache. An axis of n tokens between `outer` and `inner` others lies in a sample as [outer, n, inner, d].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_parts  # noqa: F401  (mends Triton's interpreter)
from .toeplitz_grid import gradient_tensors, output_tensor
from .triton_launch import launch
from .triton_replay import replayed

CHANNELS = 64  # of a program of `convolve`
LAGS, COLUMNS = 4, 32  # of a program of `tap_grads`
PROGRAMS = 1056  # that share the lines: eight for each of an H100's multiprocessors


@triton.jit(do_not_specialize=["outer", "inner"])
def convolve(
    x_ptr, base_ptr, taps_ptr, y_ptr, x_b, base_b, y_b, outer, inner, width,
    N: tl.constexpr, PADDED: tl.constexpr, CHANNELS: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y = base + sum over lags of taps times x so many tokens back, ahead, or both (the centre once)."""
    line = tl.program_id(0)
    sample = (line // (outer * inner)).to(tl.int64)
    rest = line % (outer * inner)
    first = (rest // inner) * N * inner + rest % inner
    col = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    place = tl.arange(0, PADDED)[:, None]
    inside = col < width
    here = (first + place * inner) * width + col
    step = inner * width
    total = tl.load(base_ptr + sample * base_b + here, mask=(place < N) & inside, other=0.0).to(tl.float32)
    x_ptr += sample * x_b
    for lag in tl.static_range(N):
        tap = tl.load(taps_ptr + lag * width + col, mask=inside, other=0.0)
        if BACK or lag == 0:
            known = (place >= lag) & (place < N) & inside
            total += tap * tl.load(x_ptr + here - lag * step, mask=known, other=0.0).to(tl.float32)
        if AHEAD and lag > 0:
            known = (place < N - lag) & inside
            total += tap * tl.load(x_ptr + here + lag * step, mask=known, other=0.0).to(tl.float32)
    tl.store(y_ptr + sample * y_b + here, total.to(y_ptr.dtype.element_ty), mask=(place < N) & inside)


@triton.jit(do_not_specialize=["lines", "outer", "inner"])
def tap_grads(
    x_ptr, grad_ptr, parts_ptr, x_b, grad_b, lines, outer, inner, width,
    N: tl.constexpr, PADDED: tl.constexpr, LAGS: tl.constexpr, COLUMNS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """parts [programs, N, width]: for LAGS lags, sums over every so many lines of grad times x a lag back (and ahead)."""
    lag = tl.program_id(0) * LAGS + tl.arange(0, LAGS)[:, None, None]
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    place = tl.arange(0, PADDED)[None, :, None]
    inside = col < width
    step = inner * width
    total = tl.zeros((LAGS, PADDED, COLUMNS), tl.float32)
    for line in range(tl.program_id(2), lines, tl.num_programs(2)):
        sample = (line // (outer * inner)).to(tl.int64)
        rest = line % (outer * inner)
        here = ((rest // inner) * N * inner + rest % inner + place * inner) * width + col
        grad = tl.load(grad_ptr + sample * grad_b + here, mask=(place < N) & inside, other=0.0).to(tl.float32)
        row = x_ptr + sample * x_b + here
        found = tl.load(row - lag * step, mask=(place >= lag) & (place < N) & inside, other=0.0).to(tl.float32)
        if BOTH:
            known = (lag > 0) & (place + lag < N) & inside
            found += tl.load(row + lag * step, mask=known, other=0.0).to(tl.float32)
        total += grad * found
    lags = tl.program_id(0) * LAGS + tl.arange(0, LAGS)[:, None]
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = (tl.program_id(2) * N + lags) * width + cols
    tl.store(parts_ptr + at, tl.sum(total, 1), mask=(lags < N) & (cols < width))


def _axes(x: Tensor) -> list[tuple[int, int, int, int]]:
    """(first tap, size, outer, inner) of every axis."""
    found, begin, outer, inner = [], 0, 1, x[0].numel() // x.shape[-1]
    for size in x.shape[1:-1]:
        inner //= size
        found.append((begin, size, outer, inner))
        begin, outer = begin + size, outer * size
    return found


def _summed(x: Tensor, taps: Tensor, y: Tensor, back: bool, ahead: bool) -> Tensor:
    """x plus its sums along all axes, in y."""
    width, base = x.shape[-1], x
    for begin, size, outer, inner in _axes(x):
        grid = (x.shape[0] * outer * inner, triton.cdiv(width, CHANNELS))
        launch(convolve, grid)(
            x, base, taps[begin:], y, x.stride(0), base.stride(0), y.stride(0), outer, inner, width,
            N=size, PADDED=max(4, triton.next_power_of_2(size)), CHANNELS=CHANNELS, BACK=back, AHEAD=ahead, num_warps=4,
        )  # fmt: skip
        base = y
    return y


@replayed
def forward(x: Tensor, taps: Tensor, both: bool) -> Tensor:
    """As `toeplitz_grid.output_tensor`, filled; samples of x are contiguous."""
    y = output_tensor(x, taps, both)
    return _summed(x, taps, y, True, both) if x.numel() else y


@replayed
def backward(x: Tensor, taps: Tensor, grad: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """As `toeplitz_grid.gradient_tensors`, filled; samples of x and grad are contiguous."""
    grad_x, grad_taps = gradient_tensors(x, taps, grad, both)
    if not x.numel():
        return grad_x, grad_taps.zero_()
    _summed(grad, taps, grad_x, both, True)
    width = x.shape[-1]
    for begin, size, outer, inner in _axes(x):
        lines = x.shape[0] * outer * inner
        tiles = triton.cdiv(size, LAGS), triton.cdiv(width, COLUMNS)
        programs = min(lines, triton.cdiv(PROGRAMS, tiles[0] * tiles[1]))
        parts = torch.empty(programs, size, width, dtype=torch.float32, device=x.device)
        launch(tap_grads, (*tiles, programs))(
            x, grad, parts, x.stride(0), grad.stride(0), lines, outer, inner, width,
            N=size, PADDED=max(4, triton.next_power_of_2(size)), LAGS=LAGS, COLUMNS=COLUMNS, BOTH=both, num_warps=4,
        )  # fmt: skip
        torch.sum(parts, 0, out=grad_taps[begin : begin + size])
    return grad_x, grad_taps
