"""Conditioning by adaLN-single (Chen et al. 2023, PixArt-alpha, section 2.3): one projection for all blocks, a table for each.

In place of prefix tokens the condition c [B, width] of a sample, its time step plus its class, gives every block six vectors,
(W silu(c) + b) + the block's own table: shift, scale and gate of the attention, and of the GLU. A block is then

    h = x + gate1 LNA(norm(x) (1 + scale1) + shift1);  out = h + gate2 GLU(norm(h) (1 + scale2) + shift2)

and before the head norm(x) (1 + scale) + shift, with c plus a table of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.model import ModelConfig
from .block import Block
from .context import ForwardContext
from .layers import PlainLayers
from .parameters import ParameterSpec, declare, normal


def _table(rows: int, width: int) -> nn.Parameter:
    spec = ParameterSpec((rows, width), normal(width**-0.5), decay=False)
    return declare(nn.Parameter(torch.zeros(rows, width)), spec)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (1 + scale) + shift, of x's dtype.

    Args:
        x: [B, N, width], or [1, B * N, width].
        shift, scale: [B, width].
    """
    rows, one = x.view(len(shift), -1, x.shape[-1]), torch.ones((), dtype=x.dtype, device=x.device)
    return torch.addcmul(shift.to(x.dtype)[:, None], rows, one + scale.to(x.dtype)[:, None]).view(x.shape)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x times gate [B, width]; shapes as of :func:`modulate`."""
    return (x.view(len(gate), -1, x.shape[-1]) * gate.to(x.dtype)[:, None]).view(x.shape)


class ModulatedBlock(Block):
    """A block that reads the six vectors of ``context.modulation`` [B, 6, width], the projection of the condition."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, index: int):
        super().__init__(config, layers, index)
        self.table = _table(6, config.width)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """[B, N, width] to the same; these models have no state to read or to return."""
        assert state is None and not return_state
        if self.recompute and self.training:
            return checkpoint(self._modulated, x, context, use_reentrant=False), None
        return self._modulated(x, context), None

    def _modulated(self, x: Tensor, context: ForwardContext) -> Tensor:
        assert context.modulation is not None
        shift1, scale1, gate1, shift2, scale2, gate2 = (context.modulation + self.table).unbind(1)
        place = 2 * self.index + 1
        y, _ = self.attention(modulate(self.attention_norm(x), shift1, scale1), context)
        x, inside = self.glu_norm(x, self._dropped(gated(y, gate1), context, place))
        return x + self._dropped(gated(self.glu(modulate(inside, shift2, scale2)), gate2), context, place + 1)


class FinalModulation(nn.Module):
    """Shift and scale of the final norm's result."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.table = _table(2, config.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x as of :func:`modulate`, condition [B, width]."""
        shift, scale = (condition[:, None] + self.table).unbind(1)
        return modulate(x, shift, scale)
