"""MD-TPE on grids on a GPU: one pass an axis; speed beside the scan is printed with -s."""

import pytest
import torch
from lightnet_kernels import toeplitz_grid
from lightnet_kernels.toeplitz_grid import _scanned

from tests.unit.kernels import test_kernels_toeplitz_grid as table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty holds NaN: a buffer read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "prefix"), [(768, 0), (70, 2)])
@pytest.mark.parametrize("grid", table.GRIDS)
def test_grids(grid, width, prefix, dtype):
    for bidirectional in (True, False):
        check = {"batch": 5, "bidirectional": bidirectional, "prefix": prefix}
        table.check(grid, width, 16, dtype, "cuda", **check)


def test_two_runs_give_the_same_bits():
    tokens, decay, gain, grad = (t.cuda() for t in table.leaves_of(9, (14, 14), 96, 16, 0))
    x, found = tokens.view(9, 14, 14, 96), []
    for _ in range(2):
        given = [t.clone().requires_grad_() for t in (x, decay, gain)]
        y = toeplitz_grid(*given)
        found.append([y, *torch.autograd.grad(y, given, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_speed():
    """Classifier B's encoding: forward and backward in a third of the scan's time at least."""
    tokens, decay, gain, _ = (t.cuda() for t in table.leaves_of(256, (14, 14), 768, 16, 0))
    given = [t.requires_grad_() for t in (tokens.bfloat16().view(256, 14, 14, 768), decay, gain)]
    times = []
    for run in (lambda: toeplitz_grid(*given), lambda: _scanned(*given, True, "auto")):

        def step(run=run):
            y = run()
            torch.autograd.grad(y, given, y)

        for _ in range(3):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 10)
    print(f"MD-TPE of classifier B, forward and backward: {times[0]:.2f} ms, by scans {times[1]:.2f} ms")
    assert times[0] < times[1] / 3
