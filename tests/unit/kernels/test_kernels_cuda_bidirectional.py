"""The CUDA kernels of the bidirectional scan without a card: compiled for the CPU, a thread a lane (`lanes.h`)."""

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import cuda_bidirectional, cuda_launch

from . import bidirectional_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make
from .lanes import launcher, needs_compiler, uninitialized_memory_holds_nan

pytestmark = needs_compiler


@outside
def test_table_under_the_interpreter():
    """Of Triton, whose kernels work out angles and merge pieces."""
    run_inside(__file__, "-x")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path_factory):
    if not INSIDE:
        yield
        return
    monkeypatch.setattr(cuda_launch, "launch", launcher(tmp_path_factory.getbasetemp()))
    monkeypatch.setattr(cuda_launch, "available", lambda: True)
    monkeypatch.setattr(cuda_bidirectional, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_bidirectional, "WIDTHS", range(24, 73, 8))
    monkeypatch.setattr(cuda_bidirectional, "BLOCKS", 1)
    with uninitialized_memory_holds_nan(monkeypatch):
        yield


@inside
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "value_width", "theta"),
    [(1, 70, 1, 72, 72, True), (2, 33, 1, 24, 40, False), (1, 1, 2, 24, 40, False), (1, 130, 1, 24, 24, True)],
)
def test_shapes(batch, tokens, heads, width, value_width, theta):
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), torch.bfloat16, "cpu")


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_keys_of_any_size(theta):
    inputs = make(1, 50, 1, 24, 24 if theta else 40, scale=1e4, theta=theta)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, torch.bfloat16, "cpu")


@inside
def test_keys_that_climb():
    """Units move many times, a little each time, and never underflow."""
    inputs = make(1, 100, 1, 24, 24)
    inputs["key"] += torch.linspace(0, 300, 100)[None, :, None, None]
    table.check(inputs, torch.bfloat16, "cpu")


@inside
def test_keys_far_below_zero():
    """Tokens that fill the last tile have key 0 on chip: 200 above all others, and must not count."""
    inputs = make(1, 33, 1, 24, 24)
    inputs["key"] -= 200
    table.check(inputs, torch.bfloat16, "cpu")


@inside
def test_coordinates_strides_and_no_activation():
    places = table.grid(40, 3)
    table.check_slices(make(2, 40, 2, 24, 24), torch.bfloat16, "cpu", coordinates=places, activation=None)


@inside
def test_repeated():
    """The third call of a layout is a recording's."""
    for seed in range(3):
        table.check(make(1, 20, 2, 24, 24, seed=seed), torch.bfloat16, "cpu")


@inside
@pytest.mark.parametrize(
    ("tokens", "width", "value_width", "options"),
    [
        (150, 24, 40, {}),
        (193, 24, 24, {"axes": 2}),
    ],
)
def test_pieces(tokens, width, value_width, options, monkeypatch):
    """Of 64 tokens, the last one shorter; places go on from one to the next."""
    names = []
    launch = cuda_launch.launch
    monkeypatch.setattr(
        cuda_launch, "launch", lambda name, files, constants, *rest: (
            names.append((name, constants["PART"])), launch(name, files, constants, *rest)
        ),
    )  # fmt: skip
    monkeypatch.setattr(cuda_bidirectional, "takes", lambda where, tensors: False)
    inputs = make(2, tokens, 1, width, value_width)
    inputs["key"][:, 70:] += 40  # units differ
    places = table.grid(tokens, options["axes"]) if "axes" in options else None
    table.check(inputs, torch.bfloat16, "cpu", **({} if places is None else {"coordinates": places}))
    assert set(names) == {(name, part) for name in ("short_forward", "short_backward") for part in (1, 2)}
