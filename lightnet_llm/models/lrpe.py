"""MD-LRPE's frequencies: theta [H, D] (model-spec section 2; paper section 4.2). The scan applies them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.model import ModelConfig
from .layers import PlainLayers
from .parameters import ParameterSpec, declare


def frequency_ladder(config: ModelConfig) -> Tensor:
    """Initial theta, fp32 [heads, head width].

    Each head's features are split into ``axes`` groups. ``across_heads``: theta falls over all heads of an axis;
    ``per_head``: over each head's own features; ``lrpe_frequencies: global`` is the paper's single ladder over groups.
    """
    heads, width, axes = config.heads, config.head_width, config.axes
    groups = 1 if config.lrpe_frequencies == "global" else axes
    size = width // groups  # features of a head that share one ladder
    index = torch.arange(size, dtype=torch.float64).repeat(groups).expand(heads, width)
    if config.lrpe_ladder == "across_heads":
        index = index + size * torch.arange(heads, dtype=torch.float64)[:, None]
        exponent = -2.0 * index / (heads * size)
    else:
        exponent = -2.0 * index / size
    return (config.lrpe_base**exponent).float()


class LRPE(nn.Module):
    """Holds theta; its gradient is scaled by a constant so that it does not set the clipping norm."""

    def __init__(self, config: ModelConfig, layers: PlainLayers):
        super().__init__()
        local = (layers.split(config.heads), config.head_width)
        theta = nn.Parameter(torch.empty(local), requires_grad=config.lrpe_learnable)
        spec = ParameterSpec(
            (config.heads, config.head_width),
            lambda generator, full: full.copy_(frequency_ladder(config)),
            partition_dim=0,
            decay=False,
            keep_fp32=True,
            rate=config.lrpe_rate,
        )
        self.theta = declare(theta, spec)
        self.scale = config.lrpe_gradient_scale

    def forward(self) -> Tensor:
        """theta, fp32 [local heads, head width], with its gradient scaled."""
        if not self.theta.requires_grad or self.scale == 1.0:
            return self.theta
        return self.theta * self.scale + self.theta.detach() * (1.0 - self.scale)
