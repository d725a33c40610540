"""One table of the scan's companions for two places: a GPU (tests/gpu) and, at small sizes, Triton's interpreter.

Everything is measured against formulas of their own in float64 on the same rounded inputs: outputs and all gradients.
"""

import torch
import torch.nn.functional as F
from lightnet_kernels import add_norm, gated_norm, linear_cross_entropy, norm, norm_beside, swiglu
from torch.utils.checkpoint import checkpoint

from .kernel_oracle import relative

# What one rounding can do at worst; in float32 a few.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 1e-12}
KINDS = ["srms", "rms", "layer"]


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def check_compiled_and_checkpointed(call, leaves):
    """The same bits, output and gradients, by torch.compile without a break and under activation checkpointing."""
    results = []
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for run in (call, compiled, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def definition(x, weight, bias, kind, eps):
    """[.., W] and [W], or [.., H, D] and [H, D]."""
    y = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = y / (y.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def stored(exact, dtype):
    """What a tensor of `dtype` holds of `exact`, with the gradient of `exact`."""
    return exact + (exact.to(dtype).double() - exact).detach()


def norm_weights(kind, size, dtype, device="cpu"):
    weight = 1 + 0.3 * draw(size, seed=11, dtype=torch.float32) if kind != "srms" else None
    bias = draw(size, seed=12) if kind == "layer" else None
    return {n: x.to(dtype).to(device) for n, x in (("weight", weight), ("bias", bias)) if x is not None}


def compare(leaves, actual, upstream, wanted_of, dtypes=None, tolerance=None):
    """Outputs, dtypes and every gradient. `actual`: outputs from `leaves`; `wanted_of`: float64 leaves to outputs."""
    exact = {name: x.detach().double().cpu().requires_grad_() for name, x in leaves.items()}
    wanted = wanted_of(**exact)
    for i, (one, two) in enumerate(zip(actual, wanted, strict=True)):
        assert dtypes is None or one.dtype == dtypes[i], (i, one.dtype)
        assert relative(one.detach().cpu(), two.detach()) < (tolerance or TOLERANCE[one.dtype]), f"output {i}"
    grads = torch.autograd.grad(actual, list(leaves.values()), upstream)
    expected = torch.autograd.grad(wanted, list(exact.values()), [g.double().cpu() for g in upstream])
    for name, one, two in zip(leaves, grads, expected, strict=True):
        assert one.dtype == leaves[name].dtype and one.shape == leaves[name].shape
        if two.numel():
            assert relative(one.cpu(), two) < (tolerance or TOLERANCE[one.dtype]), name
    return grads


def as_leaf(x, layout):
    return layout(x).detach().requires_grad_()


def check_norm(kind, shape, dtype, device="cpu", backend="triton", layout=lambda x: x, grad_layout=lambda x: x):
    """x [.., W]: alone, and with a residual."""
    weights = norm_weights(kind, shape[-1], dtype, device)
    leaves = {
        "x": as_leaf(draw(*shape, dtype=dtype, device=device), layout),
        **{n: as_leaf(w, lambda x: x) for n, w in weights.items()},
    }
    upstream = grad_layout(draw(*shape, seed=1, dtype=dtype, device=device))

    def wanted(x, weight=None, bias=None):
        return [definition(x, weight, bias, kind, 1e-5)]

    compare(leaves, [norm(**leaves, kind=kind, eps=1e-5, backend=backend)], [upstream], wanted, [dtype])


def check_add_norm(
    kind, shape, dtype, device="cpu", backend="triton", layout=lambda x: x, grad_layout=lambda x: x, residual_dtype=None
):  # fmt: skip
    second = residual_dtype or dtype
    common = torch.promote_types(dtype, second)
    leaves = {
        "x": as_leaf(draw(*shape, dtype=dtype, device=device), layout),
        "residual": as_leaf(draw(*shape, seed=2, dtype=second, device=device), layout),
        **{n: as_leaf(w, lambda x: x) for n, w in norm_weights(kind, shape[-1], dtype, device).items()},
    }
    upstream = [grad_layout(draw(*shape, seed=seed, dtype=common, device=device)) for seed in (3, 4)]

    def wanted(x, residual, weight=None, bias=None):
        total = stored(x + residual, common)
        return [total, definition(total, weight, bias, kind, 1e-5)]

    actual = add_norm(**leaves, kind=kind, eps=1e-5, backend=backend)
    compare(leaves, list(actual), upstream, wanted, [common, common])


def check_gated_norm(
    kind, shape, dtype, device="cpu", backend="triton", layout=lambda x: x, grad_layout=lambda x: x
):  # fmt: skip
    heads, width = shape[-2:]
    leaves = {
        "x": as_leaf(draw(*shape, dtype=dtype, device=device), layout),
        "gate": as_leaf(2 * draw(*shape, seed=2, dtype=dtype, device=device), layout),
        **{n: as_leaf(w, lambda x: x) for n, w in norm_weights(kind, heads * width, dtype, device).items()},
    }
    upstream = grad_layout(draw(*shape, seed=3, dtype=dtype, device=device))

    def wanted(x, gate, weight=None, bias=None):
        weight, bias = (None if w is None else w.view(heads, width) for w in (weight, bias))
        return [definition(x, weight, bias, kind, 1e-5) * torch.sigmoid(gate)]

    actual = gated_norm(**leaves, kind=kind, eps=1e-5, backend=backend)
    assert actual.is_contiguous()
    compare(leaves, [actual], [upstream], wanted, [dtype])


def check_swiglu(
    shape, dtype, device="cpu", backend="triton", joined=False, layout=lambda x: x, grad_layout=lambda x: x, up_dtype=None
):  # fmt: skip
    second = up_dtype or dtype
    gate = 3 * draw(*shape, dtype=dtype, device=device)
    up = draw(*shape, seed=1, dtype=second, device=device)
    common = torch.promote_types(dtype, second)
    upstream = grad_layout(draw(*shape, seed=2, dtype=common, device=device))
    if joined:
        leaves = {"gate": as_leaf(torch.cat([gate, up], -1), layout)}
    else:
        leaves = {"gate": as_leaf(gate, layout), "up": as_leaf(up, layout)}

    def wanted(gate, up=None):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return [gate / (1 + torch.exp(-gate)) * up]

    compare(leaves, [swiglu(**leaves, backend=backend)], [upstream], wanted, [common])


def head(tokens, width, rows, vocab_size, dtype=torch.float32, device="cpu"):
    """hidden, weight for logits of standard deviation 2, and labels of which every fifth is ignored."""
    hidden = draw(tokens, width, dtype=dtype, device=device)
    weight = (2 * width**-0.5 * draw(rows, width, seed=1)).to(dtype).to(device)
    labels = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(2))
    labels[::5] = -1 - labels[::5] % 3
    return hidden, weight, labels.to(device)


def loss_definition(hidden, weight, labels, vocab_size, dtype=torch.float64):
    """With logits as a linear layer of `dtype` stores them."""
    logits = stored(hidden @ weight[:vocab_size].T, dtype)
    return F.cross_entropy(logits, labels.clamp(min=-1), ignore_index=-1, reduction="none")


# The gradient to the logits is rounded, and the gradient that is a product of it; the loss is float32.
LOSS_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float64: 1e-6}


def check_linear_cross_entropy(
    tokens, width, rows, vocab_size, dtype, reduction, device="cpu", backend="triton", chunk=4096
):  # fmt: skip
    hidden, weight, labels = head(tokens, width, rows, vocab_size, dtype, device)
    leaves = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()}
    upstream = draw(*(() if reduction == "sum" else (tokens,)), seed=5, device=device)

    def wanted(hidden, weight):
        nll = loss_definition(hidden, weight, labels.cpu(), vocab_size, dtype)
        return [nll.sum() if reduction == "sum" else nll]

    actual = linear_cross_entropy(
        **leaves, labels=labels, vocab_size=vocab_size, reduction=reduction, chunk=chunk, backend=backend
    )
    if reduction == "none":
        assert bool((actual[labels < 0] == 0).all())
    grads = compare(leaves, [actual], [upstream], wanted, [torch.float32], LOSS_TOLERANCE[dtype])
    assert bool((grads[0][labels < 0] == 0).all()) and bool((grads[1][vocab_size:] == 0).all())


def check_norm_beside(kind, shape, dtype, device="cpu", backend="triton"):
    """x [.., W], which is read beside its norm."""
    leaves = {
        "x": as_leaf(draw(*shape, dtype=dtype, device=device), lambda x: x),
        **{n: as_leaf(w, lambda x: x) for n, w in norm_weights(kind, shape[-1], dtype, device).items()},
    }
    upstream = [draw(*shape, seed=seed, dtype=dtype, device=device) for seed in (1, 2)]

    def wanted(x, weight=None, bias=None):
        return [x + 0, definition(x, weight, bias, kind, 1e-5)]

    actual = norm_beside(**leaves, kind=kind, eps=1e-5, backend=backend)
    assert torch.equal(actual[0], leaves["x"])
    compare(leaves, list(actual), upstream, wanted, [dtype, dtype])
    rest = {n: x.detach() for n, x in leaves.items() if n != "x"}
    for place in (0, 1):  # one of the two alone
        leaf = leaves["x"].detach().requires_grad_()
        (found,) = torch.autograd.grad(
            norm_beside(leaf, **rest, kind=kind, eps=1e-5, backend=backend)[place], leaf, upstream[place]
        )
        exact = leaf.detach().double().requires_grad_()
        weights = {"weight": None, "bias": None} | {n: x.double() for n, x in rest.items()}
        alone = definition(exact, **weights, kind=kind, eps=1e-5) if place else exact
        (expected,) = torch.autograd.grad(alone, exact, upstream[place].double())
        assert relative(found.cpu(), expected.cpu()) < TOLERANCE[dtype]
