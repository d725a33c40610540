"""The heads of image models: classifier and denoiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightnet_data import autoencoders, image_dataset, image_operations
from lightnet_data.mixing import MixedImages, Mixing
from lightnet_data.noising import NoisedSamples
from torch import Tensor

from ..config.run import RunConfig
from ..models import diffusion
from ..models.classifier import class_loss, hits
from ..parallel.clock import Clock
from .image_data import batch_around, check_scale, folder_of, image_of, open_split, open_vae, vae_of
from .schedule import Budget
from .tasks import Batch, Sample, Task

if TYPE_CHECKING:
    from ..parallel.pipeline import PipelinedModel

SUMMED = 1024  # values of a sample that a checksum looks at
PICTURES = frozenset({"images", *image_dataset.DRAWN.values()})  # of a mixed batch these are its partners' too


class ImageTask(Task):
    """What both have in common."""

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.image = image_of(config)

    def opened(self, location: str | None = None) -> Any:
        """Training samples, or those of a validation set at FOLDER/SPLIT."""
        if location is None:
            return open_split(folder_of(self.config), "train", self.config, True)
        folder, _, split = location.rpartition("/")
        return open_split(folder, split, self.config, False)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return image_dataset.collate(samples)

    def uncounted(self, sample: Sample) -> Sample:
        return {**sample, "label": -1}

    def checksum(self, batch: Batch) -> int:
        count, names = len(batch["sample_ids"]), set(batch) - {"sample_ids", "other_rows"}
        read = {name: batch[name][:count] for name in names}
        if "other_rows" in batch:
            read |= {f"other_{name}": batch[name][batch["other_rows"]] for name in names & PICTURES}
        sums = torch.stack([_sums(read[name]) for name in sorted(read)]).sum(0) % 1_000_003
        return int((sums * (batch["sample_ids"] % 1_000_003 + 1)).sum())

    def rows(self, batch: Batch, count: int) -> Batch:
        return {name: x if name in PICTURES and "other_rows" in batch else x[:count] for name, x in batch.items()}


def _sums(x: Tensor) -> Tensor:
    """int64 [B], of the bits of evenly spaced values of [B, ...]."""
    if x.is_floating_point():
        x = x.contiguous().view(torch.int32)
    flat = x.reshape(len(x), -1)
    flat = flat[:, :: max(1, flat.shape[1] // SUMMED)].to(torch.int64)
    return (flat * torch.arange(1, flat.shape[1] + 1)).sum(1) % 1_000_003


class ClassifierTask(ImageTask):
    """Cross entropy against shares of classes: smoothed, and mixed as the images are (DeiT's recipe, paper section 5.3)."""

    on_cpu = frozenset({"operations", "erased"})  # which images are drawn on: looked at there, that nothing waits

    def training_samples(self, budget: Budget) -> Any:
        given = self.config.augmentation
        mixing = Mixing(given.mixup, given.cutmix, given.mix_chance, given.cutmix_share)
        samples = self.opened()
        return MixedImages(samples, mixing, partial(batch_around, budget.stairs, budget.batch)) if mixing else samples

    def held_out(self, location: str) -> Any:
        return self.opened(location)

    def prepared(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        """Normed pixels, float32 [B, C, H, W], and shares of classes, float32 [B, classes]."""
        pixels, count = batch["images"], len(batch["labels"])
        if "operations" in batch:
            pixels = image_operations.augment(pixels, batch["operations"], batch["tables"], batch["factors"])
        if "erased" in batch:
            pixels = image_operations.erase(pixels, batch["erased"])
        every = self._normed(pixels)
        images, shares = every[:count], self._shares(batch["labels"], training)
        if "other_rows" in batch:
            kept = batch["kept"]
            images = mix(images, every[batch["other_rows"]], kept, batch["boxes"])
            shares = kept[:, None] * shares + (1.0 - kept[:, None]) * self._shares(batch["other_labels"], training)
        return images, shares

    def _normed(self, pixels: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device).view(-1, 1, 1)
            for values in (self.config.augmentation.mean, self.config.augmentation.std)
        )
        return (pixels.float() / 255.0 - mean) / std

    def _shares(self, labels: Tensor, training: bool) -> Tensor:
        """A 1 at the class, smoothed in training; zeros for labels below 0."""
        classes = self.image.classes
        found = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        spread = self.config.augmentation.label_smoothing if training else 0.0
        return found * (1.0 - spread) + (labels[:, None] >= 0) * (spread / classes)

    def loss(self, model: Callable[..., Any], batch: Batch, clock: Clock, training: bool) -> Tensor:
        images, shares = self.prepared(batch, training)
        context = clock.image_context(batch["sample_ids"], self.config.model, training)
        loss: Tensor = model(images, context, shares).loss
        return loss * clock.weight

    def figures(self, model: Callable[..., Any], batch: Batch, clock: Clock) -> Tensor:
        images, shares = self.prepared(batch, False)
        context = clock.image_context(batch["sample_ids"], self.config.model, False)
        logits = model(images, context).logits
        return torch.cat([class_loss(logits, shares)[None], hits(logits, shares)])

    def pipelined(self) -> type[PipelinedModel]:
        from ..parallel.pipeline import PipelinedClassifier

        return PipelinedClassifier

    def payload(self, batch: Batch, clock: Clock) -> tuple[tuple[Tensor, ...], Tensor]:
        images, shares = self.prepared(batch, clock.step is not None)
        return (images, batch["sample_ids"]), shares

    def report(self, means: Sequence[float], facts: dict[str, float]) -> dict[str, float]:
        """Cross entropy in nats, and shares of images whose class is the first, or among the first five."""
        return dict(zip(("loss", "top1", "top5"), means, strict=True))


def mix(images: Tensor, others: Tensor, kept: Tensor, boxes: Tensor) -> Tensor:
    """CutMix where a box has an area, mixup elsewhere.

    Args:
        images, others: float32 [B, C, H, W].
        kept: float32 [B], share of ``images`` in mixup.
        boxes: int64 [B, 4], top, left, bottom and right of the pixels that are the others'.
    """
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    top, left, bottom, right = (edge.view(-1, 1, 1) for edge in boxes.unbind(1))
    inside = ((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right))[:, None]
    cut = (boxes != 0).any(1).view(-1, 1, 1, 1)
    share = kept.view(-1, 1, 1, 1)
    return torch.where(cut, torch.where(inside, others, images), share * images + (1.0 - share) * others)


class DenoiserTask(ImageTask):
    """The objective of denoising diffusion with a learned variance, on latents, stored or encoded here, or on pixels in
    [-1, 1]."""

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.process: diffusion.Process | None = None
        self.coder: Any = None

    def _noised(self, samples: Any, class_drop: float) -> Any:
        return NoisedSamples(samples, diffusion.STEPS, self.image.classes, class_drop)

    def training_samples(self, budget: Budget) -> Any:
        return self._noised(self.opened(), self.config.diffusion.class_drop)

    def held_out(self, location: str) -> Any:
        return self._noised(self.opened(location), 0.0)

    def _clean(self, batch: Batch) -> Tensor:
        """Pixels in [-1, 1] or scaled latents, float32 [B, C, H, W]."""
        if "posterior" not in batch:
            return batch["images"].float() / 127.5 - 1.0 if "images" in batch else batch["latents"]
        pixels, vae = batch["images"], vae_of(self.config)
        assert vae is not None
        coder = self.coder or open_vae(vae).to(pixels.device)
        latents = autoencoders.encoded(coder, pixels, batch["posterior"])
        if self.coder is None:
            check_scale(float(latents.std()), f"diffusion.vae {vae}")
            self.coder = coder
        return latents

    def loss(self, model: Callable[..., Any], batch: Batch, clock: Clock, training: bool) -> Tensor:
        images = self._clean(batch)
        if self.process is None:
            self.process = diffusion.linear(device=images.device)
        noise, timesteps, labels = batch["noise"], batch["timesteps"], batch["labels"]
        context = clock.image_context(batch["sample_ids"], self.config.model, training)
        noisy = self.process.add_noise(images, noise, timesteps)
        predicted = model(noisy, timesteps, labels.clamp(min=0), context)
        prediction = self.config.diffusion.prediction
        losses = self.process.loss(predicted, images, noise, timesteps, prediction) * (labels >= 0)
        return losses.mean() * clock.weight
