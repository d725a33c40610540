"""Mixup and CutMix: which other sample of the batch a sample is mixed with, and how, as a function of (seed, epoch, sample).

Mixup: Zhang et al. 2018. CutMix: Yun et al. 2019. Every sample draws its own (timm's "elem" mode), so that nothing depends on
how a batch is cut into micro-batches and ranks. Neighbours of the shuffled batch are each other's partners: as random as any
other pairs, and in a micro-batch of an even size both are there, so that no image is read twice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lightnet_data import image_dataset
from lightnet_data.draws import Draws

# First position and size of the batch that a global position belongs to.
Batches = Callable[[int], tuple[int, int]]


class Mix(NamedTuple):
    """How a sample is mixed.

    Attributes:
        kept: share of this sample in the label (and, in mixup, in each pixel).
        box: top, left, bottom and right of the pixels that are the other's (CutMix), or None.
    """

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

    def draw(self, draws: Draws, height: int, width: int) -> Mix | None:
        """How a sample of ``height`` x ``width`` is mixed; None: it is not."""
        mixed, cut = draws.uniform() < self.chance, draws.uniform() < self.cutmix_share
        if not (self and mixed):
            return None
        if not self.cutmix or (self.mixup and not cut):
            return Mix(_beta(self.mixup, draws), None)
        share = math.sqrt(1.0 - _beta(self.cutmix, draws))
        high, wide = int(height * share), int(width * share)
        down, across = draws.integer(height), draws.integer(width)  # the box's middle; what lies outside is lost
        top, bottom = max(0, down - high // 2), min(height, down + high // 2)
        left, right = max(0, across - wide // 2), min(width, across + wide // 2)
        return Mix(1.0 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))


def partner(place: int, size: int) -> int:
    """Place in a batch of ``size`` of the sample that the one at ``place`` is mixed with: its neighbour (0 and 1, 2 and 3 ...).

    The last of an odd number takes the first.
    """
    other = place ^ 1
    return other if other < size else 0


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
            As of ``ImageSamples``; other: the sample it is mixed with, as of ``ImageSamples`` (itself if it is not mixed); kept
            float32: this sample's share; box int64 [4]: the other's pixels (CutMix), all 0 without, and kept 1 unmixed.
        """
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """The samples of a micro-batch, which a ``DataLoader`` asks for at once; each image is read once."""
        read: dict[int, dict[str, Any]] = {}

        def sample(position: int) -> dict[str, Any]:
            if position not in read:
                read[position] = self.samples[position]
            return read[position]

        return [self._mixed(sample, position) for position in positions]

    def _mixed(self, read: Callable[[int], dict[str, Any]], position: int) -> dict[str, Any]:
        sample = read(position)
        draws = Draws(self.samples.seed, self.samples.place(position)[0], sample["number"], image_dataset.MIXING)
        first, size = self.batches(position)
        mix = self.mixing.draw(draws, *sample["image"].shape[1:]) if size > 1 else None
        other, kept, box = sample, 1.0, (0, 0, 0, 0)
        if mix is not None:
            other = read(first + partner(position - first, size))
            kept, box = mix.kept, mix.box or box
        return {**sample, "other": other, "box": np.array(box, dtype=np.int64), "kept": np.float32(kept)}
