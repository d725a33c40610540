"""The CUDA kernels of the bidirectional scan without a card: compiled for the CPU, a thread a lane (`lanes.h`)."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import cuda_bidirectional, cuda_launch
from lightnet_kernels import triton_bidirectional_scan as scan
from lightnet_kernels.recording import active

from . import bidirectional_table as table
from .kernel_oracle import make

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
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


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()

    def launch(name, files, constants, blocks, arguments):
        library = compiled(folder, name, files, tuple(constants.items()))

        def start(grid, _stream, values, _rest):
            numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in values]
            library.start(grid[0], (ctypes.c_longlong * len(numbers))(*numbers))

        start((blocks, 1, 1), None, arguments, None)
        tape = active()
        if tape is not None:
            tape.launched(start, (blocks, 1, 1), arguments, None)

    monkeypatch.setattr(cuda_launch, "launch", launch)
    monkeypatch.setattr(cuda_bidirectional, "takes", lambda where, tensors: True)
    monkeypatch.setattr(scan, "INTERPRETED", True)  # CPU tensors pass
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # what the kernels are to fill holds NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "value_width", "theta"),
    [(1, 70, 1, 72, 72, True), (2, 33, 1, 24, 40, False), (1, 1, 2, 24, 40, False), (1, 130, 1, 24, 24, True)],
)
def test_shapes(batch, tokens, heads, width, value_width, theta):
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), torch.bfloat16, "cpu")


@pytest.mark.parametrize("theta", [True, False])
def test_keys_of_any_size(theta):
    inputs = make(1, 50, 1, 24, 24 if theta else 40, scale=1e4, theta=theta)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, torch.bfloat16, "cpu")


def test_keys_that_climb():
    """Units move many times, a little each time, and never underflow."""
    inputs = make(1, 100, 1, 24, 24)
    inputs["key"] += torch.linspace(0, 300, 100)[None, :, None, None]
    table.check(inputs, torch.bfloat16, "cpu")


def test_keys_far_below_zero():
    """Tokens that fill the last tile have key 0 on chip: 200 above all others, and must not count."""
    inputs = make(1, 33, 1, 24, 24)
    inputs["key"] -= 200
    table.check(inputs, torch.bfloat16, "cpu")


def test_coordinates_strides_and_no_activation():
    places = table.grid(40, 3)
    table.check_slices(make(2, 40, 2, 24, 24), torch.bfloat16, "cpu", coordinates=places, activation=None)


def test_repeated():
    """The third call of a layout is a recording's."""
    for seed in range(3):
        table.check(make(1, 20, 2, 24, 24, seed=seed), torch.bfloat16, "cpu")
