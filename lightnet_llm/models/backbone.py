"""What all models share: TPE after the embedding, the blocks and the final norm, under one naming scheme."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.model import ModelConfig
from .block import Block
from .context import ForwardContext
from .dropout import dropout
from .layers import PlainLayers
from .norms import Norm
from .parameters import ParameterSpec, constant, declare, normal
from .tpe import ToeplitzEncoding


class Backbone(nn.Module):
    """Parameters ``embedding``, ``tpe``, ``layers.I``, ``norm``; heads add theirs.

    Args:
        embedding: gives the residual stream, by the head's own rule.
    """

    def __init__(self, config: ModelConfig, layers: PlainLayers, embedding: nn.Module):
        super().__init__()
        self.config, self.layers_set = config, layers
        self.embedding = embedding
        self.tpe = ToeplitzEncoding(config) if config.tpe else None
        self.layers = nn.ModuleList([Block(config, layers, index) for index in range(config.layers)])
        self.norm = Norm(config.norm, config.width, config.norm_eps)

    def image_tokens(self, tokens: Tensor, grid: tuple[int, int], context: ForwardContext, prefix: int = 0) -> Tensor:
        """From embedded patches to normed activations.

        Args:
            tokens: [B, prefix + h * w, width]; prefix tokens lie outside the grid: they skip TPE and have coordinates 0
                (model-spec 2, 5), and the patches' coordinates start at 1.
            grid: (h, w).

        Returns:
            [B, prefix + h * w, width]; this rank's tokens [1, .., width] where the context's exchange shares them.
        """
        hidden = embed_grid(tokens, self.tpe, self.config, grid, context, prefix)
        context = at_grid(context, grid, prefix, tokens.device)
        for block in self.layers:
            hidden, _ = block(hidden, context)
        return self.norm(hidden)


def embed_grid(
    tokens: Tensor,
    tpe: ToeplitzEncoding | None,
    config: ModelConfig,
    grid: tuple[int, int],
    context: ForwardContext,
    prefix: int = 0,
) -> Tensor:
    """TPE and the first dropout of embedded patches; shared by the plain and the pipelined models.

    TPE runs over whole images: ranks share the tokens only after it.
    """
    if tpe is not None:
        encoded, _ = tpe(tokens[:, prefix:], context, grid=grid)
        tokens = torch.cat([tokens[:, :prefix], encoded], 1) if prefix else encoded
    if context.exchange is not None:
        tokens = context.exchange.part(tokens)
    return dropout(tokens, config.dropout, context.dropout, 0)


def at_grid(context: ForwardContext, grid: tuple[int, int], prefix: int, device: torch.device) -> ForwardContext:
    """The context of blocks over the tokens of a grid, or over this rank's share of them."""
    coordinates = grid_coordinates(grid, prefix, device)
    return context.at(coordinates if context.exchange is None else context.exchange.coordinates(coordinates))


def grid_coordinates(grid: tuple[int, ...], prefix: int, device: torch.device) -> Tensor:
    """int64 [prefix + product of grid, axes], row-major from 1; prefix tokens at 0."""
    axes = [torch.arange(1, size + 1, device=device) for size in grid]
    places = torch.cartesian_prod(*axes).view(-1, len(grid))
    return torch.cat([places.new_zeros(prefix, len(grid)), places])


class Biased(nn.Linear):
    """A linear layer with a bias that every rank holds whole; biases start at 0 and are not decayed.

    Args:
        std: of the initial weights; 0 for zeros.
    """

    def __init__(self, in_features: int, out_features: int, std: float):
        super().__init__(in_features, out_features)
        init = normal(std) if std else constant(0.0)
        declare(self.weight, ParameterSpec((out_features, in_features), init))
        declare(self.bias, ParameterSpec((out_features,), constant(0.0), decay=False))
