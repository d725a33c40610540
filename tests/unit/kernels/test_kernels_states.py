"""States: splitting anywhere equals one pass, gradients included; merging; exchange; decoding."""

from itertools import pairwise

import pytest
import torch
from lightnet_kernels import ScanState, additive_scan, identity_state, merge_states, shift_state

from . import kernel_oracle as oracle


def pieces_of(inputs, cuts):
    bounds = [0, *cuts, inputs["query"].shape[1]]
    for begin, end in pairwise(bounds):
        yield {name: x if name == "theta" else x[:, begin:end] for name, x in inputs.items()}


def in_pieces(inputs, cuts, start=None, **options):
    outputs, state = [], start
    for piece in pieces_of(inputs, cuts):
        output, state = additive_scan(**piece, initial_state=state, return_state=True, **options)
        outputs.append(output)
    return torch.cat(outputs, 1), state


def with_gradients(run, inputs, start):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    free = []
    if start is not None:
        start = start._replace(sum=start.sum.clone().requires_grad_(), kv=start.kv.clone().requires_grad_())
        free = [start.sum, start.kv]
    output, state = run(leaves, start)
    generator = torch.Generator().manual_seed(11)
    loss = 0
    for part in (output, state.sum, state.kv):
        weights = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype)
        loss = loss + (part * weights).sum()
    grads = torch.autograd.grad(loss, [*leaves.values(), *free])
    return [output, state.sum, state.kv, *grads], state


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("cuts", [[1], [63], [64], [65], [149], [1, 2, 3], [40, 40, 90], [0, 64, 128], [7, 77, 141]])
def test_split_anywhere(cuts, begun, theta, backend):
    inputs = oracle.make(2, 150, 2, 8, 6, theta=theta)
    start = oracle.random_state(2, 2, 8, 6, lrpe=theta) if begun else None
    wanted, whole = with_gradients(
        lambda leaves, state: additive_scan(**leaves, initial_state=state, return_state=True, backend="reference"),
        inputs,
        start,
    )
    actual, state = with_gradients(lambda leaves, state: in_pieces(leaves, cuts, state, backend=backend), inputs, start)
    assert torch.equal(state.max, whole.max) and torch.equal(state.length, whole.length)
    for one, other in zip(actual, wanted, strict=True):
        assert oracle.relative(one, other) < 1e-10


@pytest.mark.parametrize("spike", [0, 120, 400])
def test_split_in_float32(spike):
    """Float32 pieces with spikes, some carried in by the state, against float64 in one pass."""
    inputs = oracle.make(1, 150, 2, 8, 6)
    inputs["key"][:, 30] += spike
    inputs["key"][:, 100] += 2 * spike
    inputs["key"] = inputs["key"].float().double()
    start = oracle.random_state(1, 2, 8, 6, dtype=torch.float32)
    double = ScanState(*(x.double() for x in start[:3]), start.length)
    wanted, _ = with_gradients(
        lambda leaves, state: additive_scan(**leaves, initial_state=state, return_state=True), inputs, double
    )
    actual, _ = with_gradients(
        lambda leaves, state: in_pieces(leaves, [20, 64, 110], state),
        {name: x.float() for name, x in inputs.items()},
        start,
    )
    for one, other in zip(actual, wanted, strict=True):
        assert one.dtype == torch.float32
        assert oracle.relative(one, other) < 1e-5


@pytest.mark.parametrize("start_max", [-400.0, 0.0, 90.0, 400.0, 1e4])
def test_initial_state_of_any_size(start_max):
    inputs = oracle.make(2, 70, 1, 8, 6)
    start = oracle.random_state(2, 1, 8, 6)
    start = start._replace(max=start.max + start_max)
    for cu_seqlens in (None, torch.tensor([0, 70, 70])):
        chosen = {name: x[:1] if cu_seqlens is not None and name != "theta" else x for name, x in inputs.items()}
        runs = [
            with_gradients(
                lambda leaves, state, backend=backend, bounds=cu_seqlens: additive_scan(
                    **leaves, initial_state=state, return_state=True, backend=backend, cu_seqlens=bounds
                ),
                chosen,
                start,
            )[0]
            for backend in ("torch", "reference")
        ]
        for one, other in zip(*runs, strict=True):
            assert oracle.relative(one, other) < 1e-10


def test_key_gradients_with_states():
    """sum_r dk_r + s_0 ds_0 + <KV_0, dKV_0> = s_N ds_N + <KV_N, dKV_N> per feature (model-spec 1), without LRPE."""
    inputs = oracle.make(1, 100, 1, 8, 6, theta=False)
    start = oracle.random_state(1, 1, 8, 6, lrpe=False)
    total, kv = start.sum.requires_grad_(), start.kv.requires_grad_()
    key = inputs["key"].requires_grad_()
    output, end = additive_scan(**inputs, initial_state=start, return_state=True)
    end.sum.retain_grad(), end.kv.retain_grad()
    (output.square().sum() + end.sum.square().sum() + end.kv.sin().sum()).backward()
    before = key.grad.sum(1) + total * total.grad + (kv * kv.grad).sum(-1)
    after = end.sum * end.sum.grad + (end.kv * end.kv.grad).sum(-1)
    assert oracle.relative(before, after) < 1e-12


def test_max_is_a_constant():
    inputs = oracle.make(1, 20, 1, 8, 6)
    start = oracle.random_state(1, 1, 8, 6)
    maximum = start.max.requires_grad_()
    output, state = additive_scan(**oracle.cast(inputs, torch.float64), initial_state=start, return_state=True)
    assert not state.max.requires_grad
    merged = merge_states(start, state, inputs["theta"])
    assert not merged.max.requires_grad
    (output.sum() + merged.sum.sum()).backward()
    assert maximum.grad is None


@pytest.mark.parametrize("theta", [True, False])
def test_merging_any_partition_gives_the_bidirectional_state(theta):
    inputs = oracle.make(2, 150, 2, 8, 6, theta=theta)
    angles = inputs.get("theta")
    _, whole = additive_scan(**inputs, causal=False, return_state=True)
    for cuts in ([75], [1, 64, 149], [10, 10, 20, 130]):
        parts = [additive_scan(**piece, return_state=True)[1] for piece in pieces_of(inputs, cuts)]
        left = parts[0]
        for part in parts[1:]:
            left = merge_states(left, part, angles)
        right = parts[-1]
        for part in reversed(parts[:-1]):
            right = merge_states(part, right, angles)  # associative
        for merged in (left, right):
            for one, other in zip(merged, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_merge_gradients_and_identity():
    state = oracle.random_state(2, 1, 4, 3)
    other = oracle.random_state(2, 1, 4, 3, seed=8)
    theta = torch.rand(1, 4, dtype=torch.float64)
    neutral = identity_state(2, 1, 4, 3, lrpe=True, dtype=torch.float64)
    for merged in (merge_states(neutral, state, theta), merge_states(state, neutral, theta)):
        for one, two in zip(merged, state, strict=True):
            assert torch.equal(one, two)
    both = merge_states(neutral, neutral, theta)
    assert (both.max == -torch.inf).all() and torch.isfinite(both.kv).all() and not both.sum.any()

    def merge(left_sum, left_kv, right_sum, right_kv, angles):
        left, right = state._replace(sum=left_sum, kv=left_kv), other._replace(sum=right_sum, kv=right_kv)
        return merge_states(left, right, angles)[1:3]

    leaves = [x.clone().requires_grad_() for x in (state.sum, state.kv, other.sum, other.kv, theta)]
    assert torch.autograd.gradcheck(merge, leaves)
    moved = shift_state(shift_state(state, 5, theta), torch.tensor([-5, -5]), theta)
    assert oracle.relative(moved.kv, state.kv) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
def test_initial_state_in_a_bidirectional_call(causal):
    """Both directions continue a state; bidirectionally the tokens also see each other."""
    inputs = oracle.make(1, 90, 2, 8, 6)
    past, now = pieces_of(inputs, [40])
    _, start = additive_scan(**past, return_state=True)
    _, state = additive_scan(**now, initial_state=start, causal=causal, return_state=True)
    output, whole = additive_scan(**inputs, causal=causal, return_state=True)
    for one, other in zip(state, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    actual = additive_scan(**now, initial_state=start, causal=causal)
    assert oracle.relative(actual, output[:, 40:]) < 1e-11


class Ranks:
    """An exchange over pieces that are run one after another in one process."""

    def __init__(self, theta, states, rank):
        self.theta, self.states, self.rank = theta, states, rank

    def prefix(self, state):
        merged = state._replace(
            max=torch.full_like(state.max, -torch.inf), sum=torch.zeros_like(state.sum),
            kv=torch.zeros_like(state.kv), length=torch.zeros_like(state.length),
        )  # fmt: skip
        for earlier in self.states[: self.rank]:
            merged = merge_states(merged, earlier, self.theta)
        return merged

    def total(self, state):
        merged = self.states[0]
        for later in self.states[1:]:
            merged = merge_states(merged, later)
        return merged


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_exchange(begun, causal, backend):
    inputs = oracle.make(2, 120, 2, 8, 6)
    coordinates = torch.arange(1, 121)
    start = oracle.random_state(2, 2, 8, 6) if begun else None

    def at(begin, end):
        return {} if causal else {"coordinates": coordinates[begin:end]}

    def single(leaves, state):
        return additive_scan(
            **leaves, **at(0, 120), initial_state=state, causal=causal, return_state=True, backend=backend
        )

    def ranked(leaves, state):
        bounds = [0, 50, 64, 64, 120]
        parts = list(pieces_of(leaves, bounds[1:-1]))
        spans = list(pairwise(bounds))
        local = [
            additive_scan(**part, **at(*span), causal=causal, return_state=True, backend=backend)[1]
            for part, span in zip(parts, spans, strict=True)
        ]
        outputs = []
        for rank, (part, span) in enumerate(zip(parts, spans, strict=True)):
            output, end = additive_scan(
                **part, **at(*span), initial_state=state, causal=causal, return_state=True, backend=backend,
                exchange=Ranks(leaves["theta"], local, rank),
            )  # fmt: skip
            outputs.append(output)
        return torch.cat(outputs, 1), end

    wanted, whole = with_gradients(single, inputs, start)
    actual, state = with_gradients(ranked, inputs, start)
    assert torch.equal(state.length, whole.length)
    for one, other in zip(actual, wanted, strict=True):
        assert oracle.relative(one, other) < 1e-10


@pytest.mark.parametrize("spike", [0.0, 12.0])
def test_decoding_does_not_drift(spike):
    """4096 single tokens in float32 against one float64 pass."""
    tokens = 4096
    inputs = oracle.make(1, tokens, 1, 8, 4, scale=0.5)
    inputs["key"][:, 0] += spike
    wanted, whole = additive_scan(**inputs, return_state=True)
    with torch.no_grad():
        output, state = in_pieces({name: x.float() for name, x in inputs.items()}, list(range(1, tokens)))
    assert oracle.relative(output[:, -256:], wanted[:, -256:]) < 1e-4
    assert oracle.relative(state.kv, whole.kv) < 1e-4
    assert oracle.relative(state.sum, whole.sum) < 1e-4


def test_a_float64_state_does_not_stall():
    """One key 17 nats above the rest: each later token adds less than half an ulp to a float32 sum of 1."""
    tokens = 600
    key = torch.full((1, tokens, 1, 2), -17.5)
    key[:, 0] = 0.0
    ones = torch.ones(1, tokens, 1, 2)
    inputs = {"query": ones, "key": key, "value": ones}
    wanted = 1 + (tokens - 1) * torch.tensor(-17.5).double().exp()
    start = identity_state(1, 1, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        _, stalled = in_pieces(inputs, list(range(1, tokens)))
        _, state = in_pieces(inputs, list(range(1, tokens)), start)
        _, block = in_pieces(inputs, [tokens // 2])
    assert stalled.sum.dtype == torch.float32 and float(stalled.sum[0, 0, 0]) == 1.0  # the documented limit
    assert state.sum.dtype == torch.float64 and abs(float(state.sum[0, 0, 0] - wanted)) < 1e-9
    assert abs(float(block.sum[0, 0, 0] - wanted)) < 1e-6


def test_exchange_of_a_segment_across_ranks():
    """The first segment of the second rank continues the last of the first; the other begins anew."""
    inputs = oracle.make(1, 120, 2, 8, 6)

    def single(leaves, _):
        output, state = additive_scan(**leaves, cu_seqlens=torch.tensor([0, 30, 75, 120]), return_state=True)
        return output, ScanState(*(x[1:] for x in state))

    def ranked(leaves, _):
        first, second = pieces_of(leaves, [50])
        one, left = additive_scan(**first, cu_seqlens=torch.tensor([0, 30, 50]), return_state=True)
        neutral = identity_state(1, 2, 8, 6, lrpe=True, dtype=torch.float64)
        received = oracle.cat_states([ScanState(*(x[1:] for x in left)), neutral])
        exchange = Ranks(leaves["theta"], [received], 1)
        two, state = additive_scan(**second, cu_seqlens=torch.tensor([0, 25, 70]), exchange=exchange, return_state=True)
        return torch.cat([one, two], 1), state

    wanted, whole = with_gradients(single, inputs, None)
    actual, state = with_gradients(ranked, inputs, None)
    assert torch.equal(state.length, whole.length)
    for one, other in zip(actual, wanted, strict=True):
        assert oracle.relative(one, other) < 1e-10
