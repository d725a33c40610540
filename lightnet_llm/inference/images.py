"""Images drawn by a denoiser: diffusers' samplers on the trained process, every image by its own seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightnet_data import autoencoders
from lightnet_data.errors import DataError
from numpy.typing import NDArray
from torch import Tensor

from ..config import RunConfig
from ..errors import UserError, nearest
from ..models import Denoiser, diffusion
from ..models.denoiser import guided
from .load import load_model_of_head

SAMPLERS = ("ddpm", "ddim")


class LoadedDenoiser(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        model: in eval mode, without gradients.
        config: of the run that trained it.
        classes: names by number, as of the training data then.
        latents: scaling_factor, shift_factor and shape of the training data then; empty for pixels.
        step: updates that gave the weights.
    """

    model: Denoiser
    config: RunConfig
    classes: list[str]
    latents: dict[str, Any]
    step: int


def load_denoiser(
    path: str | Path, device: str | None = None, dtype: str | None = None, weights: str | None = None
) -> LoadedDenoiser:
    """Load a denoiser.

    Args:
        path: a run folder (its newest whole checkpoint is taken) or a checkpoint of any layout.
        device, dtype: as of :func:`.load.load_model`.
        weights: "trained" or "ema"; None: the average of a run that keeps one.

    Raises:
        UserError: no whole checkpoint there, or of another model.
    """
    model, config, manifest = load_model_of_head(path, Denoiser, "denoiser", device, dtype, weights)
    names, latents = _trained_on(manifest.get("data", {}), path)
    step = int(manifest.get("state", {}).get("step", 0))
    return LoadedDenoiser(model, config, names, latents, step)


def _trained_on(data: dict[str, Any], folder: str | Path) -> tuple[list[str], dict[str, Any]]:
    """Classes and factors from what the checkpoint says of its data: the folder of today may be another."""
    latents = data.get("latents", {})
    if data.get("kind") != "images" and not {"scaling_factor", "shift_factor"} <= set(latents):
        raise UserError(
            f"{folder}: its manifest does not say how the latents it was trained on are scaled; write "
            '"latents": {"scaling_factor": ..., "shift_factor": ...} under "data", as in their folder\'s manifest.json'
        )
    return list(data.get("classes", [])), dict(latents)


def class_numbers(wanted: Sequence[str], loaded: LoadedDenoiser) -> list[int]:
    """Numbers of classes given by number or name; "none" is the class without a name.

    Raises:
        UserError: there is no such class.
    """
    assert loaded.config.model.image is not None
    count, found = loaded.config.model.image.classes, []
    for item in wanted:
        if item == "none":
            found.append(count)
        elif item in loaded.classes:
            found.append(loaded.classes.index(item))
        elif item.isdecimal() and int(item) < count:
            found.append(int(item))
        else:
            raise UserError(f"class '{item}' is none of 0 to {count - 1}{nearest(item, loaded.classes)}, or none")
    return found


@dataclass(frozen=True)
class Sampler:
    """How images are drawn.

    Attributes:
        name: "ddpm" (with the learned variance) or "ddim" (no noise but the first).
        steps: model passes, evenly over the process's 1000; with ddim they divide it.
        guidance: 1 for none; more pulls images towards their class.
        seed: with an image's class and number all that its noise depends on.
        clip: whether a step's guess of the image is kept in [-1, 1]: right for pixels.
        prediction: ``diffusion.prediction`` of the run.
    """

    name: str = "ddpm"
    steps: int = 250
    guidance: float = 1.0
    seed: int = 0
    clip: bool = True
    prediction: str = "noise"

    def scheduler(self) -> Any:
        """diffusers' scheduler for the trained process.

        Raises:
            UserError: no such sampler, or steps that do not fit the process.
        """
        from diffusers import DDIMScheduler, DDPMScheduler

        if self.name not in SAMPLERS:
            raise UserError(f"sampler '{self.name}' is not known{nearest(self.name, list(SAMPLERS))}; use ddpm or ddim")
        if not 1 <= self.steps <= diffusion.STEPS:
            raise UserError(f"{self.steps} steps: must be from 1 to {diffusion.STEPS}, those of the process")
        if self.name == "ddim" and diffusion.STEPS % self.steps:  # diffusers would end beside the process's beginning
            near = min((n for n in range(1, 1001) if diffusion.STEPS % n == 0), key=lambda n: abs(n - self.steps))
            raise UserError(f"{self.steps} steps: ddim takes steps that divide {diffusion.STEPS}; the nearest: {near}")
        process = {
            "num_train_timesteps": diffusion.STEPS,
            "beta_start": diffusion.FIRST,
            "beta_end": diffusion.LAST,
            "beta_schedule": "linear",
            "clip_sample": self.clip,
            "prediction_type": "epsilon" if self.prediction == "noise" else "v_prediction",
        }
        found: Any
        if self.name == "ddim":
            found = DDIMScheduler(**process, timestep_spacing="trailing")
        else:
            found = DDPMScheduler(**process, variance_type="learned_range", timestep_spacing="linspace")
        found.set_timesteps(self.steps)
        return found

    def generator(self, label: int, number: int) -> torch.Generator:
        """The noise of one image, on the CPU: the same on every device."""
        digest = hashlib.sha256(f"{self.seed}:{label}:{number}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def draw(
    model: Denoiser,
    images: Sequence[tuple[int, int]],
    sampler: Sampler,
    batch_size: int = 32,
    size: tuple[int, int] | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> Tensor:
    """Draw images; each is the same in whatever batch it is drawn.

    Args:
        images: (class, number) of each; numbers tell images of a class apart.
        size: height and width, of whole patches; None: as trained.
        progress: told of model passes times images.

    Returns:
        float32 [B, C, H, W] on the CPU: pixels in [-1, 1], or scaled latents.
    """
    config = model.config.image
    assert config is not None
    device, shape = model.head.weight.device, (config.channels, *(size or config.size))
    found = [torch.zeros(0, *shape)]
    for first in range(0, len(images), batch_size):
        part = images[first : first + batch_size]
        scheduler, generators = sampler.scheduler(), [sampler.generator(*image) for image in part]
        noisy = torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)
        labels = torch.tensor([label for label, _ in part], device=device)
        for timestep in scheduler.timesteps:
            times = torch.full((len(part),), int(timestep), device=device)
            predicted = guided(model, noisy, times, labels, sampler.guidance).float()
            if sampler.name == "ddim":
                noisy = scheduler.step(predicted[:, : config.channels], timestep, noisy).prev_sample
            else:
                noisy = scheduler.step(predicted, timestep, noisy, generator=generators).prev_sample
            progress(len(part))
        found.append(noisy.cpu())
    return torch.cat(found)


def open_vae(path: str | Path, channels: int, device: torch.device) -> Any:
    """diffusers' AutoencoderKL in a folder.

    Args:
        channels: of the latents it is to decode.

    Raises:
        UserError: the folder holds none, or one of other channels.
    """
    try:
        coder = autoencoders.load(path).to(device)
    except DataError as error:
        raise UserError(f"--vae {error}") from None
    if coder.config.latent_channels != channels:
        raise UserError(f"--vae {path}: has {coder.config.latent_channels} latent channels, the model {channels}")
    return coder


@torch.no_grad()
def decode(latents: Tensor, coder: Any, facts: dict[str, Any], batch_size: int = 8) -> Tensor:
    """Scaled latents to pixels in [-1, 1], float32 on the CPU.

    Args:
        latents: float32 [B, C, h, w].
        coder: of :func:`open_vae`.
        facts: scaling_factor and shift_factor of what the model was trained on.
    """
    scale, shift = float(facts["scaling_factor"]), float(facts["shift_factor"])
    parts = latents.split(batch_size)
    return torch.cat([coder.decode(part.to(coder.device) / scale + shift).sample.float().cpu() for part in parts])


def as_pixels(images: Tensor) -> NDArray[np.uint8]:
    """[B, 3, H, W], or [B, 1, H, W] for grey, in [-1, 1] to uint8 [B, H, W, 3]."""
    images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().numpy()


def grid(pixels: NDArray[np.uint8], columns: int, gap: int = 2) -> NDArray[np.uint8]:
    """uint8 [B, H, W, 3] to one picture, row by row, white between."""
    count, high, wide, channels = pixels.shape
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (high + gap) - gap, columns * (wide + gap) - gap, channels), 255, np.uint8)
    for i, image in enumerate(pixels):
        top, left = i // columns * (high + gap), i % columns * (wide + gap)
        sheet[top : top + high, left : left + wide] = image
    return sheet
