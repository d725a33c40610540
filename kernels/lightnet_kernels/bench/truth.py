"""The scan and its gradients in float64 as explicit sums over pairs of tokens (model-spec 1 and 2), O(N^2 D).

Written out, not differentiated: it shares no code with the backends, and the parts that cancel in the gradients of key
and theta stay apart, because those errors are measured against the size of the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Truth(NamedTuple):
    output: Tensor
    grads: dict[str, Tensor]
    sizes: dict[str, Tensor]  # what the norm of each gradient's error is divided by


def scan_truth(leaves: dict[str, Tensor], grad: Tensor, causal: bool) -> Truth:
    """`leaves`: query, key [B, N, H, D], value [B, N, H, Dv], maybe theta [H, D]; `grad` [B, N, H, Dv]; all of any
    dtype and taken as exact. SiLU on the query.

    dphi_tj = sum_r w_trj c_trj g_tr with w = e^k / s, c = cos((t - r) theta), g = <do_t, v_r>;
    dk_rj = sum_t (phi_tj c_trj g_tr - phi_tj dphi_tj) w_trj; dtheta_j = -sum_tr (t - r) phi w g sin((t - r) theta).
    """
    query, key, value, upstream = (x.detach().double() for x in (*(leaves[n] for n in ("query", "key", "value")), grad))
    theta = leaves["theta"].detach().double() if "theta" in leaves else None
    batch, tokens, heads, width = query.shape
    step = torch.arange(tokens, device=query.device, dtype=torch.float64)
    lag = step[:, None] - step
    output = torch.empty_like(value)
    grads = {name: torch.zeros_like(x) for name, x in (("query", query), ("key", key), ("value", value))}
    parts = {"key": [torch.zeros_like(key) for _ in range(2)]}
    if theta is not None:
        grads["theta"] = torch.zeros_like(theta)
        parts["theta"] = [torch.zeros_like(theta) for _ in range(2)]
    for row in range(batch):
        for head in range(heads):
            at = (row, slice(None), head)
            q, k, v, do = query[at], key[at], value[at], upstream[at]
            slope = torch.sigmoid(q)
            phi = q * slope
            peak = k.cummax(0).values if causal else k.amax(0, keepdim=True)
            weight = k - peak[:, None]  # [t or 1, r, D]
            if causal:
                weight = weight.masked_fill((lag < 0)[..., None], -torch.inf)
            weight = weight.exp_()
            weight = (weight / weight.sum(1, keepdim=True)).expand(tokens, tokens, width)
            turned = weight if theta is None else weight * (lag[..., None] * theta[head]).cos()
            score = torch.einsum("tj,trj->tr", phi, turned)
            output[at], grads["value"][at] = score @ v, score.T @ do
            product = do @ v.T
            read = torch.einsum("trj,tr->tj", turned, product)
            grads["query"][at] = read * slope * (1 + q * (1 - slope))
            parts["key"][0][at] = torch.einsum("tj,trj,tr->rj", phi, turned, product)
            parts["key"][1][at] = -torch.einsum("tj,trj->rj", phi * read, weight)
            if theta is not None:
                torque = weight * (lag[..., None] * theta[head]).sin() * product[..., None] * phi[:, None]
                parts["theta"][0][head] -= step @ torque.sum(1)
                parts["theta"][1][head] += step @ torque.sum(0)
    for name, terms in parts.items():
        grads[name] = terms[0] + terms[1]
    sizes = {name: x.norm() for name, x in grads.items()}
    for name, terms in parts.items():
        sizes[name] = sizes[name] + terms[0].norm() + terms[1].norm()
    return Truth(output, grads, sizes)


def relative(actual: Tensor, wanted: Tensor, size: Tensor | None = None) -> float:
    """Norm of the error over `size` (default: the norm of what is wanted); inf where a value is not finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    error = (actual.detach().double() - wanted).norm()
    size = wanted.norm() if size is None else size
    return 0.0 if float(error) == 0 else float(error / size)
