"""``lightnet data vae``: a small AutoencoderKL of diffusers trained on a folder of images, for latents on a laptop.

It is trained by absolute error and the KL divergence of its latents, as latent diffusion's (Rombach et al. 2022, section 3.1),
but without their perceptual and adversarial losses, which need nets of their own: for small pictures; large ones blur.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightnet_data import image_dataset, pictures, sample_shards
from lightnet_data.draws import Draws
from lightnet_data.errors import DataError
from lightnet_data.image_dataset import ImageSamples
from lightnet_data.image_transforms import HorizontalFlip
from lightnet_data.images import check_output
from lightnet_data.latents import device_of
from lightnet_data.output import OutputFolder

FACTS = "training.json"
MEASURED = 1024  # images that the scale of latents and the error are measured on
WARMUP, CLIP = 0.05, 1.0


@dataclass(frozen=True)
class VaeOptions:
    """Options of a small VAE and of its training.

    ``size``: images are cropped to so many pixels square. ``factor``: pixels to a latent along each side, a power of two.
    ``channels``: of a latent. ``width``: channels of the first level; those below have twice as many. ``kl``: weight of the
    divergence of all latents of an image beside the absolute error of all its values.
    """

    size: int
    factor: int = 2
    channels: int = 4
    width: int = 16
    steps: int = 1000
    batch: int = 32
    learning_rate: float = 1e-3
    kl: float = 1e-6
    seed: int = 0
    device: str = "auto"

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            DataError: names the option.
        """
        for name in ("factor", "channels", "width", "steps", "batch", "size"):
            if getattr(self, name) < 1:
                raise DataError(f"--{name} {getattr(self, name)}: must be at least 1")
        if not 0.0 < self.learning_rate < math.inf:
            raise DataError(f"--learning-rate {self.learning_rate}: must be a number above 0, such as 1e-3")
        if self.factor & (self.factor - 1):
            raise DataError(f"--factor {self.factor}: must be a power of two, such as 2, 4 or 8")
        if self.size % self.factor:
            nearest = max(1, round(self.size / self.factor)) * self.factor
            raise DataError(f"--size {self.size}: must be a multiple of --factor {self.factor}; nearest {nearest}")


def train_vae(
    source: str | Path,
    output: str | Path,
    options: VaeOptions,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], Any] = lambda count: None,
) -> dict[str, Any]:
    """Train on the training split of a folder of image shards; a function of images and options on one device.

    Args:
        source: folder made by ``lightnet data images``.
        output: folder to make, as diffusers saves an AutoencoderKL; its scaling and shift factors give latents of mean 0 and
            standard deviation 1.
        note: gets lines for the user.
        progress: told of every step.

    Raises:
        DataError: not such a folder, options that do not fit, losses that are not finite, or ``output`` is there.

    Returns:
        parameters; loss (of the last tenth of steps, absolute error per value in [-1, 1]); psnr in dB on ``measured_on``, the
        validation split where there is one; scaling_factor, shift_factor; options.
    """
    options.check()
    output = Path(output)
    splits = sample_shards.load(source, "images")["splits"]
    check_output(output)
    device, measured_on = device_of(options.device), "validation" if "validation" in splits else "train"
    samples = ImageSamples(source, "train", _Cropped(options.size, flip=0.5), options.seed)
    held = ImageSamples(source, measured_on, _Cropped(options.size), shuffle=False)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        model = build(options).to(device)
        losses = _train(model, samples, options, device, progress)
        shift, deviation = _spread(model, samples, options, device)
        psnr = _psnr(model, held, options, device)
    model.register_to_config(scaling_factor=1.0 / deviation, shift_factor=shift)
    last = losses[-max(1, len(losses) // 10) :]
    facts: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": sum(last) / len(last),
        "psnr": psnr,
        "measured_on": measured_on,
        "scaling_factor": 1.0 / deviation,
        "shift_factor": shift,
        "options": asdict(options),
    }
    target = OutputFolder(output, note)
    with target as folder:
        model.save_pretrained(folder)
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        target.finish()
    return facts


class _Cropped:
    """The middle square, mirrored with a probability."""

    def __init__(self, size: int, flip: float = 0.0) -> None:
        self.size, self.flip = size, HorizontalFlip(flip)

    def __call__(self, image: Any, draws: Draws) -> Any:
        return self.flip(pictures.center_crop(image, self.size), draws)


def build(options: VaeOptions) -> Any:
    """An untrained AutoencoderKL.

    Raises:
        DataError: diffusers is not installed.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise DataError("a VAE needs diffusers: pip install 'lightnet-llm[vision]'") from None
    levels = options.factor.bit_length()  # all but the last halve each side
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=[options.width * min(2**level, 4) for level in range(levels)],
        layers_per_block=1,
        latent_channels=options.channels,
        norm_num_groups=math.gcd(options.width, 8),
        sample_size=options.size,
    )


def _batches(samples: ImageSamples, batch: int, count: int) -> Iterator[Tensor]:
    """Of the first ``count`` positions: float32 [B, 3, H, W] in [-1, 1]."""
    for first in range(0, count, batch):
        chosen = [samples[position] for position in range(first, min(first + batch, count))]
        yield image_dataset.collate(chosen)["images"].float() / 127.5 - 1.0


def _train(
    model: Any, samples: ImageSamples, options: VaeOptions, device: torch.device, progress: Callable[[int], Any]
) -> list[float]:
    """The losses of all steps."""
    from diffusers.optimization import get_cosine_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, round(WARMUP * options.steps), options.steps)
    losses: list[float] = []
    for images in _batches(samples, options.batch, options.steps * options.batch):
        images = images.to(device)
        latents = model.encode(images).latent_dist
        error = (model.decode(latents.sample()).sample - images).abs().mean()
        loss = error + options.kl * latents.kl().mean() / images[0].numel()
        if not torch.isfinite(loss):
            raise DataError(f"step {len(losses) + 1}: the loss is not finite; use a smaller --learning-rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(float(loss.detach()))
        progress(1)
    return losses


@torch.no_grad()
def _spread(model: Any, samples: ImageSamples, options: VaeOptions, device: torch.device) -> tuple[float, float]:
    """Mean and standard deviation of drawn latents."""
    model.eval()
    count, total, squares = 0, 0.0, 0.0
    for images in _batches(samples, options.batch, min(MEASURED, len(samples))):
        latents = model.encode(images.to(device)).latent_dist
        mean = latents.mean.double()
        count, total = count + mean.numel(), total + float(mean.sum())
        squares += float((mean.square() + latents.var.double()).sum())
    return total / count, math.sqrt(max(squares / count - (total / count) ** 2, 1e-12))


@torch.no_grad()
def _psnr(model: Any, samples: ImageSamples, options: VaeOptions, device: torch.device) -> float:
    """Peak signal-to-noise ratio in dB of images decoded from the means of their latents."""
    count, error = 0, 0.0
    for images in _batches(samples, options.batch, min(MEASURED, len(samples))):
        images = images.to(device)
        decoded = model.decode(model.encode(images).latent_dist.mean).sample.clamp(-1, 1)
        count, error = count + images.numel(), error + float((decoded - images).double().square().sum())
    return 10.0 * math.log10(4.0 / max(error / count, 1e-12))
