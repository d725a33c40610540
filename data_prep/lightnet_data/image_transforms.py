"""Crops and flips of images as functions of a sample's draws; what DeiT's recipe does before the batch is made."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightnet_data import pictures
from lightnet_data.draws import Draws

# A PIL image and the sample's draws to a PIL image.
Transform = Callable[[Any, Draws], Any]
TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop:
    """A part of ``scale`` of the image's area and of ``ratio`` width / height, resized to size x size (bicubic).

    Area uniform, ratio log-uniform, as in Inception's and DeiT's recipes (torchvision's RandomResizedCrop). If no part fits
    in ``TRIES`` tries, the largest middle part whose ratio is allowed.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def box(self, width: int, height: int, draws: Draws) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the part."""
        for _ in range(TRIES):
            area = width * height * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = draws.integer(width - across + 1), draws.integer(height - down + 1)
                return left, top, left + across, top + down
        across = min(width, max(1, round(height * self.ratio[1])))
        down = min(height, max(1, round(width / self.ratio[0])))
        left, top = (width - across) // 2, (height - down) // 2
        return left, top, left + across, top + down

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        width, height = image.size
        box = self.box(width, height, draws)
        return image.resize((self.size, self.size), pictures.pillow().Resampling.BICUBIC, box=box)


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirrored with this probability."""

    probability: float = 0.5

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        flip = draws.uniform() < self.probability
        return image.transpose(pictures.pillow().Transpose.FLIP_LEFT_RIGHT) if flip else image


@dataclass(frozen=True)
class CenterCrop:
    """The middle size x size pixels, after the shorter side was resized to size / ``share`` (0.875: evaluation on ImageNet)."""

    size: int
    share: float = 0.875

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        image = pictures.shorter_side(image, max(self.size, round(self.size / self.share)))
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


@dataclass(frozen=True)
class Chain:
    """One transform after the other."""

    transforms: Sequence[Transform]

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        for transform in self.transforms:
            image = transform(image, draws)
        return image
