"""Modulated norms and gated sums beside formulas of their own in float64: outputs and all gradients, at any backend."""

import torch
from lightnet_kernels import gated_add, gated_add_norm, modulated_norm

from .companion_table import as_leaf, compare, definition, draw, norm_weights, stored


def vectors(samples, width, dtype, device, stacked=True):
    """gate, shift, scale [B, W]: rows of one table [B, 3, W], as a model's are, or tensors of their own."""
    table = 0.5 * draw(samples, 3, width, seed=7, dtype=torch.float32)
    found = table.to(dtype).to(device).unbind(1)
    return dict(zip(("gate", "shift", "scale"), found if stacked else [x.clone() for x in found], strict=True))


def check_modulation(
    kind, shape, dtype, device="cpu", backend="triton", flat=False, branch_dtype=None, stacked=True,
    grad_layout=lambda x: x,
):  # fmt: skip
    """Tensors [B, N, W], or with ``flat`` [1, B N, W]: the norm, the gated sum with its norm, and the sum alone."""
    samples, tokens, width = shape
    second = branch_dtype or dtype
    common = torch.promote_types(dtype, second)
    outer = (1, samples * tokens, width) if flat else shape
    weights = norm_weights(kind, width, dtype, device)
    leaves = {
        "x": as_leaf(draw(*outer, dtype=dtype, device=device), lambda x: x),
        "branch": as_leaf(draw(*outer, seed=2, dtype=second, device=device), lambda x: x),
        **{n: as_leaf(x, lambda x: x) for n, x in vectors(samples, width, dtype, device, stacked).items()},
        **{n: as_leaf(x, lambda x: x) for n, x in weights.items()},
    }
    upstream = [grad_layout(draw(*outer, seed=seed, dtype=common, device=device)) for seed in (3, 4)]
    options = {"kind": kind, "eps": 1e-5, "backend": backend}

    def per_token(x):
        return x.repeat_interleave(tokens, 0).view(outer)

    def modulated(x, shift, scale, weight=None, bias=None):
        return definition(x, weight, bias, kind, 1e-5) * (1 + per_token(scale)) + per_token(shift)

    def some(*names):
        return {n: x for n, x in leaves.items() if n in names}

    norms = ("shift", "scale", *weights)
    given = some("x", *norms)
    out = modulated_norm(**given, **options)
    compare(given, [out], [upstream[0].to(dtype)], lambda **x: [modulated(**x)], [dtype])

    def both(x, branch, gate, **others):
        total = stored(x + per_token(gate) * branch, common)
        return [total, modulated(total, **others)]

    actual = gated_add_norm(**leaves, **options)
    compare(leaves, list(actual), upstream, both, [common, common])
    given = some("x", "branch", "gate")
    summed = gated_add(**given, backend=backend)
    compare(given, [summed], upstream[:1], lambda x, branch, gate: [x + per_token(gate) * branch], [common])
