"""Launching Triton kernels with little work on the host.

Triton's own launch binds forty arguments by name and looks at each anew, 50 to 100 microseconds a kernel, as long as the
kernels of this package run. Here a kernel compiled once is found by what it was compiled for and started at once. And
Triton compiles a kernel when it is first launched, one after the other: `compiled_together` does all of a call's at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode, active_mode

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _small(x: Any) -> Any:
    """What Triton compiles a number for."""
    return (x == 1, x & 15 == 0, x >> 31) if type(x) is int else x


_local = threading.local()
_together: set[Any] = set()


def compiled_together(key: Any, device: torch.device, run: Callable[[], Any]) -> None:
    """Before `run` runs for the first time under this key, compile all that it launches, in threads. `run` is called
    once without launching anything; what it returns is not used."""
    if key in _together or device.type != "cuda" or knobs.runtime.interpret:
        return
    _together.add(key)

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):
            (kernel.result() if hasattr(kernel, "result") else kernel)._init_handles()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        kernels: list[Any] = []
        _local.kernels = kernels
        try:
            with AsyncCompileMode(pool):
                run()
        finally:
            _local.kernels = None
            active_mode.set(None)  # where a kernel does not compile Triton leaves the mode on, with a pool that is gone
        list(pool.map(load, kernels))


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`: call it with the kernel's first parameters in order, one a tensor, and the others, constexpr, and
    the launch options (num_warps) by name."""

    def start(*arguments: Any, **constants: Any) -> None:
        kernels = getattr(_local, "kernels", None)
        if kernels is not None:
            kernels.append(kernel.warmup(*arguments, grid=grid, **constants))
            return
        device: Any = None
        values, kinds = [], []
        for x in arguments:
            if isinstance(x, Tensor):
                device = device or x.device
                x, dtype = x.data_ptr(), x.dtype  # an address: Triton would ask the driver what a tensor's is
                kinds.append(dtype if x & 15 == 0 else (dtype, "unaligned"))
            else:
                kinds.append(_small(x))
            values.append(x)
        key = (kernel, device, *kinds, *constants.items())
        known = _compiled.get(key)
        if known is None or getattr(knobs.runtime.launch_enter_hook, "calls", None):  # a profiler's hooks
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
