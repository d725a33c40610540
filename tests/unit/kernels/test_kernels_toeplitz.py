"""MD-TPE's scan against the explicit Toeplitz matrix."""

from itertools import pairwise

import pytest
import torch
from lightnet_kernels import ToeplitzState, merge_toeplitz_states, toeplitz_scan

from .kernel_oracle import relative

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def make(batch, tokens, channels, order, *, seed=0, low=0.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, tokens, channels, generator=generator).double(),
        "decay": (low + (high - low) * torch.rand(channels, order, generator=generator)).double(),
        "gain": torch.randn(channels, order, generator=generator).double(),
    }


def matrix_form(x, decay, gain, bidirectional=False):
    """y_n = sum_m sum_i b_ci lambda_ci^|n - m| x_m."""
    step = torch.arange(x.shape[1])
    lag = step[:, None] - step
    power = decay[..., None, None] ** lag.abs()  # [d, e, n, m]
    if not bidirectional:
        power = torch.where(lag >= 0, power, 0.0)
    return torch.einsum("ci,cinm,bmc->bnc", gain, power, x)


def compare(run, other, inputs, dtype, tolerance):
    results = []
    for form, kind in ((run, dtype), (other, torch.float64)):
        leaves = {name: x.to(kind).requires_grad_() for name, x in inputs.items()}
        parts = form(**leaves)
        parts = parts if isinstance(parts, tuple) else (parts,)
        generator = torch.Generator().manual_seed(2)
        loss = sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in parts)
        results.append([*parts, *torch.autograd.grad(loss, list(leaves.values()))])
    for one, two in zip(*results, strict=True):
        assert one.dtype == dtype
        assert relative(one, two) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 63, 64, 65, 200])
def test_equals_its_matrix(tokens, bidirectional, dtype):
    compare(
        lambda **leaves: toeplitz_scan(**leaves, bidirectional=bidirectional),
        lambda **leaves: matrix_form(**leaves, bidirectional=bidirectional),
        make(2, tokens, 5, 6), dtype, TOLERANCE[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (1e-30, 1e-20), (0.0, 1e-3), (0.999, 1.0), (1.0, 1.0)])
def test_decay_near_zero_and_one(low, high, dtype):
    inputs = make(1, 150, 3, 4, low=low, high=high)
    compare(toeplitz_scan, matrix_form, inputs, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 130], [0, 0, 63, 64, 130, 130], [0, 1, 2, 66, 130]])
@pytest.mark.parametrize("masked", [False, True])
def test_segments_masks_and_states(bounds, bidirectional, masked):
    inputs = make(1 if bounds else 2, 130, 4, 3)
    sequences = len(bounds) - 1 if bounds else 2
    mask = torch.rand(inputs["x"].shape[:2], generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    start = torch.randn(sequences, 4, 3, generator=torch.Generator().manual_seed(3)).double()
    lengths = []

    def run(backend):
        def scan(x, decay, gain, start):
            y, state = toeplitz_scan(
                x, decay, gain, bidirectional=bidirectional, key_mask=mask, return_state=True, backend=backend,
                cu_seqlens=torch.tensor(bounds) if bounds else None,
                initial_state=ToeplitzState(start, torch.arange(sequences)),
            )  # fmt: skip
            lengths.append(state.length)
            return y, state.hidden

        return scan

    compare(run("torch"), run("reference"), {**inputs, "start": start}, torch.float64, 1e-10)
    assert torch.equal(lengths[0], lengths[1])


def test_segments_do_not_see_each_other():
    inputs = {name: x.float() for name, x in make(1, 130, 4, 3).items()}
    x = inputs.pop("x").requires_grad_()
    y = toeplitz_scan(x, **inputs, cu_seqlens=torch.tensor([0, 50, 130]), bidirectional=True)
    (grad,) = torch.autograd.grad(y[:, 50:].square().sum(), x)
    assert not grad[:, :50].any() and grad[:, 50:].all()
    for part in (slice(0, 50), slice(50, 130)):
        assert relative(y[:, part], toeplitz_scan(x[:, part], **inputs, bidirectional=True)) < 1e-6


def test_left_padding_only_shifts():
    inputs = make(1, 70, 4, 3)
    x = inputs.pop("x")
    padded = torch.cat([torch.full((1, 20, 4), torch.nan).double(), x], 1)
    y, state = toeplitz_scan(padded, **inputs, key_mask=(torch.arange(90) >= 20)[None], return_state=True)
    plain, wanted = toeplitz_scan(x, **inputs, return_state=True)
    assert relative(y[:, 20:], plain) < 1e-12 and not y[:, :20].any()
    assert relative(state.hidden, wanted.hidden) < 1e-12 and torch.equal(state.length, wanted.length)


@pytest.mark.parametrize("cuts", [[1], [64], [65], [10, 20, 100], list(range(1, 130))])
def test_split_and_merge(cuts):
    inputs = make(2, 130, 4, 3)
    bounds = [0, *cuts, 130]

    def pieces(x, decay, gain):
        outputs, state, merged = [], None, None
        for begin, end in pairwise(bounds):
            y, state = toeplitz_scan(x[:, begin:end], decay, gain, initial_state=state, return_state=True)
            _, local = toeplitz_scan(x[:, begin:end], decay, gain, return_state=True)
            merged = local if merged is None else merge_toeplitz_states(merged, local, decay)
            outputs.append(y)
        assert torch.equal(state.length, torch.tensor([130, 130])) and torch.equal(merged.length, state.length)
        return torch.cat(outputs, 1), state.hidden, merged.hidden

    def whole(x, decay, gain):
        step = torch.arange(129, -1, -1)
        hidden = torch.einsum("cin,bnc->bci", decay[..., None] ** step, x)
        return matrix_form(x, decay, gain), hidden, hidden

    compare(pieces, whole, inputs, torch.float64, 1e-10)


class Ranks:
    def __init__(self, decay, forward, backward, rank):
        self.decay, self.forward, self.backward, self.rank = decay, forward, backward, rank

    def merge(self, states, like):
        merged = ToeplitzState(torch.zeros_like(like.hidden), torch.zeros_like(like.length))
        for state in states:
            merged = merge_toeplitz_states(merged, state, self.decay)
        return merged

    def prefix(self, state):
        return self.merge(self.forward[: self.rank], state)

    def suffix(self, state):
        return self.merge(self.backward[: self.rank : -1], state)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_exchange(bidirectional):
    bounds = [0, 30, 94, 130]
    parts = [slice(*pair) for pair in pairwise(bounds)]

    def ranked(x, decay, gain):
        forward = [toeplitz_scan(x[:, part], decay, gain, return_state=True)[1] for part in parts]
        backward = [toeplitz_scan(x[:, part].flip(1), decay, gain, return_state=True)[1] for part in parts]
        outputs = [
            toeplitz_scan(
                x[:, part], decay, gain, bidirectional=bidirectional, exchange=Ranks(decay, forward, backward, rank)
            )
            for rank, part in enumerate(parts)
        ]
        return torch.cat(outputs, 1)

    compare(
        ranked, lambda **leaves: matrix_form(**leaves, bidirectional=bidirectional), make(2, 130, 4, 3),
        torch.float64, 1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_in_nothing_out(batch, tokens, backend):
    inputs = make(batch, tokens, 4, 3)
    y, state = toeplitz_scan(**inputs, return_state=True, backend=backend, bidirectional=True)
    assert y.shape == (batch, tokens, 4) and state.hidden.shape == (batch, 4, 3) and not state.hidden.any()


def test_half_precision_under_autocast():
    inputs = {name: x.float() for name, x in make(1, 100, 4, 3).items()}
    x = inputs.pop("x").bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = toeplitz_scan(x, **inputs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, toeplitz_scan(x.float(), **inputs).bfloat16())
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16
