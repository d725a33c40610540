"""LRPE: relative positions only, grids, and positions near a million."""

import pytest
import torch
import torch.nn.functional as F
from lightnet_kernels import additive_scan, identity_state, merge_states, shift_state

from . import kernel_oracle as oracle

FAR = 2**20 - 7


def grid(*sizes):
    axes = torch.meshgrid(*(torch.arange(1, size + 1) for size in sizes), indexing="ij")
    return torch.stack([axis.reshape(-1) for axis in axes], -1)


def on_grid(query, key, value, theta, coordinates):
    """fp64 definition: feature j of group a turns with coordinate n_a."""
    axes = coordinates.shape[1]
    width = query.shape[3] // axes
    weight = torch.softmax(key, dim=1)
    output = 0
    for axis in range(axes):
        part = slice(axis * width, (axis + 1) * width)
        lag = (coordinates[:, None, axis] - coordinates[None, :, axis]).double()
        cos = torch.cos(lag[..., None, None] * theta[:, part])  # [t, r, H, D/k]
        output = output + torch.einsum(
            "bthd,brhd,trhd,brhv->bthv", F.silu(query[..., part]), weight[..., part], cos, value
        )
    return output


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sizes", [(50,), (6, 9), (3, 4, 5)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_bidirectional_on_grids(sizes, prefix, backend):
    coordinates = grid(*sizes)
    coordinates = torch.cat([torch.zeros(prefix, len(sizes), dtype=torch.int64), coordinates])
    inputs = oracle.make(2, len(coordinates), 2, 12, 8)
    generator = torch.Generator().manual_seed(4)
    inputs["theta"] = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    results = []
    for run in (
        lambda **leaves: additive_scan(**leaves, coordinates=coordinates, causal=False, backend=backend),
        lambda **leaves: on_grid(**leaves, coordinates=coordinates),
    ):
        leaves = oracle.cast(inputs, torch.float64)
        output = run(**leaves)
        results.append([output, *torch.autograd.grad(output.sin().sum(), list(leaves.values()))])
    for one, other in zip(*results, strict=True):
        assert oracle.relative(one, other) < 1e-10
    single = {name: x.float() for name, x in inputs.items()}
    output = additive_scan(**single, coordinates=coordinates, causal=False, backend=backend)
    assert oracle.relative(output, results[1][0]) < 1e-5


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sizes", [(70,), (8, 9), (3, 4, 6)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_tokens_in_another_order_with_their_coordinates_give_that_order(sizes, prefix, backend):
    """Output and gradients; that coordinates matter at all is seen by leaving them in place."""
    coordinates = torch.cat([torch.zeros(prefix, len(sizes), dtype=torch.int64), grid(*sizes)])
    inputs = oracle.make(2, len(coordinates), 2, 12, 8)
    inputs["theta"] = torch.rand(2, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    order = torch.randperm(len(coordinates), generator=torch.Generator().manual_seed(5))

    def run(tokens, places):
        leaves = {
            name: x if name == "theta" else x[:, tokens] for name, x in oracle.cast(inputs, torch.float64).items()
        }
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        output = additive_scan(**leaves, coordinates=places, causal=False, backend=backend)
        upstream = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)[tokens, None, None]
        return [output, *torch.autograd.grad((output.sin() * upstream).sum(), list(leaves.values()))]

    still = run(torch.arange(len(order)), coordinates)
    moved = run(order, coordinates[order])
    for one, other in zip(moved[:-1], still[:-1], strict=True):
        assert oracle.relative(one, other[:, order]) < 1e-10
    assert oracle.relative(moved[-1], still[-1]) < 1e-10
    assert oracle.relative(run(order, coordinates)[0], still[0][:, order]) > 1e-2


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": torch.tensor([0, 10, 10, 60])}, {"key_mask": "odd"}])
def test_coordinates_with_segments_and_masks(options):
    inputs = oracle.make(1, 60, 2, 8, 6)
    if "key_mask" in options:
        options = {"key_mask": (torch.arange(60) % 3 > 0)[None]}
    results = []
    for backend in ("torch", "reference"):
        leaves = oracle.cast(inputs, torch.float64)
        output, state = additive_scan(
            **leaves, coordinates=grid(6, 10), causal=False, return_state=True, backend=backend, **options
        )
        loss = output.sin().sum() + state.kv.sin().sum()
        results.append([output, state.kv, state.sum, *torch.autograd.grad(loss, list(leaves.values()))])
    for one, other in zip(*results, strict=True):
        assert oracle.relative(one, other) < 1e-10


@pytest.mark.parametrize("far", [1000, FAR])
def test_only_relative_position_counts(far):
    inputs = oracle.make(1, 70, 2, 8, 6)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        typed = {name: x.to(dtype) for name, x in inputs.items()}
        near = additive_scan(**typed, coordinates=torch.arange(70), causal=False)
        assert oracle.relative(additive_scan(**typed, causal=False), near.double()) < tolerance
        moved = additive_scan(**typed, coordinates=torch.arange(70) + far, causal=False)
        assert oracle.relative(moved, near.double()) < tolerance
    _, state = additive_scan(**inputs, return_state=True)
    # Causally: forty tokens of no weight before the sequence move nothing.
    silent = {name: F.pad(x, (0, 0, 0, 0, 40, 0)) for name, x in inputs.items() if name != "theta"}
    silent["key"][:, :40] = -1e4
    output, shifted = additive_scan(**silent, theta=inputs["theta"], return_state=True)
    assert oracle.relative(output[:, 40:], additive_scan(**inputs)) < 1e-12
    assert oracle.relative(shifted.kv, state.kv) < 1e-12


def test_a_million_tokens_in_one_pass():
    """Causal output and gradients at the far end against a float64 cumulative sum in absolute angles."""
    inputs = oracle.make(1, FAR, 1, 2, 1, scale=1.0)
    theta = torch.tensor([[1.0, 0.003]]).double()
    seen = torch.zeros(1, FAR, 1, 1)
    seen[:, -64:] = 1.0

    double = oracle.cast({**inputs, "theta": theta}, torch.float64)
    phi, weight = F.silu(double["query"]), double["key"].exp()
    angle = torch.arange(FAR).double()[:, None, None] * double["theta"]
    real = (weight * angle.cos() * double["value"]).cumsum(1)
    imag = (weight * angle.sin() * double["value"]).cumsum(1)
    wanted = (phi / weight.cumsum(1) * (angle.cos() * real + angle.sin() * imag)).sum(-1, keepdim=True)
    wanted_grads = torch.autograd.grad((wanted * seen).sum(), list(double.values()))

    single = oracle.cast({**inputs, "theta": theta}, torch.float32)
    output = additive_scan(**single)
    grads = torch.autograd.grad((output * seen).sum(), list(single.values()))
    assert oracle.relative(output[:, -64:], wanted[:, -64:]) < 1e-3
    for name, one, other in zip(double, grads, wanted_grads, strict=True):
        assert oracle.relative(one, other) < 1e-3, name


@pytest.mark.parametrize("piece", [512, 4096])
def test_many_pieces_do_not_drift(piece):
    """A quarter of a million tokens in pieces, the first one the heaviest, in float32 against one float64 pass."""
    tokens = 2**18
    inputs = oracle.make(1, tokens, 1, 4, 1, scale=1.0)
    inputs["theta"] = torch.tensor([[1.0, 0.3, 0.01, 1e-4]]).double()
    inputs["key"][:, 0] += 15
    inputs = {name: x.float() for name, x in inputs.items()}
    with torch.no_grad():
        wanted, whole = additive_scan(**{name: x.double() for name, x in inputs.items()}, return_state=True)
        state = None
        for begin in range(0, tokens, piece):
            part = {name: x if name == "theta" else x[:, begin : begin + piece] for name, x in inputs.items()}
            output, state = additive_scan(**part, initial_state=state, return_state=True)
    assert state.kv.dtype == torch.float32
    assert oracle.relative(output, wanted[:, -piece:]) < 1e-5
    assert oracle.relative(state.kv, whole.kv) < 1e-5


def test_states_a_million_tokens_apart():
    inputs = oracle.make(1, 10, 1, 8, 6)
    _, left = additive_scan(**inputs, return_state=True)
    _, right = additive_scan(**oracle.make(1, 5, 1, 8, 6, seed=1), return_state=True)
    far = torch.tensor([FAR - 5])
    gap = identity_state(1, 1, 8, 6, lrpe=True)._replace(length=far)
    theta = inputs["theta"].float()
    single = [type(x)(*(y.float() for y in x[:3]), x.length) for x in (left, right)]
    merged = merge_states(merge_states(single[0], gap, theta), single[1], theta)
    wanted = merge_states(shift_state(left, far, inputs["theta"]), right, inputs["theta"])
    assert int(merged.length) == FAR + 10
    assert oracle.relative(merged.kv, wanted.kv) < 1e-6
    # Reading it: one more token.
    token = oracle.make(1, 1, 1, 8, 6, seed=2)
    one = additive_scan(**{name: x.float() for name, x in token.items()}, initial_state=merged)
    two = additive_scan(**token, initial_state=wanted)
    assert oracle.relative(one, two) < 1e-5
