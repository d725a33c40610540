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

    The rotation is exact to float64 whatever kv's dtype: the same small rotation repeated thousands of times (decoding)
    would otherwise drift, because the rounding of cos and sin is the same each time.
    """
    angle = tokens.double()[:, None, None] * theta.double()
    cos, sin = angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
    real, imag = kv.chunk(2, dim=2)
    if kv.dtype == torch.float64:
        return torch.cat([cos * real + sin * imag, cos * imag - sin * real], dim=2)
    # What float32 leaves of cos and sin is applied as a second, tiny rotation: cheaper than products in float64.
    cos_high, sin_high = cos.to(kv.dtype), sin.to(kv.dtype)
    cos_low = (cos - cos_high.double()).to(kv.dtype).detach()
    sin_low = (sin - sin_high.double()).to(kv.dtype).detach()
    moved_real = torch.addcmul(torch.addcmul(cos_low * real, sin_low, imag), cos_high, real)
    moved_imag = torch.addcmul(torch.addcmul(cos_low * imag, sin_low, real, value=-1), cos_high, imag)
    return torch.cat(
        [torch.addcmul(moved_real, sin_high, imag), torch.addcmul(moved_imag, sin_high, real, value=-1)], dim=2
    )
