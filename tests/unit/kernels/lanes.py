"""CUDA C++ kernels without a card: compiled for the CPU, a thread a lane (`lanes.h`)."""

import contextlib
import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from lightnet_kernels import cuda_chains, cuda_launch
from lightnet_kernels.recording import active

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
START = """
template <class... T, size_t... I> void call(void (*kernel)(T...), i64* x, std::index_sequence<I...>) { kernel((T)x[I]...); }
template <class... T> void call(void (*kernel)(T...), i64* x) { call(kernel, x, std::index_sequence_for<T...>()); }
extern "C" void start(int blocks, i64* x) { run(blocks, WARPS, BYTES, [=] { call(%s, x); }); }
"""


@functools.cache
def compiled(folder, name, files, constants):
    code = [Path(__file__).with_name("lanes.h").read_text(), cuda_launch.source(*files[1:]), START % name]
    text, library = folder / f"{name}.cpp", folder / f"{name}-{abs(hash(constants))}.so"
    text.write_text("\n".join(code))
    flags = [f"-D{key}={value}" for key, value in constants]
    done = subprocess.run(
        ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-pthread", "-w", *flags, text, "-o", library],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[:2000]
    return ctypes.CDLL(str(library))


def launcher(folder):
    """In place of `cuda_launch.launch`; libraries are kept in a folder."""

    def launch(name, files, constants, blocks, arguments):
        library = compiled(folder, name, files, tuple(constants.items()))

        def start(grid, _stream, values, _rest):
            numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in values]
            library.start(grid[0], (ctypes.c_longlong * len(numbers))(*numbers))

        start((blocks, 1, 1), None, arguments, None)
        tape = active()
        if tape is not None:
            tape.launched(start, (blocks, 1, 1), arguments, None)

    return launch


@contextlib.contextmanager
def scans_on_lanes(monkeypatch, folder):
    """The causal scan's CUDA kernels in place of Triton's; yields name and constants of those that ran."""
    seen = []
    launch = launcher(folder)

    def watched(name, files, constants, *rest):
        seen.append((name, constants))
        launch(name, files, constants, *rest)

    monkeypatch.setattr(cuda_launch, "launch", watched)
    monkeypatch.setattr(cuda_launch, "available", lambda: True)
    monkeypatch.setattr(cuda_chains, "DEVICE", "cpu")
    with uninitialized_memory_holds_nan(monkeypatch):
        yield seen


@contextlib.contextmanager
def uninitialized_memory_holds_nan(monkeypatch):
    """What kernels are to fill."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
