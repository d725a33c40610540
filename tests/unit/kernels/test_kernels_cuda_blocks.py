"""The CUDA kernels of the causal scan's blocks without a card: compiled for the CPU, a thread a lane (`lanes.h`), where copies
and products are there only when they are waited for."""

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import cuda_chains

from . import triton_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make
from .lanes import needs_compiler, scans_on_lanes

pytestmark = needs_compiler
BF16 = torch.bfloat16
KERNELS = {"causal_outputs", "causal_queries", "causal_answers"}


@outside
@pytest.mark.parametrize("which", ["shapes", "not shapes"])
def test_table_under_the_interpreter(which):
    """Of Triton, whose kernels do the rest of the scan."""
    run_inside(__file__, "-x", "-k", which)


@outside
@pytest.mark.slow
def test_the_rest_of_it():
    run_inside(__file__, "-m", "slow")


@pytest.fixture(autouse=True)
def launched(monkeypatch, tmp_path_factory):
    """In each test all three kernels run."""
    if not INSIDE:
        yield
        return
    monkeypatch.setattr(cuda_chains, "grouped", lambda device: True)
    with scans_on_lanes(monkeypatch, tmp_path_factory.getbasetemp()) as seen:
        yield
    assert {name for name, _ in seen} >= KERNELS


slow = pytest.mark.slow


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "value_width"),
    [(1, 70, 2, 128, 64), pytest.param(2, 130, 1, 64, 64, marks=slow), pytest.param(1, 1, 1, 128, 128, marks=slow)],
)
def test_shapes(batch, tokens, heads, width, value_width, theta):
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), BF16, "cpu")


@inside
@pytest.mark.parametrize("theta", [True, pytest.param(False, marks=slow)])
def test_exact_blocks_are_left_to_triton(theta):
    table.check(table.spiked(make(1, 200, 1, 64, 64, theta=theta), 400), BF16, "cpu")


@inside
@pytest.mark.parametrize("theta", [True, pytest.param(False, marks=slow)])
def test_segments(theta):
    table.check_segments([3, 0, 64, 1, 130, 70], BF16, "cpu", heads=1, width=64, value_width=128, theta=theta)


@inside
def test_keys_far_below_zero():
    """Rows of no token have key 0 on chip: 200 above all others, and must not count."""
    inputs = make(1, 70, 1, 64, 64)
    inputs["key"] -= 200
    table.check(inputs, BF16, "cpu")


@inside
@pytest.mark.slow
def test_ranks():
    table.check_ranks([130, 70], BF16, "cpu", heads=1, width=64, value_width=64, lift=())
