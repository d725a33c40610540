"""The Triton scan of MD-TPE on a GPU; speed is printed with -s."""

import pytest
import torch
from lightnet_kernels import toeplitz_scan
from torch.utils.checkpoint import checkpoint

from tests.unit.kernels import test_kernels_triton_toeplitz as table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty holds NaN: a buffer read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "rank"),
    [(2, 1, 3, 64), (3, 64, 70, 8), (2, 65, 5, 100), (5, 200, 192, 64), (1, 64 * 64 * 2 + 7, 6, 64), (9, 1030, 33, 64)],
)
def test_shapes(batch, tokens, channels, rank, states, dtype):
    table.check(batch, tokens, channels, rank, dtype, "cuda", states=states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bounds", [[0, 0, 63, 64, 500, 500], [0, 1, 2, 66, 500], [0, *range(3, 498, 5), 500]])
def test_segments(bounds, bidirectional, dtype):
    table.check(1, 500, 20, 16, dtype, "cuda", bounds=bounds, bidirectional=bidirectional)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1e-30, 1e-20), (0.999, 1.0), (1.0, 1.0)])
def test_decay_near_zero_and_one(low, high):
    table.check(1, 700, 20, 64, torch.float32, "cuda", low=low, high=high)


def test_strides():
    table.check(
        2, 300, 24, 64, torch.bfloat16, "cuda", layout=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        grad_layout=lambda x: x[:, :1].expand_as(x),
    )  # fmt: skip


def leaves(batch, tokens, channels, rank=64, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = torch.randn(2, batch, tokens, channels, generator=generator, device="cuda").to(dtype)
    decay = torch.rand(channels, rank, generator=generator, device="cuda")
    gain = torch.randn(channels, rank, generator=generator, device="cuda") / rank
    return [x.requires_grad_(), decay.requires_grad_(), gain.requires_grad_()], grad


def run(scan, inputs, grad):
    y = scan(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def test_two_runs_give_the_same_bits_and_checkpoints_and_compiled_graphs_too():
    for cuts in (None, torch.tensor([0, 70, 70, 1000])):
        inputs, grad = leaves(2 if cuts is None else 1, 1000, 192)

        def call(*x, cuts=cuts):
            y, state = toeplitz_scan(*x, cu_seqlens=cuts, bidirectional=True, return_state=True)
            return y * 1.0 + 0.0 * state.hidden.sum().to(y.dtype)

        first = run(call, inputs, grad)
        compiled = torch.compile(call, fullgraph=True)
        for scan in (call, lambda *x, call=call: checkpoint(call, *x, use_reentrant=False), compiled):
            assert all(torch.equal(one, two) for one, two in zip(first, run(scan, inputs, grad), strict=True))


@pytest.mark.parametrize(("batch", "tokens", "channels"), [(8, 2048, 1024), (1, 16384, 1024), (8, 2048, 2560)])
def test_speed(batch, tokens, channels):
    inputs, grad = leaves(batch, tokens, channels)
    for backend in ("triton", "torch"):

        def scan(*x, backend=backend):
            return toeplitz_scan(*x, backend=backend)

        times = []
        for work in (lambda: scan(*inputs).detach(), lambda: run(scan, inputs, grad)):
            for _ in range(3):
                work()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(10):
                work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 10)
        shape = f"B{batch} T{tokens} d{channels}"
        print(f"\ntoeplitz_scan {shape} {backend}: forward {times[0]:.3f} ms, forward+backward {times[1]:.3f} ms")
