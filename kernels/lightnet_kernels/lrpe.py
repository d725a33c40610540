"""MD-LRPE: angles and changes of frame (LightNet section 4.2, model-spec 2).

LRPE multiplies weight (t, r, j) by cos((t - r) theta_j). Features are doubled, [x cos, x sin], so that the product of a
query and a key carries the cosine of the difference. Every angle is formed in float64 and only cos and sin are
rounded: in float32, position times theta is off by whole radians at a million tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(theta: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position times theta: positions [...], theta [H, D] -> two tensors [..., H, D] of `dtype`."""
    angle = positions.double()[..., None, None] * theta.double()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def grid_rotation(theta: Tensor, coordinates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for coordinates [N, axes]: equal groups of features follow one axis each -> two [N, H, D]."""
    axes = coordinates.shape[-1]
    per_feature = coordinates.double().repeat_interleave(theta.shape[-1] // axes, dim=-1)
    angle = per_feature[:, None, :] * theta.double()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def double(features: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """[..., D] -> [..., 2D] = [x cos, x sin]; unchanged without tables (no LRPE)."""
    if tables is None:
        return features
    return torch.cat([features * tables[0], features * tables[1]], dim=-1)


def move_origin(kv: Tensor, theta: Tensor, tokens: Tensor) -> Tensor:
    """Move the angle origin of kv [B, H, 2D, Dv] later by tokens [B] (negative: earlier), theta [H, D].

    Done in float64: the same small rotation repeated thousands of times (decoding) would otherwise drift, because the
    rounding of cos and sin is the same each time.
    """
    angle = tokens.double()[:, None, None] * theta.double()
    cos, sin = angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
    real, imag = kv.double().chunk(2, dim=2)
    return torch.cat([cos * real + sin * imag, cos * imag - sin * real], dim=2).to(kv.dtype)
