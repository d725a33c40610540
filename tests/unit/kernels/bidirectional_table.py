"""One table of the bidirectional Triton scan for two places: a GPU (tests/gpu) and, at small sizes, the interpreter.

The reference backend in float64, on the same rounded inputs, says what is right: `test_kernels_scan` holds it against
the definition.
"""

import torch
from lightnet_kernels import additive_scan

from .kernel_oracle import expected, random_state, relative
from .triton_table import TOLERANCE, rounded

FIELDS = ("max", "sum", "kv")


def check(
    inputs, dtype, device, *, wanted_by="reference", layout=lambda name, x: x, upstream=None, state=None, **options
):
    """Output and every gradient. `state`: continue from a random state and compare the state after all tokens, too."""
    leaves, exact = rounded(inputs, dtype)
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(inputs["value"].shape, generator=generator).to(dtype)
    grad = upstream(grad) if upstream else grad
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    leaves = {name: layout(name, x.to(device)).requires_grad_() for name, x in leaves.items()}
    exact = {name: x.to(device).requires_grad_() for name, x in exact.items()}
    one = run(leaves, grad.to(device), "triton", state, **options)
    two = run(exact, grad.to(device).double(), wanted_by, state, **options)
    assert one["output"].dtype == dtype
    # Terms cancel in the gradients of key and theta (altogether, where a token is alone): measured beside the others'.
    terms = max(float(two[name].double().norm()) for name in ("query", "value"))
    places = options.get("coordinates")
    reach = inputs["key"].shape[1] if places is None else max(1, int(places.abs().max()))
    sizes = {}
    if not options and state is None and inputs["key"].numel() * inputs["key"].shape[1] < 10**7:
        exact_cpu = {name: x.detach().cpu() for name, x in exact.items()}
        sizes = expected(exact_cpu, grad.double(), causal=False)[2]  # of the terms themselves
    for name, wanted in two.items():
        extra = {"key": terms, "theta": terms * min(reach, 256)}.get(name, 0.0)
        tolerance = TOLERANCE[dtype][0 if name in ("output", *FIELDS, "length") else 1]
        size = sizes[name].to(device) if name in sizes else wanted.double().norm() + extra
        assert relative(one[name].double(), wanted.double(), size) < tolerance, name
    if "key_mask" in options:
        hidden = ~options["key_mask"]
        for name in ("output", "query", "key", "value"):
            assert not one[name][hidden].any(), name
    return one


def run(leaves, grad, backend, state, **options):
    results = {}
    extra = []
    if state is not None:
        state = type(state)(*(x.to(grad.device, grad.dtype if x.is_floating_point() else x.dtype) for x in state))
        if grad.dtype != torch.float64:
            state = type(state)(*(x.float() if x.is_floating_point() else x for x in state))
        state = state._replace(sum=state.sum.requires_grad_(), kv=state.kv.requires_grad_())
        extra = [state.sum, state.kv]
        output, last = additive_scan(
            **leaves, causal=False, backend=backend, initial_state=state, return_state=True, **options
        )
        results.update(zip(FIELDS, (torch.nan_to_num(x, neginf=0.0) for x in last[:3]), strict=True))
        results["length"] = last.length
        loss = (output * grad).sum() + last.sum.sin().sum() + last.kv.sin().sum()
    else:
        output = additive_scan(**leaves, causal=False, backend=backend, **options)
        loss = None
    inputs = [*leaves.values(), *extra]
    grads = torch.autograd.grad(output, inputs, grad) if loss is None else torch.autograd.grad(loss, inputs)
    results["output"] = output
    results.update(zip([*leaves, "initial sum", "initial kv"], grads, strict=False))
    return {name: x.detach() for name, x in results.items()}


def started(sequences, heads, width, value_width, lrpe=True):
    return random_state(sequences, heads, width, value_width, lrpe=lrpe)


def grid(tokens, axes, prefix=1):
    """Places on a grid of `axes` axes, after some tokens at 0."""
    side = 1
    while side**axes < tokens:
        side += 1
    index = torch.arange(tokens - prefix)
    places = torch.stack([index // side**axis % side for axis in range(axes)], 1) + 1
    return torch.cat([torch.zeros(prefix, axes, dtype=torch.int64), places])


def masked(batch, tokens, seed=5):
    """Real tokens here and there; none at all in the first row."""
    mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[0] = False
    return mask


def check_slices(inputs, dtype, device, **options):
    """Query, key and value as slices of one projection; one upstream gradient for all tokens."""
    joined = torch.stack([inputs[name] for name in ("query", "key", "value")], 3).to(dtype).to(device)

    def layout(name, x):
        return x if name == "theta" else joined[..., ("query", "key", "value").index(name), :].detach()

    check(inputs, dtype, device, layout=layout, upstream=lambda x: x[:, :1].expand_as(x), **options)


def check_bits(shape, dtype, device, runs):
    """Runs of a call [B, N, H, D] with its gradients give the same bits; those after the second repeat a recording."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4))
    theta = torch.rand(shape[2:], generator=generator, device=device)
    leaves = [x.requires_grad_() for x in (query, key, value, theta)]
    found = []
    for _ in range(runs):
        output = additive_scan(query, key, value, theta=theta, causal=False, backend="triton")
        found.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
    assert all(torch.equal(one, two) for each in found[1:] for one, two in zip(found[0], each, strict=True))
