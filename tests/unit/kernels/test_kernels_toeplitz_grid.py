"""MD-TPE on grids: against its definition, and Triton's one pass an axis under the interpreter."""

import pytest
import torch
from lightnet_kernels import toeplitz_grid
from lightnet_kernels.toeplitz_grid import LONGEST

pytest.importorskip("triton")
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import relative

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (5e-3, 1e-2)}
GRIDS = [(1, 1), (2, 3), (7, 4, 3), (14, 14), (1, LONGEST), (17, 2), (5,)]


def definition(x, decay, gain, bidirectional):
    """With the explicit matrix of each axis."""
    out = x.clone()
    for axis, size in enumerate(x.shape[1:-1]):
        lag = torch.arange(size)[:, None] - torch.arange(size)[None, :]
        matrix = (gain[axis, :, :, None, None] * decay[axis, :, :, None, None] ** lag.abs()).sum(1)  # [d, n, n]
        matrix = matrix if bidirectional else torch.where(lag >= 0, matrix, 0.0)
        out = out + torch.einsum("dnm,...md->...nd", matrix, x.movedim(axis + 1, -2)).movedim(-2, axis + 1)
    return out


def leaves_of(batch, grid, width, rank, prefix):
    generator = torch.Generator().manual_seed(len(grid) + width)
    tokens = torch.randn(batch, prefix + int(torch.tensor(grid).prod()), width, generator=generator)
    decay = torch.rand(len(grid), width, rank, generator=generator)
    gain = torch.randn(len(grid), width, rank, generator=generator) / rank
    return tokens, decay, gain, torch.randn(batch, *grid, width, generator=generator)


def check(grid, width, rank, dtype, device, *, batch=3, bidirectional=True, prefix=0, backend="triton"):
    """Output and gradients against the definition in float64; with a prefix samples lie apart."""
    results = []
    tokens, decay, gain, grad = leaves_of(batch, grid, width, rank, prefix)
    tokens, grad = tokens.to(dtype), grad.to(dtype)
    for kind, place in ((dtype, device), (torch.float64, "cpu")):
        wide = torch.promote_types(kind, torch.float32)
        given = [tokens.to(kind).to(place), *(t.to(wide).to(place) for t in (decay, gain))]
        given = [t.requires_grad_() for t in given]
        x = given[0][:, prefix:].view(batch, *grid, width)
        if kind == torch.float64:
            y = definition(x, *given[1:], bidirectional)
        else:
            y = toeplitz_grid(x, *given[1:], bidirectional=bidirectional, backend=backend)
            assert y.dtype == dtype
        grads = torch.autograd.grad(y, given, grad.to(kind).to(place))
        results.append([y.detach().cpu(), *(t.cpu() for t in grads)])
    for name, one, two in zip(("y", "x", "decay", "gain"), *results, strict=True):
        assert relative(one, two) < TOLERANCE[dtype][name != "y"], name


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("grid", [*GRIDS, (33, 2)])
def test_pytorch_is_the_definition(grid, bidirectional):
    check(grid, 6, 4, torch.float32, "cpu", bidirectional=bidirectional, prefix=2, backend="auto")


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@inside
@pytest.mark.parametrize(
    ("grid", "bidirectional"),
    [((1, 1), True), ((2, 3), False), ((4, 3, 2), True), ((1, 17), True), ((LONGEST,), False), ((5,), True)],
)
def test_grids(grid, bidirectional):
    check(grid, 5, 4, torch.float32, "cpu", batch=1, bidirectional=bidirectional)


@inside
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("width", "prefix"), [(70, 2), (1, 1)])
def test_widths_and_samples_that_lie_apart(width, prefix, dtype):
    check((4, 3), width, 3, dtype, "cpu", prefix=prefix)


@inside
def test_no_samples():
    check((4, 3), 5, 3, torch.float32, "cpu", batch=0)


@pytest.mark.skipif(INSIDE, reason="the interpreter takes CPU tensors")
def test_refusals_name_a_way_out():
    x, parameters = torch.zeros(1, 3, 2, 4), torch.zeros(2, 2, 4, 3)
    with pytest.raises(ValueError, match=r"tensors on a CPU .*; use backend='auto'"):
        toeplitz_grid(x, *parameters, backend="triton")
    with pytest.raises(ValueError, match=r"axis of 33 tokens, above 32; use backend='auto'|tensors on a CPU"):
        toeplitz_grid(torch.zeros(1, 33, 2, 4), *parameters, backend="triton")
    with pytest.raises(ValueError, match=r"expected \[B, \*grid, d\]"):
        toeplitz_grid(x, *torch.zeros(2, 1, 4, 3))
    with pytest.raises(ValueError, match=r"x \(\), .* expected \[B, \*grid, d\]"):
        toeplitz_grid(x[0, 0, 0, 0], *parameters)
    with pytest.raises(ValueError, match="toeplitz_grid: x is of type ndarray; pass a tensor"):
        toeplitz_grid(x.numpy(), *parameters)
