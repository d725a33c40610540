"""The definition once more, independent of the package, with the terms of each gradient kept apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightnet_kernels import ScanState

NAMES = ("query", "key", "value", "theta")


def make(batch, tokens, heads, width, value_width, *, seed=0, scale=2.0, theta=True, dtype=torch.float32):
    """Random inputs as float64 holding values of `dtype`, with a ladder of angles."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    inputs = {
        "query": draw(batch, tokens, heads, width),
        "key": scale * draw(batch, tokens, heads, width),
        "value": draw(batch, tokens, heads, value_width),
    }
    if theta:
        ladder = 10000.0 ** (-torch.arange(heads * width, dtype=torch.float64) / (heads * width))
        inputs["theta"] = ladder.reshape(heads, width).to(dtype).double()
    return inputs


def random_state(sequences, heads, width, value_width, *, lrpe=True, seed=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float().to(dtype)

    rows = 2 * width if lrpe else width
    return ScanState(
        draw(sequences, heads, width),
        draw(sequences, heads, width).exp(),
        draw(sequences, heads, rows, value_width),
        torch.arange(sequences) + 3,
    )


def definition(query, key, value, theta=None, *, key_in_sum=None, angles=None, causal=True):
    """[B, N, H, ...] in, output out. key_in_sum takes the place of key in s, and the four `angles` that of theta in
    cos(t theta) cos(r theta) + sin(t theta) sin(r theta), so that their gradients are the terms of the true one."""
    key_in_sum = key if key_in_sum is None else key_in_sum
    tokens = query.shape[1]
    step = torch.arange(tokens)
    blocked = (step[:, None] < step)[None, :, :, None, None] & causal
    peak = key.detach().cummax(1).values[:, :, None] if causal else key.detach().amax(1)[:, None, None]
    weight = torch.exp((key[:, None] - peak).masked_fill(blocked, -torch.inf))  # [B, t, r, H, D]
    total = torch.exp((key_in_sum[:, None] - peak).masked_fill(blocked, -torch.inf)).sum(2)
    if theta is not None:
        one, two, three, four = (step.double()[:, None, None] * x for x in angles or (theta,) * 4)
        weight = weight * (one.cos()[:, None] * two.cos() + three.sin()[:, None] * four.sin())
    return torch.einsum("bthd,btrhd,brhv->bthv", F.silu(query) / total, weight, value)


def expected(inputs, grad_output, causal=True):
    """Output, gradients, and for each gradient the size its error is measured against: its norm, and for key and theta,
    whose terms cancel, also that of the terms."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    in_sum = inputs["key"].clone().requires_grad_()
    angles = [inputs["theta"].clone().requires_grad_() for _ in range(4)] if "theta" in inputs else []
    output = definition(**leaves, key_in_sum=in_sum, angles=angles, causal=causal)
    leaves.pop("theta", None)
    grads = torch.autograd.grad(output, [*leaves.values(), in_sum, *angles], grad_output)
    terms = {"key": [grads[1], grads[3]], "theta": grads[4:]}
    gradients = dict(zip(leaves, grads, strict=False))
    sizes = {name: grad.norm() for name, grad in gradients.items()}
    for name in ("key", "theta") if angles else ("key",):
        gradients[name] = sum(terms[name])
        if name == "theta" and inputs["query"].shape[1] > 256:
            # The scan turns within chunks: over long sequences only what remains of cos and sin is its business.
            terms[name] = [terms[name][0] + terms[name][2], terms[name][1] + terms[name][3]]
        sizes[name] = gradients[name].norm() + sum(x.norm() for x in terms[name])
    return output.detach(), gradients, sizes


def relative(actual, wanted, size=None):
    """Norm of the error over `size` (default: the norm of what is wanted)."""
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    assert torch.isfinite(actual).all()
    size = (wanted.double().norm() if size is None else size).detach()
    error = (actual.double() - wanted.double()).norm()
    return 0.0 if error == 0 else float(error.detach() / size)


def cast(inputs, dtype):
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def cat_states(states):
    return ScanState(*(torch.cat(parts) for parts in zip(*states, strict=True)))
