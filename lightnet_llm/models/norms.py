"""Norms of the block and of the scan's output (model-spec section 4)."""

from __future__ import annotations

import torch
from lightnet_kernels import add_norm, gated_add_norm, gated_norm, modulated_norm, norm, norm_beside
from torch import Tensor, nn

from .parameters import ParameterSpec, constant, declare


class NormWeights(nn.Module):
    """What the norms share: ``srms`` (RMS, no weight), ``rms`` (RMS with weight) or ``layer`` (LayerNorm).

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
            spec = ParameterSpec((width,), constant(1.0), partition, decay=False, per_token=partition is None)
            self.weight = declare(nn.Parameter(torch.ones(size)), spec)
        if kind == "layer":
            spec = ParameterSpec((width,), constant(0.0), partition, decay=False, per_token=partition is None)
            self.bias = declare(nn.Parameter(torch.zeros(size)), spec)


class Norm(NormWeights):
    """Normalises the last dimension; statistics are fp32."""

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """[.., width] to the same shape and dtype; with shift and scale [B, width] of each sample's tokens modulated."""
        if shift is None or scale is None:
            return norm(x, self.weight, self.bias, kind=self.kind, eps=self.eps)
        return modulated_norm(x, shift, scale, self.weight, self.bias, kind=self.kind, eps=self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x, its norm), of a residual stream that goes on from the x returned: see `norm_beside`."""
        return norm_beside(x, self.weight, self.bias, kind=self.kind, eps=self.eps)


class ResidualNorm(NormWeights):
    """Adds to the residual stream and normalises the sum."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        gate: Tensor | None = None,
        shift: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [.., width] to (x + residual, its norm); with all of gate, shift and scale [B, width] of each
        sample's tokens the residual is gated and the norm modulated."""
        if gate is None or shift is None or scale is None:
            return add_norm(x, residual, self.weight, self.bias, kind=self.kind, eps=self.eps)
        return gated_add_norm(x, residual, gate, shift, scale, self.weight, self.bias, kind=self.kind, eps=self.eps)


class GatedNorm(NormWeights):
    """The norm after the scan, statistics per head (so tensor parallelism needs no reduction), and its gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [.., heads, head width] to norm(x) * sigmoid(gate)."""
        return gated_norm(x, gate, self.weight, self.bias, kind=self.kind, eps=self.eps)
