"""The additive scan of one sequence, written as its definition (LightNet section 3; model-spec 1, 2 and 4).

This is the specification every backend is held against: run it in float64. Shapes: query, key [N, H, D],
value [N, H, Dv], states without their batch axis. `mass` is the key, or the decay in the no-share ablation. O(N^2 D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state import ScanState


def causal_sequence(
    phi: Tensor, mass: Tensor, gain: Tensor, value: Tensor, theta: Tensor | None, initial: ScanState
) -> Tensor:
    """o_t = sum_{r<=t} sum_j phi_tj e^{mass_rj} / s_tj cos((t - r) theta_j) gain_rj v_r, s_t = sum_{r<=t} e^{mass_r},
    both sums begun by the initial state, whose tokens lie before t = 0 with angles reckoned from there."""
    step = torch.arange(len(phi), device=phi.device)
    lag = step[:, None] - step
    start = initial.max.detach()
    peak = torch.cat([start[None], mass.detach()]).cummax(0).values[1:]  # [N, H, D]
    weight = torch.exp((mass - peak[:, None]).masked_fill((lag < 0)[..., None, None], float("-inf")))  # [t, r, H, D]
    entry = torch.exp(start - peak)
    read = phi / (weight.sum(1) + initial.sum * entry)
    if theta is not None:
        weight = weight * (lag.double()[..., None, None] * theta.double()).cos().to(weight.dtype)
    output = torch.einsum("thd,trhd,rhd,rhv->thv", read, weight, gain, value)
    return output + torch.einsum("thd,hdv->thv", _doubled(read * entry, theta, step), initial.kv)


def sequence_state(
    mass: Tensor, gain: Tensor, value: Tensor, theta: Tensor | None, positions: Tensor, length: Tensor
) -> ScanState:
    """m = max_r mass_r, s = sum_r e^{mass_r - m}, kv = sum_r e^{mass_r - m} gain_r v_r^T, angles at `positions`."""
    peak = torch.cat([mass.new_full((1, *mass.shape[1:]), float("-inf")), mass.detach()]).amax(0)
    weight = torch.exp(mass - peak)
    doubled = _doubled(weight * gain, theta, positions)
    return ScanState(peak, weight.sum(0), torch.einsum("rhd,rhv->hdv", doubled, value), length)


def read_state(phi: Tensor, theta: Tensor | None, positions: Tensor, state: ScanState) -> Tensor:
    """Bidirectional output: o_t = sum_j phi_tj / S_j <[cos, sin](n_t theta_j), kv_j>."""
    return torch.einsum("thd,hdv->thv", _doubled(phi / state.sum, theta, positions), state.kv)


def _doubled(x: Tensor, theta: Tensor | None, positions: Tensor) -> Tensor:
    if theta is None:
        return x
    grid = positions if positions.ndim == 2 else positions[:, None]  # [N, axes], each axis turns an equal group
    angle = grid.repeat_interleave(theta.shape[1] // grid.shape[1], dim=1).double()[:, None] * theta.double()
    return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], dim=-1)
