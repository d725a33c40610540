"""Denoiser of latent diffusion: what noise was added, and with what variance (model-spec 5; paper section 5.4)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..config.model import ModelConfig
from .backbone import Backbone, Biased
from .context import ForwardContext
from .layers import PlainLayers
from .modulation import FinalModulation
from .parameters import ParameterSpec, declare, normal
from .patches import PatchEmbedding, unpatch

FREQUENCIES = 256


class TimestepEmbedding(nn.Module):
    """A time step as sines and cosines of 128 frequencies, then two linear layers with SiLU between."""

    def __init__(self, width: int, std: float):
        super().__init__()
        self.first, self.second = Biased(FREQUENCIES, width, std), Biased(width, width, std)

    def forward(self, timesteps: Tensor) -> Tensor:
        """[B] to [B, width]."""
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(10000.0) / half * torch.arange(half, device=timesteps.device, dtype=torch.float32))
        angles = timesteps.float()[:, None] * rates
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(self.first.weight.dtype)
        return self.second(nn.functional.silu(self.first(waves)))


class Denoiser(Backbone):
    """Time step and class are two tokens before the patches, or with ``conditioning: adaln_single`` modulate every block. The
    class after the last one, ``classes``, means "none": samples are given it in training to make guidance without a classifier
    possible."""

    embedding: PatchEmbedding

    def __init__(self, config: ModelConfig, layers: PlainLayers | None = None):
        image = config.image
        assert image is not None
        super().__init__(config, layers or PlainLayers(), PatchEmbedding(config))
        std = config.initializer_std
        self.timestep = TimestepEmbedding(config.width, std)
        self.label = nn.Embedding(image.classes + 1, config.width)
        declare(self.label.weight, ParameterSpec((image.classes + 1, config.width), normal(std)))
        self.modulation = self.final = None
        if config.conditioning == "adaln_single":
            self.modulation, self.final = Biased(config.width, 6 * config.width, std), FinalModulation(config)
        self.head = Biased(config.width, image.patch**2 * 2 * image.channels, 0.0)

    def forward(
        self, noisy: Tensor, timesteps: Tensor, labels: Tensor, context: ForwardContext | None = None
    ) -> Tensor:
        """Predict.

        Args:
            noisy: [B, C, H, W] latents (or pixels) with noise.
            timesteps: int or float [B], 0 to 999.
            labels: int [B]; ``classes`` for none.

        Returns:
            [B, 2 C, H, W]: the noise, and where in its range the log variance lies.
        """
        grid = self.embedding.grid(noisy)
        tokens = self.embedding(noisy)
        context, time, label = context or ForwardContext(), self.timestep(timesteps), self.label(labels)
        if self.modulation is None or self.final is None:
            prefix = torch.stack([time, label], 1).to(tokens.dtype)
            hidden = self.image_tokens(torch.cat([prefix, tokens], 1), grid, context, prefix=2)
        else:
            shared = self.modulation(nn.functional.silu(time + label)).unflatten(1, (6, -1))
            hidden = self.image_tokens(tokens, grid, replace(context, modulation=shared))
            hidden = self.final(hidden, time + label)
        predicted = self.head(hidden)
        if context.exchange is not None:
            predicted = context.exchange.whole(predicted)
        assert self.config.image is not None
        return unpatch(predicted[:, self.config.prefix :], grid, self.config.image.patch)


def guided(model: Denoiser, noisy: Tensor, timesteps: Tensor, labels: Tensor, scale: float) -> Tensor:
    """The prediction with guidance on all channels of the noise: none + scale * (class - none); the variance is the class's.

    Of velocities it is the same rule: they differ from the noise by a factor and by a multiple of the input that both share.

    Args:
        noisy, timesteps, labels: as of :meth:`Denoiser.forward`, for any batch size.
        scale: 1 for no guidance, which costs one pass instead of two.
    """
    if scale == 1.0:
        return model(noisy, timesteps, labels)
    assert model.config.image is not None
    none = torch.full_like(labels, model.config.image.classes)
    both = model(noisy.repeat(2, 1, 1, 1), timesteps.repeat(2), torch.cat([labels, none]))
    conditional, unconditional = both.chunk(2)
    channels = model.config.image.channels
    noise = unconditional[:, :channels] + scale * (conditional[:, :channels] - unconditional[:, :channels])
    return torch.cat([noise, conditional[:, channels:]], 1)
