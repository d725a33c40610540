"""Launching Triton kernels with little work on the host.

Triton's own launch binds forty arguments by name and looks at each anew, 50 to 100 microseconds a kernel, as long as the
kernels of this package run. Here a kernel compiled once is found by what it was compiled for and started at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _small(x: Any) -> Any:
    """What Triton compiles a number for."""
    return (x == 1, x & 15 == 0, x >> 31) if type(x) is int else x


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`: call it with the kernel's first parameters in order, a tensor first, and the others, constexpr, and
    the launch options (num_warps) by name."""

    def start(*arguments: Any, **constants: Any) -> None:
        device = arguments[0].device
        values, kinds = [], []
        for x in arguments:
            if isinstance(x, Tensor):
                x, dtype = x.data_ptr(), x.dtype  # an address: Triton would ask the driver what a tensor's is
                kinds.append(dtype if x & 15 == 0 else (dtype, "unaligned"))
            else:
                kinds.append(_small(x))
            values.append(x)
        key = (kernel, device, *kinds, *constants.items())
        known = _compiled.get(key)
        if known is None or knobs.runtime.launch_enter_hook is not None:
            compiled = kernel[grid](*arguments, **constants)
            if hasattr(compiled, "packed_metadata"):  # not under the interpreter
                rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
                _compiled[key] = compiled, rest
            return
        compiled, rest = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *rest)

    return start
