"""torch.compile without a break through the scans and steps of both backends, for whatever tensors hold."""

import contextlib
import itertools

import pytest
import torch
import torch._dynamo.utils
from lightnet_kernels import (
    ScanState,
    ToeplitzState,
    additive_scan,
    decode_state,
    decode_step,
    identity_state,
    toeplitz_grid,
    toeplitz_scan,
    toeplitz_step,
)
from lightnet_kernels.decode import BLOCK, DecodeState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make, random_state

BACKEND = "triton" if INSIDE else "torch"
TOKENS = 20
CUTS = torch.tensor([0, 7, 7, 20])
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # commands set it, and so for the whole process
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def check(call, leaves, tolerance=0.0):
    """Outputs and all gradients of one graph, and of activation checkpointing, are those of a plain call."""
    results = []
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for run in (call, compiled, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        outputs = run(*leaves)
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def masked(batch):
    return torch.rand(batch, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3


SCANS = {
    "plain": {},
    "segments": {"cu_seqlens": CUTS},
    "mask": {"key_mask": masked(2)},
    "segments and mask": {"cu_seqlens": CUTS, "key_mask": masked(1)},
    "states": {"return_state": True},
    "segments and states": {"cu_seqlens": CUTS, "return_state": True},
    "coordinates, segments": {"cu_seqlens": CUTS, "coordinates": torch.arange(TOKENS)},
}


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


def calls(unlike):
    """Of SCANS without what a scan does not take."""
    return [name for name, options in SCANS.items() if not options.keys() & unlike]


MASKS = {"key_mask"} if INSIDE else set()  # not taken by Triton's causal scan and MD-TPE
CALLS = [*((name, False) for name in SCANS), *((name, True) for name in calls({"coordinates"} | MASKS))]


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("name", "causal"), CALLS)
def test_additive_scan(name, causal, theta):
    options = SCANS[name]
    batch = 1 if "cu_seqlens" in options else 2
    leaves = [x.float().requires_grad_() for x in make(batch, TOKENS, 2, 8, 6, theta=theta).values()]
    start = random_state(3 if "cu_seqlens" in options else 2, 2, 8, 6, lrpe=theta, dtype=torch.float32)
    states = [start.sum.requires_grad_(), start.kv.requires_grad_()] if "return_state" in options else []

    def call(query, key, value, *others):
        more = dict(options)
        if theta:
            more["theta"], *others = others
        if others:
            more["initial_state"] = start._replace(sum=others[0], kv=others[1])
        found = additive_scan(query, key, value, causal=causal, backend=BACKEND, **more)
        return (found[0], found[1].sum, found[1].kv) if states else (found,)

    check(call, [*leaves, *states], 1e-5 if states else 0.0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", calls({"coordinates"} | MASKS))
def test_toeplitz_scan(name, bidirectional):
    options = SCANS[name]
    batch, sequences = (1, 3) if "cu_seqlens" in options else (2, 2)
    generator = torch.Generator().manual_seed(0)
    x, start = torch.randn(batch, TOKENS, 6, generator=generator), torch.randn(sequences, 6, 4, generator=generator)
    leaves = [x, torch.rand(6, 4, generator=generator), torch.randn(6, 4, generator=generator)]
    leaves = [x.requires_grad_() for x in (leaves if "return_state" not in options else [*leaves, start])]

    def call(x, decay, gain, *start):
        more = {"initial_state": ToeplitzState(start[0], torch.zeros(sequences).long())} if start else {}
        found = toeplitz_scan(x, decay, gain, bidirectional=bidirectional, backend=BACKEND, **options, **more)
        return (found[0], found[1].hidden, found[1].length) if start else (found,)

    check(call, leaves)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_toeplitz_grid(bidirectional):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.rand(shape, generator=generator).requires_grad_() for shape in ((2, 5, 3, 6), *[(2, 6, 4)] * 2)]
    check(lambda *x: (toeplitz_grid(*x, bidirectional=bidirectional, backend=BACKEND),), leaves)


@outside
def test_a_row_longer_than_a_chunk_and_other_lengths():
    """What shapes decide is no part of the graph either: with other lengths it may compile again, and no third time."""

    def run(x, decay):
        query = x.unflatten(2, (2, 3))
        return additive_scan(query, query, query), toeplitz_scan(x, decay, decay, bidirectional=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for tokens in (150, 151, 70, 20):
        given = torch.randn(1, tokens, 6), torch.rand(6, 4)
        assert all(torch.equal(one, two) for one, two in zip(compiled(*given), run(*given), strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("scan", ["additive", "toeplitz"])
def test_boundaries_are_checked_when_they_are_met(scan):
    x = torch.randn(1, TOKENS, 1, 8)

    def run(x, cuts):
        if scan == "additive":
            return additive_scan(x, x, x, cu_seqlens=cuts, causal=False, backend=BACKEND)
        return toeplitz_scan(x[:, :, 0], torch.rand(8, 2), torch.rand(8, 2), cu_seqlens=cuts, backend=BACKEND)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    compiled(x, CUTS)
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] = 3 is below"):
        compiled(x, torch.tensor([0, 7, 3, 20]))


@outside
def test_autocast_is_kept_out_of_the_operators():
    """Also in the backward pass."""
    x = torch.randn(1, TOKENS, 2, 8, requires_grad=True)

    def run(x):
        return additive_scan(x, x, x, cu_seqlens=CUTS).square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.compile(run, backend="eager", fullgraph=True)(x)
        found = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, torch.autograd.grad(run(x), x), rtol=1e-5, atol=1e-5)


@outside
def test_contracts_of_the_torch_backend():
    query, key, value, theta = (x.float().requires_grad_() for x in make(1, TOKENS, 2, 8, 6).values())
    ops, mask, start = torch.ops.lightnet, masked(1), random_state(3, 2, 8, 6, dtype=torch.float32)
    start = [x.requires_grad_(x.is_floating_point() and place > 0) for place, x in enumerate(start)]
    whole = start[1:3]
    x, hidden = torch.randn(1, TOKENS, 6, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    decay, gain = (torch.rand(6, 4, requires_grad=True) for _ in range(2))
    for flag in (True, False):
        arguments = (query, key, value, theta, None, CUTS, mask, *start, True, flag, True, flag)
        torch.library.opcheck(ops.torch_causal_scan.default, arguments, test_utils=CHECKS)
        read = (query, key, value, theta, None, None, CUTS, mask, *(whole if flag else (None, None)), True)
        torch.library.opcheck(ops.torch_bidirectional_scan.default, read, test_utils=CHECKS)
        rows = (x, decay, gain, CUTS, mask, hidden, start[3], flag, True, flag)
        torch.library.opcheck(ops.torch_toeplitz_scan.default, rows, test_utils=CHECKS)


def decoding(theta):
    """A state and tokens, the third of which is the first of another block."""
    inputs = {name: x.float() for name, x in make(3, BLOCK + 2, 2, 8, 6, theta=theta).items()}
    angles = inputs.pop("theta", None)
    state = decode_state(identity_state(3, 2, 8, 6, lrpe=theta), angles)
    for place in range(BLOCK - 2):
        decode_step(state, *(x[:, place] for x in inputs.values()), backend="torch")
    state.count[1] -= 5
    return state, [[x[:, place] for x in inputs.values()] for place in range(BLOCK - 2, BLOCK + 2)]


@pytest.mark.parametrize("theta", [True, False])
def test_decode_step(theta):
    state, tokens = decoding(theta)
    other = state.clone()

    def step(state, query, key, value):
        return decode_step(state, query, key, value, backend=BACKEND) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for token in tokens:
            assert torch.equal(compiled(state, *token), step(other, *token))
            assert all(torch.equal(one, two) for one, two in zip(state[:9], other[:9], strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    query, *rest = tokens[0]
    assert not compiled(state, query.requires_grad_(), *rest).requires_grad


def test_toeplitz_step():
    generator = torch.Generator().manual_seed(0)
    state = ToeplitzState(torch.randn(2, 6, 4, generator=generator), torch.arange(2))
    other = ToeplitzState(*(x.clone() for x in state))
    decay, gain, *tokens = (torch.rand(shape, generator=generator) for shape in [*[(6, 4)] * 2, *[(2, 6)] * 3])

    def step(state, x):
        return toeplitz_step(state, x, decay, gain, backend=BACKEND) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    decay.requires_grad_(INSIDE)
    for x in tokens:
        assert torch.equal(compiled(state, x), step(other, x))
        assert torch.equal(state.hidden, other.hidden) and torch.equal(state.length, other.length)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_states_that_begin_within_their_storage(monkeypatch):
    """Inductor of torch 2.11 gave the operator memory beside it: seen on a card, and with its compiled code on a CPU."""
    state, (token, *_) = decoding(True)
    changed = state[: state._fields.index("theta")]
    assert not any(x.storage_offset() for x in changed)
    assert len({x.untyped_storage().data_ptr() for x in changed}) == len(changed)
    part = state._replace(values=torch.stack([state.values, state.values])[1])
    positions = ToeplitzState(torch.zeros(2, 3, 6, 4)[1], torch.zeros(3, dtype=torch.int64))
    rates = torch.rand(2, 6, 4)
    calls = [("values", lambda: decode_step(part, *token, backend=BACKEND))]
    if INSIDE:
        calls.append(
            ("hidden", lambda: toeplitz_step(positions, rates[:, :3, 0].T @ rates[:, :, 0], *rates, backend=BACKEND))
        )
    for (field, call), known in itertools.product(calls, (True, False)):
        torch._dynamo.reset()
        monkeypatch.setattr("lightnet_kernels.decode.LOSES_BEGINNINGS", known)
        refused = pytest.raises(Exception, match=f"state.{field} is a part of a larger tensor.*pass a clone")
        with refused if known else contextlib.nullcontext():
            torch.compile(call, backend="eager", fullgraph=True)()
        call()


def test_contract_of_decode_step():
    state, tokens = decoding(True)
    arguments = (*state, *tokens[0], True, BACKEND)
    torch.library.opcheck(torch.ops.lightnet.decode_step.default, arguments, test_utils=CHECKS)
    plain = DecodeState(*decoding(False)[0])
    torch.library.opcheck(
        torch.ops.lightnet.decode_step.default, (*plain, *tokens[0], True, BACKEND), test_utils=CHECKS
    )


@inside
def test_contracts_of_triton():
    from lightnet_kernels import triton_bidirectional_scan as scan

    query, key, value, theta = (x.float().requires_grad_() for x in make(1, TOKENS, 1, 8, 6).values())
    start = random_state(3, 1, 8, 6, dtype=torch.float32)
    where = (theta, None, None, CUTS)
    torch.library.opcheck(scan.scan_op.node, (query, key, value, *where, True), test_utils=CHECKS)
    torch.library.opcheck(scan.states_op.node, (key, value, *where), test_utils=CHECKS)
    torch.library.opcheck(scan.read_op.node, (query, start.kv.requires_grad_(), *where, True), test_utils=CHECKS)
    step = (torch.randn(2, 6, 4), torch.arange(2), torch.randn(2, 6), *torch.rand(2, 6, 4))
    torch.library.opcheck(torch.ops.lightnet.toeplitz_step.default, step, test_utils=CHECKS)


@inside
def test_fake_tensors_reach_no_kernel():
    with FakeTensorMode():
        state = decode_state(ScanState(*identity_state(2, 1, 8, 6)))
        token = [torch.empty(2, 1, width) for width in (8, 8, 6)]
        assert decode_step(state, *token, backend="triton").shape == (2, 1, 6)
        flat = ToeplitzState(torch.empty(2, 6, 4), torch.empty(2, dtype=torch.int64))
        assert toeplitz_step(flat, torch.empty(2, 6), *torch.empty(2, 6, 4), backend="triton").shape == (2, 6)
        x, rates = torch.empty(2, TOKENS, 6), torch.empty(2, 6, 4)
        y, after = toeplitz_scan(x, *rates, return_state=True, backend="triton")
        assert y.shape == x.shape and after.hidden.shape == (2, 6, 4)
