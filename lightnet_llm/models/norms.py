"""Norms of the block and of the scan's output (model-spec section 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parameters import ParameterSpec, constant, declare


class Norm(nn.Module):
    """Normalise the last dimension: ``srms`` (RMS, no weight), ``rms`` (RMS with weight) or ``layer`` (LayerNorm).

    Statistics are fp32. With ``groups`` > 1 the input is [.., groups, width / groups] and statistics are per group:
    that is the norm after the scan, per head, so tensor parallelism needs no reduction.

    Args:
        kind: srms, rms or layer.
        width: total features of this norm over all tensor-parallel ranks.
        eps: added to the mean square (or variance).
        local_width: features on this rank (weights are split by head where it is less than ``width``).
    """

    def __init__(self, kind: str, width: int, eps: float, local_width: int | None = None):
        super().__init__()
        self.kind, self.eps = kind, eps
        partition = None if local_width is None else 0
        size = width if local_width is None else local_width
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if kind in ("rms", "layer"):
            spec = ParameterSpec((width,), constant(1.0), partition, decay=False)
            self.weight = declare(nn.Parameter(torch.ones(size)), spec)
        if kind == "layer":
            spec = ParameterSpec((width,), constant(0.0), partition, decay=False)
            self.bias = declare(nn.Parameter(torch.zeros(size)), spec)

    def forward(self, x: Tensor) -> Tensor:
        """[.., features] or [.., heads, head width] to the same shape and dtype."""
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if self.kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.view(x.shape[-2:] if self.weight.numel() != x.shape[-1] else (-1,))
        if self.bias is not None:
            y = y + self.bias.view(x.shape[-2:] if self.bias.numel() != x.shape[-1] else (-1,))
        return y.to(x.dtype)
