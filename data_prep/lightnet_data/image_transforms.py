"""Crops and flips of images as functions of a sample's draws; what DeiT's recipe does before the batch is made."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightnet_data import pictures
from lightnet_data.draws import Draws

# A PIL image and the sample's draws to a PIL image.
Transform = Callable[[Any, Draws], Any]
# Height and width, or one side of a square.
Size = int | tuple[int, int]
TRIES = 10


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@dataclass(frozen=True)
class RandomResizedCrop:
    """A part of ``scale`` of the image's area and of ``ratio`` width / height, resized to ``size`` (bicubic).

    Area uniform, ratio log-uniform, as in Inception's and DeiT's recipes (torchvision's RandomResizedCrop). If no part fits
    in ``TRIES`` tries, the largest middle part whose ratio is allowed.
    """

    size: Size
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
        high, wide = _sides(self.size)
        return image.resize((wide, high), pictures.pillow().Resampling.BICUBIC, box=box)


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
    """The middle ``size`` pixels, after the image was resized to fill size / ``share`` (0.875: evaluation on ImageNet)."""

    size: Size
    share: float = 0.875

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        high, wide = _sides(self.size)
        shorter = min(image.size)
        fills = max(-(-high * shorter // image.height), -(-wide * shorter // image.width))
        image = pictures.shorter_side(image, max(fills, round(fills / self.share)))
        left, top = (image.width - wide) // 2, (image.height - high) // 2
        return image.crop((left, top, left + wide, top + high))


@dataclass(frozen=True)
class Grey:
    """One channel: the luma of ITU-R 601, which grey pictures stored as RGB give back as they were."""

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        return image.convert("L")


@dataclass(frozen=True)
class Chain:
    """One transform after the other."""

    transforms: Sequence[Transform]

    def __call__(self, image: Any, draws: Draws) -> Any:
        """See the class."""
        for transform in self.transforms:
            image = transform(image, draws)
        return image
