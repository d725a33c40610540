"""The chunked scan against its definition: shapes, keys of every size, dtypes, masks, segments."""

import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_kernels import additive_scan

from . import kernel_oracle as oracle

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SHAPES = [  # N, D, Dv
    (1, 8, 5),
    (2, 24, 8),
    (3, 32, 16),
    (4, 48, 32),
    (5, 64, 48),
    (6, 72, 24),
    (7, 96, 64),
    (8, 100, 72),
    (63, 128, 100),
    (64, 8, 128),
    (64, 100, 96),
    (65, 32, 8),
    (65, 64, 72),
    (257, 24, 8),
    (257, 48, 5),
    (2048, 8, 5),
]


def check(inputs, dtype, *, backend="torch", causal=True, upstream=1.0, known=None):
    tolerance = TOLERANCE[dtype]
    grad_output = torch.randn(inputs["value"].shape, generator=torch.Generator().manual_seed(3)).double() * upstream
    wanted, grads, sizes = known or oracle.expected(inputs, grad_output, causal)
    leaves = oracle.cast(inputs, dtype)
    output = additive_scan(**leaves, causal=causal, backend=backend)
    assert output.dtype == dtype
    assert oracle.relative(output, wanted) < tolerance
    actual = torch.autograd.grad(output, list(leaves.values()), grad_output.to(dtype))
    for name, grad in zip(leaves, actual, strict=True):
        assert grad.dtype == dtype
        assert oracle.relative(grad, grads[name], sizes[name]) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("tokens", "width", "value_width"), SHAPES)
def test_output_and_gradients(tokens, width, value_width, theta, dtype):
    inputs, known = case(tokens, width, value_width, theta)
    check(inputs, dtype, known=known)


@functools.lru_cache(maxsize=1)
def case(tokens, width, value_width, theta):
    """Inputs and what is expected, shared by the two dtypes."""
    batch, heads = (2, 2) if tokens < 100 else (1, 1)
    inputs = oracle.make(batch, tokens, heads, width, value_width, theta=theta)
    grad_output = torch.randn(inputs["value"].shape, generator=torch.Generator().manual_seed(3)).double()
    return inputs, oracle.expected(inputs, grad_output)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_reference_is_the_definition(tokens, theta, causal):
    check(oracle.make(2, tokens, 2, 6, 4, theta=theta), torch.float64, backend="reference", causal=causal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 200])
def test_bidirectional(tokens, theta, dtype):
    check(oracle.make(2, tokens, 2, 12, 8, theta=theta), dtype, causal=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_ten_thousand(causal, dtype):
    inputs = oracle.make(2, 130, 2, 8, 6)
    sign = torch.randn(inputs["key"].shape, generator=torch.Generator().manual_seed(1)).sign()
    check({**inputs, "key": 1e4 * sign.double()}, dtype, causal=causal)
    check({**inputs, "key": (inputs["key"] + 1e4 * sign).float().double()}, dtype, causal=causal)
    # Rising and falling by thousands inside one chunk.
    ramp = torch.linspace(-1e4, 1e4, 130).double()[None, :, None, None].expand_as(inputs["key"])
    check({**inputs, "key": ramp}, dtype, causal=causal)
    check({**inputs, "key": -ramp}, dtype, causal=causal)


@pytest.mark.parametrize("upstream", [1.0, 1e-12])
@pytest.mark.parametrize("spike", [80.0, 120.0, 400.0, -80.0, -120.0, -400.0])
def test_a_spike_at_every_place_of_a_chunk(spike, upstream):
    inputs = oracle.make(64, 70, 1, 4, 3, scale=1.0)
    places = torch.arange(64)
    inputs["key"][places, places] += spike
    check(inputs, torch.float32, upstream=upstream)


@pytest.mark.parametrize("growth", [40.0, 79.0, 81.0, 139.0, 141.0])
def test_growth_about_the_bound_of_the_fast_path(growth):
    inputs = oracle.make(1, 64, 1, 8, 6, scale=1.0)
    inputs["key"] = (inputs["key"] * 0.1 + torch.linspace(0, growth, 64).double()[None, :, None, None]).float().double()
    check(inputs, torch.float32)
    check(inputs, torch.float32, upstream=1e-12)


@pytest.mark.parametrize("largest", [1e30, 3e38])
def test_the_largest_finite_keys(largest):
    inputs = oracle.make(1, 70, 1, 4, 3)
    inputs["key"][:, 5] = largest
    inputs["key"][:, 40] = -largest
    inputs["key"] = inputs["key"].float().double()
    check(inputs, torch.float32)


def test_strided_inputs():
    inputs = oracle.make(2, 70, 2, 8, 6)
    plain = additive_scan(**oracle.cast(inputs, torch.float64))
    strided = {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "value")}
    leaf = torch.stack([inputs["key"], torch.full_like(inputs["key"], torch.nan)], -1).requires_grad_()
    output = additive_scan(strided["query"], leaf[..., 0], strided["value"], theta=inputs["theta"])
    torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(output.sum(), leaf)
    assert torch.isfinite(grad).all() and not grad[..., 1].any()
    expanded = additive_scan(
        inputs["query"][:1].expand(3, -1, -1, -1), inputs["key"][:1].expand(3, -1, -1, -1),
        inputs["value"][:1].expand(3, -1, -1, -1), theta=inputs["theta"],
    )  # fmt: skip
    torch.testing.assert_close(expanded[2], plain[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(batch, tokens, causal, backend):
    inputs = oracle.cast(oracle.make(batch, tokens, 2, 8, 6), torch.float32)
    output, state = additive_scan(**inputs, causal=causal, return_state=True, backend=backend)
    assert output.shape == (batch, tokens, 2, 6)
    assert state.kv.shape == (batch, 2, 16, 6) and not state.kv.any() and not state.length.any()
    assert (state.max == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    inputs = oracle.make(1, 100, 2, 16, 8, dtype=dtype)
    full = additive_scan(**{name: x.float() for name, x in inputs.items()})
    half = {name: x.to(dtype).requires_grad_() for name, x in inputs.items() if name != "theta"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = additive_scan(**half, theta=inputs["theta"].float(), return_state=True)
    assert output.dtype == dtype and state.kv.dtype == torch.float32
    assert torch.equal(output, full.to(dtype))
    output.sum().backward()
    assert all(x.grad.dtype == dtype for x in half.values())


@pytest.mark.parametrize("activation", ["none", None])
def test_identity_activation(activation):
    inputs = oracle.make(1, 70, 1, 8, 6)
    query = inputs["query"].clone().requires_grad_()
    output = additive_scan(query, inputs["key"], inputs["value"], activation=activation)
    wanted = additive_scan(query, inputs["key"], inputs["value"], activation=activation, backend="reference")
    assert oracle.relative(output, wanted) < 1e-10
    grads = [torch.autograd.grad(x.square().sum(), query)[0] for x in (output, wanted)]
    assert oracle.relative(*grads) < 1e-10
    # Without an activation the output is linear in the query.
    tripled = additive_scan(3 * query, inputs["key"], inputs["value"], activation=activation)
    assert oracle.relative(tripled, 3 * output) < 1e-10


def run_all(inputs, backend, **options):
    """Output, state and every gradient of one call, in float64."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output, state = additive_scan(**leaves, return_state=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(5)
    loss = 0
    for part in (output, state.sum, state.kv):
        loss = loss + (part * torch.randn(part.shape, generator=generator, dtype=part.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return [output, state.sum, state.kv, *grads], state


def agree(inputs, **options):
    actual, state = run_all(inputs, "torch", **options)
    wanted, wanted_state = run_all(inputs, "reference", **options)
    assert torch.equal(state.length, wanted_state.length) and torch.equal(state.max, wanted_state.max)
    for one, other in zip(actual, wanted, strict=True):
        assert oracle.relative(one, other) < 1e-10


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("theta", [True, False])
def test_independent_decay(theta, causal):
    """No-share ablation, with gradients to key and decay: against the reference, and a step of the recurrence."""
    inputs = oracle.make(2, 100, 2, 8, 6, theta=theta)
    inputs["decay"] = oracle.make(2, 100, 2, 8, 6, seed=9)["key"]
    agree(inputs, causal=causal)
    spiked = {**inputs, "decay": inputs["decay"].clone()}
    spiked["decay"][:, 20] += 200
    agree(spiked, causal=causal)
    if causal and not theta:
        query, key, value, decay = (inputs[name][0, :2, 0] for name in ("query", "key", "value", "decay"))
        mass = decay.exp()
        weight = mass / mass.sum(0) * torch.nn.functional.silu(key)
        wanted = torch.einsum("d,rd,rv->v", torch.nn.functional.silu(query[1]), weight, value)
        assert oracle.relative(additive_scan(**inputs)[0, 1, 0], wanted) < 1e-10


def test_left_padding_only_shifts():
    inputs = oracle.make(1, 90, 2, 8, 6)
    plain, state = additive_scan(**inputs, return_state=True)
    pads = 37
    padded = {}
    for name in ("query", "key", "value"):
        garbage = torch.full((1, pads, *inputs[name].shape[2:]), torch.nan, dtype=torch.float64)
        padded[name] = torch.cat([garbage, inputs[name]], 1).requires_grad_()
    mask = (torch.arange(127) >= pads)[None]
    output, padded_state = additive_scan(**padded, theta=inputs["theta"], key_mask=mask, return_state=True)
    assert oracle.relative(output[:, pads:], plain) < 1e-12 and not output[:, :pads].any()
    for one, other in zip(padded_state, state, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    output.sum().backward()
    for x in padded.values():
        assert torch.isfinite(x.grad).all() and not x.grad[:, :pads].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [6, 64, 200])
def test_any_mask(tokens, causal):
    mask = torch.rand(3, tokens, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[1] = False  # a row without real tokens
    agree(oracle.make(3, tokens, 2, 8, 6), key_mask=mask, causal=causal)


CUTS = [[0, 100], [0, 0, 100], [0, 63, 64, 65, 100], [0, 1, 2, 2, 2, 50, 99, 100, 100, 100], [0, 64, 100]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", CUTS)
def test_segments_equal_separate_calls(bounds, causal):
    inputs = oracle.make(1, 100, 2, 8, 6)
    agree(inputs, cu_seqlens=torch.tensor(bounds), causal=causal)
    output, state = additive_scan(
        **inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), causal=causal, return_state=True
    )
    for i, (begin, end) in enumerate(pairwise(bounds)):
        piece = {name: x if name == "theta" else x[:, begin:end] for name, x in inputs.items()}
        one, one_state = additive_scan(**piece, causal=causal, return_state=True)
        assert oracle.relative(output[:, begin:end], one) < 1e-12
        for whole, part in zip(state, one_state, strict=True):
            torch.testing.assert_close(whole[i : i + 1], part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_segments_do_not_see_each_other(causal):
    inputs = oracle.make(1, 150, 2, 16, 8)
    cu_seqlens = torch.tensor([0, 77, 150])
    leaves = oracle.cast(inputs, torch.float32)
    output = additive_scan(**leaves, cu_seqlens=cu_seqlens, causal=causal)
    changed = {name: x.detach().clone() for name, x in leaves.items()}
    changed["key"][:, 30] += 50
    changed["value"][:, 30] -= 3
    other = additive_scan(**changed, cu_seqlens=cu_seqlens, causal=causal)
    assert oracle.relative(other[:, 77:], output[:, 77:].detach()) < 1e-6
    assert oracle.relative(other[:, :77], output[:, :77].detach()) > 1e-2
    output[:, 77:].square().sum().backward()
    for name in ("query", "key", "value"):
        assert not leaves[name].grad[:, :77].any() and leaves[name].grad[:, 77:].any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=5), st.integers(0, 2**16), st.booleans())
def test_any_cut_with_any_mask(lengths, seed, causal):
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(1, tokens, generator=torch.Generator().manual_seed(seed)) > 0.2
    options = {"cu_seqlens": cu_seqlens, "key_mask": mask, "causal": causal}
    inputs = oracle.make(1, tokens, 1, 4, 3, seed=seed)
    wanted = additive_scan(**inputs, **options, backend="reference")
    torch.testing.assert_close(additive_scan(**inputs, **options), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_key_gradients_sum_to_zero(causal):
    """sum_r dk_r = 0 per feature and segment: a constant added to a segment's keys changes nothing."""
    inputs = oracle.cast(oracle.make(1, 150, 2, 8, 6), torch.float64)
    output = additive_scan(**inputs, cu_seqlens=torch.tensor([0, 40, 150]), causal=causal)
    (grad,) = torch.autograd.grad(output.square().sum(), inputs["key"])
    for part in (grad[:, :40], grad[:, 40:]):
        assert float(part.sum(1).abs().max() / part.norm()) < 1e-13


def test_frozen_inputs_and_no_grad():
    inputs = oracle.make(1, 20, 1, 8, 6)
    with torch.no_grad():
        assert not additive_scan(**inputs).requires_grad
    for name in oracle.NAMES:
        leaf = inputs[name].clone().requires_grad_()
        additive_scan(**{**inputs, name: leaf}).sum().backward()
        assert leaf.grad is not None
