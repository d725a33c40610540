"""Decoding one token at a time, against the scan of the whole sequence in float64."""

import pytest
import torch
from lightnet_kernels import ScanState, ToeplitzState, additive_scan, identity_state, toeplitz_scan
from lightnet_kernels.decode import BLOCK, DecodeState, decode_state, decode_step, scan_state, toeplitz_step

from .interpreter import INSIDE, outside, run_inside
from .kernel_oracle import make, relative

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-3}
BACKENDS = ["triton"] if INSIDE else ["torch"]


def joined(states: list[DecodeState]) -> DecodeState:
    """States of unlike positions as one batch."""
    return DecodeState(*(torch.cat(parts) for parts in zip(*(s[:9] for s in states), strict=True)), *states[0][9:])


def check_step(prompts, steps, heads, width, value_width, dtype, device, backend, *, theta=True, scale=2.0, start=0):
    """Sequences that have read unlike prompts (their last `start` tokens one by one) go on together."""
    tokens = max(prompts) + steps
    inputs = make(len(prompts), tokens, heads, width, value_width, theta=theta, scale=scale, dtype=dtype)
    angles = inputs.pop("theta", None)
    rows = [{name: x[i : i + 1, : n + steps] for name, x in inputs.items()} for i, n in enumerate(prompts)]
    wanted = [additive_scan(**row, theta=angles, return_state=True, backend="torch") for row in rows]
    inputs = {name: x.to(dtype).to(device) for name, x in inputs.items()}
    kept = None if angles is None else angles.to(torch.float64 if dtype == torch.float64 else torch.float32).to(device)

    def token(rows, places):
        return [torch.stack([inputs[name][i, n] for i, n in zip(rows, places, strict=True)]) for name in inputs]

    states = []
    for i, n in enumerate(prompts):
        first = identity_state(1, heads, width, value_width, lrpe=theta, dtype=torch.float64, device=device)
        if n > start:
            part = {name: x[i : i + 1, : n - start].double() for name, x in inputs.items()}
            _, first = additive_scan(**part, theta=kept, return_state=True, backend="torch")
        state = decode_state(first, kept, dtype)
        for place in range(max(n - start, 0), n):
            decode_step(state, *token([i], [place]), backend="torch")
        states.append(state)
    state = joined(states)
    outputs = []
    for step in range(steps):
        out = decode_step(state, *token(range(len(prompts)), [n + step for n in prompts]), backend=backend)
        assert out.dtype == dtype
        outputs.append(out.cpu())
    outputs, last = torch.stack(outputs, 1), scan_state(state)
    for i, (output, after) in enumerate(wanted):
        # A state is good to the size of what it holds, its rounding to float32 included.
        assert relative(outputs[i : i + 1].double(), output[:, prompts[i] :]) < TOLERANCE[dtype]
        for name, one, two in zip(ScanState._fields, last, after, strict=True):
            assert relative(one[i : i + 1].cpu().double(), two.double()) < min(TOLERANCE[dtype], 1e-5), name


def check_toeplitz_step(batch, steps, channels, rank, dtype, device, backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, steps, channels, generator=generator).to(dtype)
    decay, gain = torch.rand(channels, rank, generator=generator), torch.randn(channels, rank, generator=generator)
    hidden = torch.randn(batch, channels, rank, generator=generator)
    start = ToeplitzState(hidden.double(), torch.arange(batch))
    wanted, last = toeplitz_scan(
        x.double(), decay.double(), gain.double(), initial_state=start, return_state=True, backend="torch"
    )
    state = ToeplitzState(hidden.to(device), torch.arange(batch, device=device))
    x, decay, gain = x.to(device), decay.to(device), gain.to(device)
    outputs = torch.stack([toeplitz_step(state, x[:, n], decay, gain, backend=backend) for n in range(steps)], 1)
    assert outputs.dtype == dtype and relative(outputs.cpu().double(), wanted) < TOLERANCE[dtype]
    assert relative(state.hidden.cpu().double(), last.hidden) < 1e-5 and torch.equal(state.length.cpu(), last.length)


@outside
def test_table_under_the_interpreter():
    run_inside(__file__, "-k", "step or fork")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    ("prompts", "steps", "start"),
    [([0], 3, 0), ([5, 0, 70], 4, 0), ([63, 64, 65, 1, 0], 3, 64), ([130, 3], 2, 66)],
)
def test_step_is_the_scan(prompts, steps, start, theta, backend):
    check_step(prompts, steps, 2, 5, 3, torch.float32, "cpu", backend, theta=theta, start=start)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "value_width"), [(1, 1), (24, 40), (72, 20), (33, 130)])
def test_step_of_any_width(width, value_width, backend):
    if value_width > 128:
        pytest.skip("the scan to compare with takes widths up to 128")
    check_step([66, 0], 2, 1, width, value_width, torch.float32, "cpu", backend, start=64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [60.0, 1e4])
def test_step_with_keys_of_any_size(scale, backend):
    check_step([66, 10], 3, 1, 6, 4, torch.float32, "cpu", backend, scale=scale, start=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_in_bfloat16(backend):
    check_step([65, 7], 3, 2, 8, 4, torch.bfloat16, "cpu", backend, start=64)


def test_float64_and_long():
    check_step([0, 100], 200, 2, 6, 4, torch.float64, "cpu", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "channels", "rank"), [(1, 1, 1), (5, 19, 3), (3, 16, 64)])
def test_toeplitz_step(batch, channels, rank, dtype, backend):
    check_toeplitz_step(batch, 3, channels, rank, dtype, "cpu", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fork(backend):
    inputs = {name: x.float() for name, x in make(1, 80, 1, 6, 4).items()}
    theta = inputs.pop("theta")
    _, after = additive_scan(**inputs, theta=theta, return_state=True)
    kept = [x.clone() for x in after]
    token = [x[:, 0] for x in inputs.values()]
    state = decode_state(after, theta)
    decode_step(state, *token, backend=backend)
    fork = state.clone()
    one = decode_step(state, *token, backend=backend)
    assert torch.equal(one, decode_step(fork, *token, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(state, fork, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))  # the scan's state is nobody's scratch


def test_a_state_goes_on_as_a_scan():
    inputs = {name: x.float() for name, x in make(2, 130, 2, 6, 4).items()}
    theta = inputs.pop("theta")
    state = decode_state(identity_state(2, 2, 6, 4, lrpe=True), theta)
    for n in range(70):
        decode_step(state, *(x[:, n] for x in inputs.values()))
    rest = {name: x[:, 70:] for name, x in inputs.items()}
    output = additive_scan(**rest, theta=theta, initial_state=scan_state(state))
    assert relative(output, additive_scan(**inputs, theta=theta)[:, 70:]) < 1e-5


def test_a_quarter_million_small_masses_add_up_and_angles_do_not_drift():
    """One key far above 2^18 others, block by block as `decode_step` enters them, against the closed form."""
    gaps, theta = torch.tensor([14.0, 17.0, 18.0, 19.0]), torch.tensor([[1.0, 0.01, 0.3, 1e-4]])
    state = decode_state(
        ScanState(torch.zeros(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 8, 1), torch.ones(1).long()), theta
    )
    state.kv[:, :, 4:] = 0.0  # at angle 0, one token before the block
    blocks = 2**18 // BLOCK
    state.keys.copy_(-gaps.expand(1, 1, BLOCK, 4))
    state.values.fill_(1.0)
    key = -gaps.view(1, 1, 4)
    for _ in range(blocks):
        state.count.fill_(BLOCK)
        decode_step(state, key, key, torch.ones(1, 1, 1), backend="torch")
    small, tokens = (-gaps.double()).exp(), blocks * BLOCK
    assert relative(state.sum[0, 0], 1 + tokens * small) < 1e-5
    # Token r lies at angle r - tokens; the first, large one at -tokens.
    step = theta[0].double()
    lags = torch.arange(1, tokens + 1).double()
    wanted = torch.stack(
        [torch.polar(torch.ones(1).double(), -tokens * s) + m * torch.polar(torch.ones(()).double(), -lags * s).sum()
         for s, m in zip(step, small, strict=True)]
    ).squeeze(1)  # fmt: skip
    actual = torch.complex(state.kv[0, 0, :4, 0].double(), state.kv[0, 0, 4:, 0].double())
    assert float((actual - wanted).abs().max()) < 1e-5
    naive = torch.ones(4)
    for _ in range(1000):
        naive += small.float()
    assert float(naive[2]) == 1.0  # what adding token by token does


def test_refusals():
    state = decode_state(identity_state(2, 1, 4, 3), dtype=torch.bfloat16)
    token = [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 3)]
    half = [x.bfloat16() for x in token]
    plain, lrpe, theta = identity_state(2, 2, 4, 3), identity_state(2, 2, 4, 3, lrpe=True), torch.ones(2, 4)
    sums, x, rates = ToeplitzState(torch.zeros(2, 3, 4), torch.zeros(2)), torch.zeros(2, 3), torch.zeros(3, 4)
    cases = [
        (decode_step, (state, *token), r"query is torch.float32, the state keeps torch.bfloat16"),
        (decode_step, (state, *half[:2], half[0]), r"value has shape .*; expected \(2, 1, 3\)"),
        (decode_step, (plain, *half), "state is of type ScanState; pass a DecodeState"),
        (decode_step, (state, token[0].numpy(), *half[1:]), "query is of type ndarray; pass a tensor"),
        (scan_state, (plain,), "state is of type ScanState; pass a DecodeState"),
        (decode_state, (lrpe,), "pass theta for the state of a scan with theta"),
        (decode_state, (lrpe, theta[0]), r"theta has shape \(4,\); expected \[H, D\] = \[2, 4\]"),
        (decode_state, (lrpe, theta[:1]), r"theta has shape \(1, 4\)"),
        (decode_state, (lrpe, [0.1]), "theta is of type list"),
        (decode_state, (lrpe, theta.to("meta")), "theta is on meta"),
        (decode_state, (sums,), "state is of type ToeplitzState; pass a ScanState"),
        (toeplitz_step, (sums, x[:, :2], rates, rates), "do not fit"),
        (toeplitz_step, (sums.hidden, x, rates, rates), "state is of type Tensor; pass a ToeplitzState"),
        (toeplitz_step, (sums, x.numpy(), rates, rates), "x is of type ndarray"),
    ]
    for function, arguments, words in cases:
        with pytest.raises(ValueError, match=rf"^{function.__name__}: [^\n]*{words}"):
            function(*arguments)
    if not INSIDE:
        with pytest.raises(ValueError, match=r"tensors on a CPU"):
            decode_step(state, *half, backend="triton")
