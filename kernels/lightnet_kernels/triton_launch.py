"""Launching Triton kernels with little work on the host.

Triton's own launch binds forty arguments by name and looks at each anew, 50 to 100 microseconds a kernel, as long as the
kernels of this package run. Here a kernel compiled once is found by what it was compiled for and started at once. And
Triton compiles a kernel when it is first launched, one after the other: `compiled_together` does all of a call's at once,
`compile_only` those of whatever is done within.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode, active_mode

from .recording import active
from .triton_loading import load_apart

load_apart()
TENSOR_MEMORY = 10  # sm_100 and sm_103

_NOTHING = contextlib.nullcontext()
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


@functools.cache
def architecture(device: torch.device) -> int:
    """The major number of a card's compute capability; 0 of a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def staged(stages: int, device: torch.device) -> int:
    """Stages of a loop that holds several sums of products and changes them by something else, too. One where products are
    added up in tensor memory: Triton before 3.9 fails to pipeline such loops there."""
    return 1 if architecture(device) == TENSOR_MEMORY else stages


def _small(x: Any) -> Any:
    """What Triton compiles a number for."""
    return (x == 1, x & 15 == 0, x >> 31) if type(x) is int else x


class _Together(NamedTuple):
    """What a thread that only compiles has met so far."""

    pool: ThreadPoolExecutor
    kernels: dict[Any, Any]  # Triton's, or futures of them, by what they are compiled for
    others: dict[Any, Future[Any]]


_local = threading.local()
_together: set[Any] = set()


def _compiling() -> _Together | None:
    return getattr(_local, "together", None)


def only_compiled() -> bool:
    """Whether this thread's launches start nothing: see `compile_only`."""
    return _compiling() is not None


def compiled_apart(compile_: Callable[..., Any], *arguments: Any) -> None:
    """Where launches start nothing: call another compiler than Triton's in one of the threads, once with the same arguments."""
    together = _compiling()
    assert together is not None
    if arguments not in together.others:
        together.others[arguments] = together.pool.submit(compile_, *arguments)


def compiled_together(key: Any, device: torch.device, *runs: Callable[[], Any]) -> None:
    """Before something runs for the first time under this key, compile all that it launches, in threads. `runs` are called
    once each without launching anything, one for every way that a call may take; what they return is not used."""
    if key in _together or device.type != "cuda" or knobs.runtime.interpret:
        return
    with compile_only(device):
        for run in runs:
            run()
    _together.add(key)


@contextlib.contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Within, this thread's launches start nothing; what they would have started is compiled in threads and loaded in the end
    (after an error compiled alone). Within another one it adds to that."""
    if only_compiled():
        yield
        return

    def load(kernel: Any) -> None:
        with torch.cuda.device(device):
            (kernel.result() if hasattr(kernel, "result") else kernel)._init_handles()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        together = _local.together = _Together(pool, {}, {})
        try:
            with AsyncCompileMode(pool):
                yield
        finally:
            _local.together = None
            active_mode.set(None)  # where a kernel does not compile Triton leaves the mode on, with a pool that is gone
        list(pool.map(load, together.kernels.values()))
        for other in together.others.values():
            other.result()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """`kernel[grid]`: call it with the kernel's first parameters in order, one a tensor, and the others, constexpr, and
    the launch options (num_warps) by name."""

    def start(*arguments: Any, **constants: Any) -> None:
        together = _compiling()
        if together is not None:
            key, *_ = _bound(kernel, arguments, constants)
            if key not in together.kernels:  # every layer of a model asks
                together.kernels[key] = kernel.warmup(*arguments, grid=grid, **constants)
            return
        tape = active()
        if tape is None:
            _start(kernel, grid, arguments, constants)
            return
        with _disable_current_modes() if knobs.runtime.interpret else _NOTHING:  # which computes with torch
            tape.launched(*_start(kernel, grid, arguments, constants))

    return start


def _bound(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any], torch.device]:
    """What a kernel is compiled for, arguments as its launcher takes them, and the device."""
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
    return (kernel, device, *kinds, *constants.items()), values, device


def _start(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Callable[..., None], tuple[int, ...], tuple[Any, ...], tuple[Any, ...] | None]:
    """Starts the kernel and returns what would start it again: see `Tape.launched`."""
    key, values, device = _bound(kernel, arguments, constants)
    known = _compiled.get(key)
    if known is None or getattr(knobs.runtime.launch_enter_hook, "calls", None):  # a profiler's hooks
        compiled = kernel[grid](*arguments, **constants)
        if not hasattr(compiled, "packed_metadata"):  # under the interpreter, which takes tensors
            return lambda to, _stream, given, _rest: kernel[to](*given, **constants), grid, arguments, None
        known = _compiled[key] = (
            _starter(compiled),
            tuple(constants[name] for name in kernel.arg_names[len(arguments) :]),
        )
    else:
        known[0]((*grid, 1, 1)[:3], torch._C._cuda_getCurrentRawStream(device.index), values, known[1])
    return known[0], grid, arguments, known[1]


def _starter(compiled: Any) -> Callable[..., None]:
    """A compiled kernel's launcher: (grid, stream, values, constants)."""
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    scratch = getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1)
    if scratch or hasattr(launcher, "arg_annotations"):  # since Triton 3.7: what lies below takes other arguments there

        def whole(grid: Any, stream: int, values: Any, rest: Any) -> None:
            launcher(*grid, stream, function, metadata, None, None, None, *values, *rest)

        return whole
    start, cooperative, dependent = launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl

    def plain(grid: Any, stream: int, values: Any, rest: Any) -> None:
        start(*grid, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *values, *rest)

    return plain
