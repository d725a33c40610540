"""Images to tokens and back: patches in row-major order (model-spec 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config.model import ModelConfig
from .parameters import ParameterSpec, constant, declare, normal


class PatchEmbedding(nn.Conv2d):
    """A convolution of patches that do not overlap, with bias: computed as the product that it is.

    cuDNN's convolutions take TF32 by default, and sum gradients in no fixed order.
    """

    def __init__(self, config: ModelConfig):
        assert config.image is not None
        channels, patch = config.image.channels, config.image.patch
        super().__init__(channels, config.width, patch, stride=patch)
        declare(self.weight, ParameterSpec((config.width, channels, patch, patch), normal(config.initializer_std)))
        assert self.bias is not None
        declare(self.bias, ParameterSpec((config.width,), constant(0.0), decay=False))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, h * patch, w * patch], of any float dtype, to [B, h * w, width]."""
        (high, wide), patch = self.grid(images), self.kernel_size[0]
        cut = images.to(self.weight.dtype).view(len(images), self.in_channels, high, patch, wide, patch)
        patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(len(images), high * wide, self.in_channels * patch**2)
        return functional.linear(patches, self.weight.flatten(1), self.bias)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """(h, w) of images of any size made of whole patches.

        Raises:
            ValueError: other channels than the model's, or sides that patches do not fill.
        """
        patch = self.kernel_size[0]
        _, channels, height, width = images.shape
        if channels != self.in_channels:
            raise ValueError(f"images have {channels} channels; the model takes {self.in_channels}")
        if height < patch or width < patch or height % patch or width % patch:
            raise ValueError(
                f"images of {height} x {width} are not made of whole patches of {patch}; crop or resize them"
            )
        return height // patch, width // patch


def unpatch(tokens: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """[B, h * w, patch * patch * C] to [B, C, h * patch, w * patch]."""
    batch, _, features = tokens.shape
    channels = features // patch**2
    pixels = tokens.view(batch, *grid, patch, patch, channels)
    return torch.einsum("bhwpqc->bchpwq", pixels).reshape(batch, channels, grid[0] * patch, grid[1] * patch)
