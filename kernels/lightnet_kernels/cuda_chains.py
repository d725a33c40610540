"""Chains of the causal scan's blocks by CUDA C++ (`cuda/causal_chain.cu`): what two Triton kernels do, forward and backward.
Called by `triton_scan` and `triton_scan_grads` for the shapes that `runs` names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cuda_launch
from .compiling import constant_result
from .triton_launch import only_compiled

DEVICE = "cuda"
Pair = tuple[Tensor | None, Tensor | None]
FILES = ("warp.cuh", "causal_state.cuh", "causal_chain.cu")
SLICE = 64  # features of a block of threads
MULTIPROCESSORS = 132  # of a large card
# Warps, blocks of threads on a multiprocessor and stages of the pipeline, with LRPE or without, as measured (benchmarks/LOG.md).
# Without, a warp's tile is 16 features, so that there are four.
RULES = {
    "many": {True: (8, 2, 2), False: (4, 3, 2)},
    "few": {True: (8, 1, 3), False: (4, 1, 3)},  # no more blocks of threads than multiprocessors
    "sums": {True: (8, 2, 4), False: (4, 2, 4)},
}


@constant_result
def runs(device: torch.device, dtype: torch.dtype, D: int, V: int) -> bool:
    """Whether a call of these widths has its chains from here."""
    return (
        device.type == DEVICE and dtype == torch.bfloat16 and D in (64, 128) and V in (64, 128) and _modern(device)
        and cuda_launch.available()
    )  # fmt: skip


def _modern(device: torch.device) -> bool:
    """sm_90 and sm_100: a warp stores a tile of its registers in one instruction, and a multiprocessor has 227 KB to share."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def grouped(device: torch.device) -> bool:
    """Whether four warps can multiply together, from shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == cuda_launch.HOPPER


def aligned(x: Tensor) -> Tensor:
    """Rows that are copied 16 bytes at a time."""
    whole = x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3])
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def chain(
    left: Tensor, right: Tensor, spans: Tensor, found: Any, kept: Tensor | None, initial: Pair, final: Pair,
    before: Tensor | None, after: Tensor | None, moved: Tensor | None, source: int, *, backward: bool = False,
    units: bool = False, sums: bool = False,
) -> None:  # fmt: skip
    """Fills `kept` [blocks, H, (2) D, V], bfloat16, and what is given of `after` and `moved`.

    Args:
        left: keys, or with `backward` queries over their normalisers, [B, N, H, D] bfloat16.
        right: values or the output's gradient, [B, N, H, V] bfloat16.
        found: `triton_scan.Blocks`; with `units`, but not with `sums`, enter, leave, mass and flag (0) are filled, too.
        initial, final: maxima and sums, as far as they are given; the final ones are filled with `units`.
        source: FROM of the Triton kernels.
        units: whether nobody knows the blocks' units yet. Then `initial` stands beside `before`.
        sums: nothing is kept; `spans` are pieces, and of each that somebody asks for `after` is what it adds, with `units`
            in those of its own maxima, with sums in `final`; or what it asks.
    """
    heads, D, V = left.shape[2], left.shape[3], right.shape[3]
    left, right = aligned(left), aligned(right)
    if before is not None and before.data_ptr() % 8:  # two numbers are read at once
        before = before.clone()
    lrpe, programs = found.turn is not None, spans.shape[0] * heads * (D // SLICE)
    rules = ["sums" if sums else "many" if programs > MULTIPROCESSORS else "few"]
    if only_compiled() and not sums:
        rules = ["many", "few"]  # the next call may have more tokens, or fewer
    for rule in rules:
        warps, at_once, stages = RULES[rule][lrpe]
        constants = {
            "BACKWARD": int(backward), "UNITS": int(units), "SUMS": int(sums), "LRPE": int(lrpe), "D": D, "V": V,
            "WARPS": warps, "BLOCKS": at_once, "STAGES": stages, "GROUPED": int(grouped(left.device)),
        }  # fmt: skip
        cuda_launch.launch(
            "causal_chain", FILES, constants, programs,
            [left, right, spans, found.turn, kept, found.kv, found.enter, found.leave, found.mass, found.flag, *initial,
             *final, before, after, moved, *left.stride()[:3], *right.stride()[:3], heads, source],
        )  # fmt: skip
