"""One table of the Triton scan for two places: a GPU (tests/gpu) and, at small sizes, Triton's interpreter."""

from itertools import pairwise

import torch
from lightnet_kernels import ScanState, additive_scan, merge_states

from . import kernel_oracle as oracle

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2), torch.float16: (5e-3, 1e-2)}


def rounded(inputs, dtype):
    """Leaves of `dtype` (theta stays float32), and the float64 inputs that they hold exactly."""
    leaves = {name: x.to(torch.float32 if name == "theta" else dtype) for name, x in inputs.items()}
    return leaves, {name: x.double() for name, x in leaves.items()}


def check(inputs, dtype, device, *, layout=lambda name, x: x, grad_layout=lambda x: x):
    """Output and gradients against the definition in float64, on the same rounded inputs."""
    leaves, exact = rounded(inputs, dtype)
    grad_output = torch.randn(inputs["value"].shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    grad_output = grad_layout(grad_output)
    wanted, grads, sizes = oracle.expected(exact, grad_output.double())
    leaves = {name: layout(name, x.to(device)).requires_grad_() for name, x in leaves.items()}
    upstream = grad_layout(grad_output.to(device))
    output = additive_scan(**leaves, backend="triton")
    assert output.dtype == dtype
    assert oracle.relative(output.cpu(), wanted) < TOLERANCE[dtype][0]
    actual = dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), upstream), strict=True))
    for name, grad in actual.items():
        assert oracle.relative(grad.cpu(), grads[name], sizes[name]) < TOLERANCE[dtype][1], name
    if dtype == torch.float32:  # adding a constant to all keys changes nothing
        assert float(actual["key"].sum(1).norm()) < 1e-4 * float(sizes["key"])


def spiked(inputs, height):
    """Keys that climb by `height` nats inside one block of tokens, in some features twice."""
    tokens = inputs["key"].shape[1]
    inputs["key"][:, tokens // 3] += height
    inputs["key"][:, tokens // 3 + 1, :, ::2] += 2 * height
    return inputs


def forget():
    """Tables and recordings of calls by rules that have been changed since."""
    from lightnet_kernels import triton_replay, triton_shape, triton_tables

    triton_tables.tables.cache_clear()
    triton_shape.Shape.of.cache_clear()
    triton_replay._recordings.clear()
    triton_replay._layouts.clear()


def check_segments(lengths, dtype, device, *, heads=2, width=24, value_width=20, theta=True, lift=0.0):
    """Packed segments are the segments one by one, with gradients. lift: nats by which some keys rise, each by another part of
    it, from a third of the tokens on."""
    inputs = oracle.make(1, sum(lengths), heads, width, value_width, theta=theta)
    inputs["key"][:, sum(lengths) // 3 :] += lift * torch.arange(width) / width
    leaves, _ = rounded(inputs, dtype)
    leaves = {name: x.to(device).requires_grad_() for name, x in leaves.items()}
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    grad = torch.randn(inputs["value"].shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    packed = additive_scan(**leaves, cu_seqlens=bounds.to(device), backend="triton")
    actual = torch.autograd.grad(packed, list(leaves.values()), grad)
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    wanted = additive_scan(**double, cu_seqlens=bounds.to(device), backend="torch")
    expected = torch.autograd.grad(wanted, list(double.values()), grad.double())
    assert oracle.relative(packed, wanted) < TOLERANCE[dtype][0]
    terms = expected[0].norm()  # dkey and dtheta are 0 in a segment of one token: as large as the terms that cancel
    for name, one, two in zip(leaves, actual, expected, strict=True):
        size = two.norm() + (terms if name in ("key", "theta") else 0.0)
        assert oracle.relative(one, two, size) < TOLERANCE[dtype][1], name


def check_states(cuts, dtype, device, *, theta=True):
    """A sequence in parts, each continuing the last one's state, is the sequence; so is its state."""
    inputs = oracle.make(2, sum(cuts), 2, 24, 20, theta=theta)
    leaves, exact = rounded(inputs, dtype)
    leaves = {name: x.to(device) for name, x in leaves.items()}
    angles = leaves.pop("theta", None)
    exact_angles = exact.pop("theta", None)
    wanted, last = additive_scan(**exact, theta=exact_angles, return_state=True, backend="torch")
    state, start, outputs = None, 0, []
    for size in cuts:
        part = {name: x[:, start : start + size] for name, x in leaves.items()}
        output, state = additive_scan(**part, theta=angles, initial_state=state, return_state=True, backend="triton")
        outputs.append(output)
        start += size
    tolerance = TOLERANCE[dtype][0]
    assert oracle.relative(torch.cat(outputs, 1).cpu(), wanted) < tolerance
    assert isinstance(state, ScanState)
    for name, one, two in zip(ScanState._fields, state, last, strict=True):
        assert oracle.relative(one.cpu().double(), two.double()) < tolerance, name


class Line:
    """An exchange over ranks that are run one after another in one process: what arrives goes on from each to the next."""

    def __init__(self, theta, sequences):
        self.theta, self.arriving, self.continues, self.sequences = theta, None, False, sequences

    def prefix(self, state):
        sequences = state.max.shape[0]
        identity = ScanState(
            torch.full_like(state.max, -torch.inf),
            torch.zeros_like(state.sum),
            torch.zeros_like(state.kv),
            0 * state.length,
        )
        whole = sequences == self.sequences > 1  # rows of a batch: all of them go on
        found, after = identity, state
        if self.continues:
            if whole:
                found = self.arriving
            else:
                found = ScanState(*(torch.cat([a, b[1:]]) for a, b in zip(self.arriving, identity, strict=True)))
            after = merge_states(found, state, self.theta)
        self.arriving = after if whole else ScanState(*(x[-1:] for x in after))
        return found


def check_ranks(parts, dtype, device, *, batch=1, ends=(), heads=2, width=24, value_width=20, theta=True, lift=()):
    """A batch of rows (or one row of segments that end at `ends`) over ranks of so many tokens is the whole: output and every
    gradient. `lift`: nats that each rank's keys lie above the others."""
    tokens = sum(parts)
    inputs = oracle.make(batch, tokens, heads, width, value_width, theta=theta)
    edges = [0, *torch.tensor(parts).cumsum(0).tolist()]
    for begin, end, height in zip(edges, edges[1:], lift, strict=False):
        inputs["key"][:, begin:end] += height
    leaves, _ = rounded(inputs, dtype)
    leaves = {name: x.to(device).requires_grad_() for name, x in leaves.items()}
    angles = leaves.get("theta")
    grad = torch.randn(inputs["value"].shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    line, outputs = Line(angles, batch), []
    for begin, end in pairwise(edges):
        part = {name: x[:, begin:end] for name, x in leaves.items() if name != "theta"}
        inner = [x - begin for x in ends if begin < x < end]
        bounds = torch.tensor([0, *inner, end - begin]).int() if ends else None
        line.continues = begin > 0 and begin not in ends
        outputs.append(additive_scan(**part, theta=angles, cu_seqlens=bounds, exchange=line, backend="triton"))
    output = torch.cat(outputs, 1)
    actual = torch.autograd.grad(output, list(leaves.values()), grad)
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    bounds = torch.tensor([0, *ends, tokens]).int() if ends else None
    wanted = additive_scan(**double, cu_seqlens=bounds, backend="torch")
    expected = torch.autograd.grad(wanted, list(double.values()), grad.double())
    assert oracle.relative(output, wanted) < TOLERANCE[dtype][0]
    terms = expected[0].norm()
    for name, one, two in zip(leaves, actual, expected, strict=True):
        size = two.norm() + (terms if name in ("key", "theta") else 0.0)
        assert oracle.relative(one, two, size) < TOLERANCE[dtype][1], name
