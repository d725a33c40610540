"""The Triton backend of the Toeplitz scan under Triton's interpreter; tests/gpu/test_toeplitz.py has larger sizes."""

import pytest
import torch
from lightnet_kernels import ToeplitzState, recorded, toeplitz_scan

pytest.importorskip("triton")
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import relative

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (5e-3, 1e-2)}


def check(
    batch, tokens, channels, rank, dtype, device, *, bounds=None, bidirectional=False, states=True, low=0.0, high=1.0,
    layout=lambda x: x, grad_layout=lambda x: x,
):  # fmt: skip
    """Output, state and every gradient against the PyTorch scan in float64, which is held against the matrix."""
    generator = torch.Generator().manual_seed(0)
    sequences = batch if bounds is None else len(bounds) - 1
    x = torch.randn(batch, tokens, channels, generator=generator).to(dtype)
    decay = low + (high - low) * torch.rand(channels, rank, generator=generator)
    gain = torch.randn(channels, rank, generator=generator) / rank
    start, grad_state = torch.randn(2, sequences, channels, rank, generator=generator)
    grad = torch.randn(batch, tokens, channels, generator=generator).to(dtype)
    results = []
    for backend, kind, place in (("triton", dtype, device), ("torch", torch.float64, "cpu")):
        wide = torch.promote_types(kind, torch.float32)
        leaves = [layout(x).to(kind).to(place), *(t.to(wide).to(place) for t in (decay, gain, start))]
        leaves = [t.requires_grad_() for t in leaves[: 4 if states else 3]]
        initial = ToeplitzState(leaves[3], torch.arange(sequences, device=place)) if states else None
        found = toeplitz_scan(
            *leaves[:3], bidirectional=bidirectional, initial_state=initial, return_state=states, backend=backend,
            cu_seqlens=None if bounds is None else torch.tensor(bounds, device=place),
        )  # fmt: skip
        y, state = found if states else (found, None)
        outputs, upstream = [y], [grad_layout(grad).to(kind).to(place)]
        if state is not None:
            outputs, upstream = [y, state.hidden], [*upstream, grad_state.to(wide).to(place)]
        grads = torch.autograd.grad(outputs, leaves, upstream)
        results.append(([t.detach().cpu() for t in outputs], [t.cpu() for t in grads], state and state.length.cpu()))
    (outputs, grads, length), (wanted, wanted_grads, wanted_length) = results
    assert outputs[0].dtype == dtype and grads[0].dtype == dtype
    for name, one, two in zip(("y", "state"), outputs, wanted, strict=False):
        assert relative(one, two) < TOLERANCE[dtype][0], name
    for name, one, two in zip(("x", "decay", "gain", "initial"), grads, wanted_grads, strict=False):
        assert relative(one, two) < TOLERANCE[dtype][1], name
    assert states is False or torch.equal(length, wanted_length)


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@pytest.mark.skipif(INSIDE, reason="the interpreter takes CPU tensors")
def test_refusals_name_a_way_out():
    x, parameters = torch.zeros(1, 3, 2), torch.zeros(2, 2, 4)
    with pytest.raises(ValueError, match=r"tensors on a CPU .*; use backend='auto'"):
        toeplitz_scan(x, *parameters, backend="triton")
    with pytest.raises(ValueError, match="does not take key_mask"):
        toeplitz_scan(x, *parameters, key_mask=torch.ones(1, 3).bool(), backend="triton")
    with pytest.raises(ValueError, match=r"does not take dtype torch\.float64"):
        toeplitz_scan(x.double(), *parameters, backend="triton")
    assert toeplitz_scan(x, *parameters).shape == x.shape


@inside
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(("batch", "tokens", "rank"), [(2, 1, 1), (1, 64, 3), (2, 65, 64), (1, 130, 70)])
def test_shapes(batch, tokens, rank, states):
    check(batch, tokens, 2, rank, torch.float32, "cpu", states=states)


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check(1, 100, 3, 5, dtype, "cpu")


@inside
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1e-30, 1e-20), (0.999, 1.0), (1.0, 1.0)])
def test_decay_near_zero_and_one(low, high):
    check(1, 150, 2, 4, torch.float32, "cpu", low=low, high=high)


@inside
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bounds", [[0, 0, 63, 64, 130, 130], [0, 1, 2, 66, 130]])
def test_segments(bounds, bidirectional):
    check(1, 130, 2, 3, torch.float32, "cpu", bounds=bounds, bidirectional=bidirectional)


@inside
def test_more_rows_than_a_tile():
    """Sequences that go on from one tile of 64 chunks to the next, and one that starts inside a tile."""
    check(1, 64 * 70 + 5, 1, 2, torch.float32, "cpu", bounds=[0, 10, 64 * 66, 64 * 70 + 5], low=0.99)


@inside
def test_strides():
    check(
        2, 70, 3, 4, torch.float32, "cpu", layout=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        grad_layout=lambda x: x[:, :1].expand_as(x),
    )  # fmt: skip


@inside
@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_in_nothing_out(batch, tokens):
    x = torch.zeros(batch, tokens, 2, requires_grad=True)
    decay, gain = (torch.rand(2, 3).requires_grad_() for _ in range(2))
    y, state = toeplitz_scan(x, decay, gain, return_state=True, backend="triton", bidirectional=True)
    assert y.shape == x.shape and state.hidden.shape == (batch, 2, 3) and not state.hidden.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum() + state.hidden.sum(), [x, decay, gain]))


@inside
def test_recorded_with_segments():
    """Not repeated for another number of segments, on which the states' shapes depend."""
    decay, gain = (torch.rand(2, 3).requires_grad_() for _ in range(2))

    def call(x, bounds):
        return toeplitz_scan(x, decay, gain, cu_seqlens=bounds, bidirectional=True, backend="triton") * 2

    for bounds in ([0, 30, 70], [0, 30, 70], [0, 1, 9, 9, 70], [0, 70]):
        x, cuts = torch.randn(1, 70, 2, requires_grad=True), torch.tensor(bounds)
        results = []
        for y in (call(x, cuts), recorded(call, [x], [decay, gain], [cuts], "segments")):
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, decay, gain])])
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@inside
def test_operator_contract():
    """Schema, fake kernels and autograd registration, as torch.compile relies on them."""
    from lightnet_kernels.triton_toeplitz import toeplitz_rows

    x, initial = torch.randn(1, 70, 2).requires_grad_(), torch.randn(2, 2, 3).requires_grad_()
    decay, gain = (torch.rand(2, 3).requires_grad_() for _ in range(2))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for start, last in ((initial, True), (None, False)):
        arguments = (x, decay, gain, start, torch.tensor([0, 30, 70]), False, True, last)
        torch.library.opcheck(toeplitz_rows.node, arguments, test_utils=checks)
