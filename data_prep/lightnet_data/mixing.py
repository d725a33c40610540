"""Mixup and CutMix: which other sample of the batch a sample is mixed with, and how, as a function of (seed, epoch, sample).

Mixup: Zhang et al. 2018. CutMix: Yun et al. 2019. Every sample draws its own (timm's "elem" mode), so that nothing depends on
how a batch is cut into micro-batches and ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data import image_dataset
from lightnet_data.draws import Draws

# First position and size of the batch that a global position belongs to.
Batches = Callable[[int], tuple[int, int]]


class Mix(NamedTuple):
    """How a sample is mixed.

    Attributes:
        partner: place of the other sample in the batch, counted from this one.
        kept: share of this sample in the label (and, in mixup, in each pixel).
        box: top, left, bottom and right of the pixels that are the other's (CutMix), or None.
    """

    partner: int
    kept: float
    box: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Mixing:
    """The rule.

    Attributes:
        mixup, cutmix: alpha of each one's Beta(alpha, alpha), 0 (off) to 1.
        chance: that a sample is mixed at all.
        cutmix_share: of CutMix where both are on.
    """

    mixup: float = 0.8
    cutmix: float = 1.0
    chance: float = 1.0
    cutmix_share: float = 0.5

    def __bool__(self) -> bool:
        """Whether any sample is mixed."""
        return self.chance > 0 and (self.mixup > 0 or self.cutmix > 0)

    def draw(self, draws: Draws, others: int, height: int, width: int) -> Mix | None:
        """How a sample of ``height`` x ``width`` is mixed with one of ``others`` more in its batch; None: it is not."""
        mixed, cut = draws.uniform() < self.chance, draws.uniform() < self.cutmix_share
        if not (self and mixed and others):
            return None
        partner = 1 + draws.integer(others)
        if not self.cutmix or (self.mixup and not cut):
            return Mix(partner, _beta(self.mixup, draws), None)
        share = math.sqrt(1.0 - _beta(self.cutmix, draws))
        high, wide = int(height * share), int(width * share)
        down, across = draws.integer(height), draws.integer(width)  # the box's middle; what lies outside is lost
        top, bottom = max(0, down - high // 2), min(height, down + high // 2)
        left, right = max(0, across - wide // 2), min(width, across + wide // 2)
        return Mix(partner, 1.0 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))


def _beta(alpha: float, draws: Draws) -> float:
    """Beta(alpha, alpha) for alpha up to 1 (Joehnk 1964), from uniform numbers alone."""
    while True:
        first, second = draws.uniform() ** (1.0 / alpha), draws.uniform() ** (1.0 / alpha)
        if 0.0 < first + second <= 1.0:
            return first / (first + second)


class MixedImages(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with the one that each is mixed with; pixels and labels are put together later, on the device.

    Args:
        samples: images of one size.
        batches: which batch a position belongs to.
    """

    def __init__(self, samples: image_dataset.ImageSamples, mixing: Mixing, batches: Batches) -> None:
        self.samples, self.mixing, self.batches = samples, mixing, batches

    def __getitem__(self, position: int) -> dict[str, Any]:
        """The sample at a global position.

        Returns:
            As of ``ImageSamples``, and of the sample it is mixed with: other_image uint8 [3, H, W], other_label; kept
            float32: this sample's share; box int64 [4]: the other's pixels (CutMix), all 0 without, and kept 1 unmixed.
        """
        sample = self.samples[position]
        draws = Draws(self.samples.seed, self.samples.place(position)[0], sample["number"], image_dataset.MIXING)
        first, size = self.batches(position)
        mix = self.mixing.draw(draws, size - 1, *sample["image"].shape[1:])
        other, kept, box = sample, 1.0, (0, 0, 0, 0)
        if mix is not None:
            other = self.samples[first + (position - first + mix.partner) % size]
            kept, box = mix.kept, mix.box or box
        mixed: dict[str, NDArray[Any] | np.float32] = {"box": np.array(box, dtype=np.int64), "kept": np.float32(kept)}
        return {**sample, "other_image": other["image"], "other_label": other["label"], **mixed}
