"""Queries, keys and values as one tensor against the same as three."""

from __future__ import annotations

from typing import Any

import torch
from lightnet_kernels import additive_scan

from .kernel_oracle import make

# causal, tokens, width, options
CASES: dict[str, tuple[bool, int, int, dict[str, Any]]] = {
    "causal": (True, 70, 32, {}),
    "causal without LRPE": (True, 70, 48, {"theta": False}),
    "causal, one token": (True, 1, 32, {}),
    "causal, no token": (True, 0, 32, {}),
    "causal, spans": (True, 700, 16, {}),
    "causal, segments": (True, 90, 32, {"cu_seqlens": (0, 1, 64, 64, 90)}),
    "causal, states": (True, 70, 32, {"states": True}),
    "bidirectional": (False, 70, 72, {}),
    "bidirectional, pieces": (False, 150, 72, {"theta": False}),
    "bidirectional, segments": (False, 90, 32, {"cu_seqlens": (0, 1, 64, 64, 90)}),
    "bidirectional, states": (False, 70, 32, {"states": True}),
}


def run(name: str, joint: bool, dtype: torch.dtype, device: str, backend: str) -> dict[str, torch.Tensor]:
    """Outputs and gradients."""
    causal, tokens, width, options = CASES[name]
    options = dict(options)
    states, bounds = options.pop("states", False), options.pop("cu_seqlens", None)
    batch = 1 if bounds else 2
    inputs = make(batch, tokens, 2, width, width, **{"theta": True, **options})
    packed = torch.stack([inputs[x] for x in ("query", "key", "value")], 3).to(device, dtype).requires_grad_()
    theta = inputs.get("theta")
    theta = None if theta is None else theta.float().to(device).requires_grad_()
    more: dict[str, Any] = {"cu_seqlens": None if bounds is None else torch.tensor(bounds)}
    if states:
        with torch.no_grad():
            _, more["initial_state"] = additive_scan(
                packed.flip(1), theta=theta, causal=causal, return_state=True, backend=backend
            )
    given = (packed,) if joint else packed.unbind(3)
    found = additive_scan(*given, theta=theta, causal=causal, return_state=states, backend=backend, **more)
    output, state = found if states else (found, None)
    upstream = torch.linspace(-1, 1, output.numel(), device=device).view(output.shape).to(dtype)
    total = (output * upstream).sum() + (0 if state is None else state.kv.square().sum())
    total.backward()
    assert packed.grad is not None and packed.grad.stride() == packed.stride()
    results = {"output": output, "gradient": packed.grad}
    if theta is not None and theta.grad is not None:
        results["theta"] = theta.grad
    return {key: x.detach() for key, x in results.items()}


def check(name: str, dtype: torch.dtype, device: str, backend: str) -> None:
    """The same bits."""
    one, three = (run(name, joint, dtype, device, backend) for joint in (True, False))
    assert one.keys() == three.keys()
    for key, x in one.items():
        assert torch.equal(x, three[key]), key
        assert torch.isfinite(x).all(), key
