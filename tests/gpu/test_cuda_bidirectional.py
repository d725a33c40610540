"""The CUDA kernels of the bidirectional scan on a GPU: the calls that they take, with NaN in fresh memory."""

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import cuda_bidirectional

from tests.unit.kernels import bidirectional_table as table
from tests.unit.kernels.kernel_oracle import make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Both passes of a test must go this way; what kernels are to fill holds NaN."""
    calls = []
    for name in ("scan", "scan_backward"):
        run = getattr(cuda_bidirectional, name)
        monkeypatch.setattr(cuda_bidirectional, name, lambda *x, name=name, run=run: calls.append(name) or run(*x))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    assert set(calls) == {"scan", "scan_backward"}


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "value_width"),
    [
        *[(16, n, 16, 72, 72) for n in (1, 16, 31, 96, 258)],
        (22, 196, 12, 64, 64),
        (17, 70, 16, 40, 56),
        (32, 100, 8, 48, 48),
        (64, 65, 4, 72, 64),
    ],
)
def test_shapes(batch, tokens, heads, width, value_width, theta):
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), BF16, "cuda", wanted_by="torch")


def test_long():
    table.check(make(32, 5000, 8, 72, 72, scale=1.0), BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize("theta", [True, False])
def test_keys_of_any_size(theta):
    inputs = make(16, 200, 16, 72, 72, scale=1e4, theta=theta)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, BF16, "cuda", wanted_by="torch")


def test_keys_far_below_zero():
    """Tokens that fill the last tile have key 0 on chip."""
    inputs = make(16, 33, 16, 72, 72)
    inputs["key"] -= 200
    table.check(inputs, BF16, "cuda", wanted_by="torch")


def test_keys_that_climb():
    inputs = make(16, 300, 16, 72, 72)
    inputs["key"] += torch.linspace(0, 900, 300)[None, :, None, None]
    table.check(inputs, BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize(("axes", "width", "activation"), [(2, 72, "silu"), (3, 72, None), (2, 64, "silu")])
def test_coordinates(axes, width, activation):
    table.check(
        make(16, 100, 16, width, width), BF16, "cuda", coordinates=table.grid(100, axes), activation=activation,
        wanted_by="torch",
    )  # fmt: skip


def test_strides():
    table.check_slices(make(16, 200, 16, 72, 72), BF16, "cuda", wanted_by="torch")


def test_two_runs_and_a_recorded_one_give_the_same_bits():
    table.check_bits((128, 256, 16, 72), BF16, "cuda", 5)
