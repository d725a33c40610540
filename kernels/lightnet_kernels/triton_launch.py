"""Launching Triton kernels with little work on the host.

Triton's own launch binds forty arguments by name and looks at each anew, 50 to 100 microseconds a kernel, as long as the
kernels of this package run. Here a kernel compiled once is found by what it was compiled for and started at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _kind(x: Any) -> Any:
    """What Triton compiles an argument for: dtype and alignment, or a number's divisibility."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if type(x) is int:
        return x == 1, x & 15 == 0, x >> 31
    return x


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`: call it with the kernel's first parameters in order, a tensor first, and the others, constexpr, and
    the launch options (num_warps) by name."""

    def start(*arguments: Any, **constants: Any) -> None:
        device = arguments[0].device
        key = (kernel, device, *map(_kind, arguments), *constants.items())
        known = _compiled.get(key)
        if known is not None:
            compiled, rest = known
            compiled[grid](*arguments, *rest)
            return
        compiled = kernel[grid](*arguments, **constants)
        if hasattr(compiled, "packed_metadata"):  # not under the interpreter
            rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            _compiled[key] = compiled, rest

    return start
