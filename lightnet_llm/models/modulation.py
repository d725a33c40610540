"""Conditioning by adaLN-single (Chen et al. 2023, PixArt-alpha, section 2.3): one projection for all blocks, a table for each.

In place of prefix tokens the condition c [B, width] of a sample, its time step plus its class, gives every block six vectors,
(W silu(c) + b) + the block's own table: shift, scale and gate of the attention, and of the GLU. A block is then

    h = x + gate1 LNA(norm(x) (1 + scale1) + shift1);  out = h + gate2 GLU(norm(h) (1 + scale2) + shift2)

and before the head norm(x) (1 + scale) + shift, with c plus a table of two.
"""

from __future__ import annotations

import torch
from lightnet_kernels import modulate
from torch import Tensor, nn

from ..config.model import ModelConfig
from .parameters import ParameterSpec, declare, normal


def modulation_table(rows: int, width: int) -> nn.Parameter:
    """[rows, width], what a module adds to the condition that all share."""
    spec = ParameterSpec((rows, width), normal(width**-0.5), decay=False)
    return declare(nn.Parameter(torch.zeros(rows, width)), spec)


class FinalModulation(nn.Module):
    """Shift and scale of the final norm's result."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.table = modulation_table(2, config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [B, N, width], or [1, B * N, width], condition [B, width]."""
        shift, scale = (condition[:, None] + self.table).unbind(1)
        return modulate(x, shift, scale)
