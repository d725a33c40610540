"""CUDA C++ kernels, for what Triton's tiles do not fit: their sides are powers of two.

Nothing is compiled when the package is built or installed, and no nvcc is needed. On first use of a kernel at new constants
(widths, axes, ..) NVRTC, the run-time compiler that comes with PyTorch's CUDA libraries, makes machine code for the card at
hand (sm_80 and later), in 1 to 3 seconds. It is kept in Triton's cache folder (~/.triton/cache, TRITON_CACHE_DIR), under a hash
of source, constants, card and CUDA version, and read from there by later processes. Where there is no NVRTC `available` is
False and callers stay with Triton; source that does not compile is an error with the compiler's words.

A launch packs the arguments and calls the driver once (ctypes); recordings repeat it as they do Triton's.
tests/unit/kernels/lanes.h runs the same sources on a CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

from .recording import active
from .triton_launch import compiled_apart, only_compiled

FOLDER = Path(__file__).parent / "cuda"
HOPPER = (9, 0)
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def source(*files: str) -> str:
    """Text of a kernel: these files of `cuda/` one after the other."""
    return "\n".join((FOLDER / file).read_text() for file in files)


def launch(
    name: str, files: tuple[str, ...], constants: dict[str, int], blocks: int, arguments: Sequence[Tensor | int | None]
) -> None:
    """Start the kernel `name` on the current device and stream.

    Args:
        constants: what its source leaves open, among them WARPS.
        blocks: in the grid.
        arguments: the kernel's, each of 64 bits: addresses and integers.
    """
    what = name, files, tuple(constants.items()), torch.cuda.current_device()
    if only_compiled():
        compiled_apart(_compiled, *what)
        return
    start = _compiled(*what)
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    grid = (blocks, 1, 1)
    start(grid, torch.cuda.current_stream().cuda_stream, values, ())
    tape = active()
    if tape is not None:
        tape.launched(start, grid, arguments, ())


@functools.cache
def available() -> bool:
    """Whether this machine's CUDA can compile at run time: it is tried, as NVRTC loads without the files it needs too."""
    try:
        _driver()
        _compile("probe", 'extern "C" __global__ void probe() {}', [_architecture(torch.cuda.current_device())])
    except (OSError, RuntimeError):
        return False
    return True


def _architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    own = "a" if (major, minor) == HOPPER else ""  # with what this card alone can do
    return f"-arch=sm_{major}{minor}{own}"


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> Any:
    """PyTorch's own, of its CUDA version."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        for folder in spec.submodule_search_locations or () if spec else ():
            for found in sorted(Path(folder).glob(f"*/lib/{name}")):
                return ctypes.CDLL(str(found))
        raise


def _bind(device: int) -> None:
    """Make the device's primary context, PyTorch's, this thread's: autograd's threads may have none."""
    driver, context = _driver(), ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value:
        return
    place = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(place), device), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), place), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def _compile(name: str, text: str, options: list[str]) -> bytes:
    """Machine code."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    )
    size = ctypes.c_size_t()
    wanted = "ProgramLog" if failed else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{wanted}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{wanted}")(program, result)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"{name} does not compile: {result.raw.decode(errors='replace')[:2000]}")
    return result.raw


@functools.cache
def _compiled(
    name: str, files: tuple[str, ...], constants: tuple[tuple[str, int], ...], device: int
) -> Callable[..., Any]:
    """What starts the kernel on this device, called with (grid, stream, values, nothing)."""
    text = source(*files)
    options = [_architecture(device), "-std=c++17", *(f"-D{key}={value}" for key, value in constants)]
    cache = get_cache_manager(hashlib.sha256("\n".join([text, *options, str(torch.version.cuda)]).encode()).hexdigest())
    found = cache.get_file(f"{name}.cubin")
    image = Path(found).read_bytes() if found else _compile(name, text, options)
    if not found:
        cache.put(image, f"{name}.cubin", binary=True)
    driver = _driver()
    _bind(device)
    module, function, place = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    shared, size = ctypes.c_int(), ctypes.c_size_t()
    _check(driver.cuModuleLoadData(ctypes.byref(module), image), name)
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    _check(driver.cuModuleGetGlobal_v2(ctypes.byref(place), ctypes.byref(size), module, b"shared_bytes"), name)
    _check(driver.cuMemcpyDtoH_v2(ctypes.byref(shared), place, ctypes.c_size_t(4)), name)
    _check(driver.cuFuncSetAttribute(function, 8, shared), name)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    threads = 32 * dict(constants)["WARPS"]
    run = driver.cuLaunchKernel

    def start(grid: tuple[int, int, int], stream: int, values: Sequence[int | None], _: Any) -> None:
        data = (ctypes.c_int64 * len(values))(*[x or 0 for x in values])
        length = ctypes.c_size_t(ctypes.sizeof(data))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
        packed = (ctypes.c_void_p * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(length), 0)
        launched = (function, *grid, threads, 1, 1, shared, ctypes.c_void_p(stream), None, packed)
        code = run(*launched)
        if code == NO_CONTEXT:
            _bind(device)
            code = run(*launched)
        _check(code, name)

    return start
