"""diffusers' AutoencoderKL, and images that it encodes while a denoiser trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightnet_data import image_dataset
from lightnet_data.draws import Draws
from lightnet_data.errors import DataError
from lightnet_data.shards import sha256


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The autoencoder of images in a folder, frozen, on the CPU.

    Raises:
        DataError: no such folder, no diffusers, or one that takes no images of three channels.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise DataError(f"{path}: no config.json; name the folder of a diffusers AutoencoderKL")
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise DataError("latents need diffusers: pip install 'lightnet-llm[vision]'") from None
    try:
        coder = AutoencoderKL.from_pretrained(str(path), local_files_only=True, torch_dtype=dtype)
    except Exception as error:  # diffusers raises EnvironmentError, ValueError, RuntimeError and others
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"{path}: holds no AutoencoderKL of diffusers ({reason})") from None
    if coder.config.in_channels != 3:
        raise DataError(f"{path}: takes {coder.config.in_channels} channels, images have 3; use another VAE")
    return coder.requires_grad_(False).eval()


class Facts(NamedTuple):
    """Attributes:
    channels: of a latent.
    factor: pixels a side of what becomes one place of a latent.
    scaling_factor, shift_factor: training sees (latent - shift_factor) * scaling_factor.
    """

    channels: int
    factor: int
    scaling_factor: float
    shift_factor: float


def facts(coder: Any) -> Facts:
    """Of a loaded autoencoder."""
    config = coder.config
    shift = float(getattr(config, "shift_factor", None) or 0.0)
    factor = 2 ** (len(config.block_out_channels) - 1)
    return Facts(int(config.latent_channels), factor, float(config.scaling_factor), shift)


def fingerprint(path: str | Path) -> str:
    """SHA-256 of an autoencoder's configuration and weights."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).glob("*")):
        if file.suffix in (".json", ".safetensors", ".bin"):
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()


class PosteriorSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with what their latents are drawn by: those of :class:`.image_dataset.LatentSamples`, without mirroring.

    Args:
        samples: ``ImageSamples`` of images of ``shape`` times the autoencoder's factor.
        shape: [C, h, w] of a latent.
    """

    def __init__(self, samples: Any, shape: tuple[int, int, int]) -> None:
        self.samples, self.shape = samples, shape
        self.store, self.classes, self.kind, self.seed = samples.store, samples.classes, samples.kind, samples.seed
        self.samples_per_epoch = int(samples.samples_per_epoch)
        self.place: Callable[[int], tuple[int, int]] = samples.place

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.samples_per_epoch

    def __getitem__(self, position: int) -> dict[str, Any]:
        """As of ``ImageSamples``, with posterior: standard normal, float32 [C, h, w]."""
        sample = self.samples[position]
        draws = Draws(self.seed, self.place(position)[0], sample["number"], image_dataset.LATENT)
        return {**sample, "posterior": np.ascontiguousarray(draws.normals(self.shape))}


@torch.no_grad()
def encoded(coder: Any, pixels: Tensor, posterior: Tensor) -> Tensor:
    """Scaled latents, float32 [B, C, h, w], of images on the autoencoder's device.

    Args:
        pixels: uint8 [B, 3, H, W].
        posterior: of ``PosteriorSamples``.
    """
    given = facts(coder)
    latent = coder.encode(pixels.to(coder.dtype) / 127.5 - 1).latent_dist
    drawn = latent.mean.float() + torch.exp(0.5 * latent.logvar.float()) * posterior
    return (drawn - given.shift_factor) * given.scaling_factor
