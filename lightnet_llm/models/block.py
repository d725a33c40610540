"""The LightNet block: attention and gated linear unit, each on a normed residual stream (model-spec section 4)."""

from __future__ import annotations

from typing import Any

from lightnet_kernels import swiglu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.model import ModelConfig
from .attention import LightNetAttention
from .context import ForwardContext
from .dropout import drop_path, dropout
from .layers import PlainLayers
from .norms import Norm, ResidualNorm


class GatedLinearUnit(nn.Module):
    """GLU(x) = (silu(x W1) * (x W2)) W3, no biases. A width that the ranks do not divide is padded with zeros."""

    def __init__(self, config: ModelConfig, layers: PlainLayers):
        super().__init__()
        std = config.initializer_std
        self.layers_set = layers
        self.gate = layers.column(config.width, config.glu_width, std)
        self.up = layers.column(config.width, config.glu_width, std)
        self.down = layers.row(config.glu_width, config.width, std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] to the same."""
        inside = self.layers_set.enter(x)
        return self.down(swiglu(self.gate(inside), self.up(inside)))


class Block(nn.Module):
    """h = x + LNA(norm(x)); out = h + GLU(norm(h))."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, index: int):
        super().__init__()
        self.index, self.dropout = index, config.dropout
        self.drop_path = config.drop_path * index / max(config.layers - 1, 1)
        self.recompute = False  # whether training computes activations again in the backward pass, to save memory
        self.attention_norm = Norm(config.norm, config.width, config.norm_eps)
        self.attention = LightNetAttention(config, layers)
        self.glu_norm = ResidualNorm(config.norm, config.width, config.norm_eps)
        self.glu = GatedLinearUnit(config, layers)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """[B, N, width] to the same, and the scan state after the last token (None unless asked for)."""
        if self.recompute and self.training and not return_state:
            return checkpoint(self._run, x, context, state, False, use_reentrant=False)
        return self._run(x, context, state, return_state)

    def _run(self, x: Tensor, context: ForwardContext, state: Any, return_state: bool) -> tuple[Tensor, Any]:
        place = 2 * self.index + 1  # place 0 is the embedding
        y, after = self.attention(self.attention_norm(x), context, state, return_state)
        x, inside = self.glu_norm(x, self._dropped(y, context, place))
        return x + self._dropped(self.glu(inside), context, place + 1), after

    def _dropped(self, branch: Tensor, context: ForwardContext, place: int) -> Tensor:
        branch = dropout(branch, self.dropout, context.dropout, place)
        return drop_path(branch, self.drop_path, context.dropout, place)
