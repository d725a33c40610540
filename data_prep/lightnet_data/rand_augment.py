"""RandAugment (Cubuk et al. 2020) and random erasing (Zhong et al. 2020) on Pillow's operations, as DeiT's recipe has them.

The fifteen operations and their ranges are those of timm's ``rand-m9-mstd0.5-inc1``: every one grows with the magnitude.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightnet_data import pictures
from lightnet_data.draws import Draws

GREY = (124, 116, 104)  # what shows where an image was moved away: ImageNet's mean
MOST = 10.0


def _affine(image: Any, *matrix: float) -> Any:
    """out(x, y) = in(a x + b y + c, d x + e y + f)."""
    module = pictures.pillow()
    return image.transform(image.size, module.Transform.AFFINE, matrix, module.Resampling.BICUBIC, fillcolor=GREY)


def _rotate(image: Any, share: float) -> Any:
    return image.rotate(30 * share, pictures.pillow().Resampling.BICUBIC, fillcolor=GREY)


def _solarize_add(image: Any, share: float) -> Any:
    pixels = np.asarray(image).astype(np.int64)
    added = np.where(pixels < 128, np.minimum(255, pixels + int(110 * abs(share))), pixels)
    return pictures.pillow().fromarray(added.astype(np.uint8))


def _enhanced(name: str) -> Callable[[Any, float], Any]:
    def operate(image: Any, share: float) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(image).enhance(max(0.1, 1.0 + 0.9 * share))

    return operate


def _ops(name: str, *arguments: Callable[[float], int]) -> Callable[[Any, float], Any]:
    def operate(image: Any, share: float) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, name)(image, *(argument(share) for argument in arguments))

    return operate


# Image and share of the largest effect, -1 to 1 (the sign is drawn), to the image.
OPERATIONS: tuple[Callable[[Any, float], Any], ...] = (
    _ops("autocontrast"),
    _ops("equalize"),
    _ops("invert"),
    _rotate,
    _ops("posterize", lambda share: 4 - int(4 * abs(share)) or 1),
    _ops("solarize", lambda share: 256 - min(256, int(256 * abs(share)))),
    _solarize_add,
    *(_enhanced(name) for name in ("Color", "Contrast", "Brightness", "Sharpness")),
    lambda image, share: _affine(image, 1, 0.3 * share, 0, 0, 1, 0),
    lambda image, share: _affine(image, 1, 0, 0, 0.3 * share, 1, 0),
    lambda image, share: _affine(image, 1, 0, 0.45 * share * image.width, 0, 1, 0),
    lambda image, share: _affine(image, 1, 0, 0, 0, 1, 0.45 * share * image.height),
)


@dataclass(frozen=True)
class RandAugment:
    """``count`` operations, each taken with ``chance``, of a normally drawn magnitude from 0 to 10."""

    magnitude: float = 9.0
    spread: float = 0.5
    count: int = 2
    chance: float = 0.5

    def __call__(self, image: Any, draws: Draws) -> Any:
        """A PIL image to another of its size."""
        for _ in range(self.count):
            operation, taken = OPERATIONS[draws.integer(len(OPERATIONS))], draws.uniform() < self.chance
            drawn = self.magnitude + self.spread * float(draws.normals((1,))[0])
            sign = -1.0 if draws.uniform() < 0.5 else 1.0
            if taken:
                image = operation(image, sign * min(MOST, max(0.0, drawn)) / MOST)
        return image


@dataclass(frozen=True)
class Erase:
    """With this chance a box of ``area`` of the image becomes noise of ImageNet's mean and deviation."""

    chance: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)

    def __call__(self, image: Any, draws: Draws) -> Any:
        """A PIL image to another of its size."""
        if draws.uniform() >= self.chance:
            return image
        for _ in range(10):
            area = image.width * image.height * draws.uniform(*self.area)
            ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < high < image.height and 0 < wide < image.width:
                top, left = draws.integer(image.height - high + 1), draws.integer(image.width - wide + 1)
                pixels = np.array(image)
                noise = np.array(GREY) + 57.0 * draws.normals((high, wide, 3))
                pixels[top : top + high, left : left + wide] = np.clip(np.rint(noise), 0, 255).astype(np.uint8)
                return pictures.pillow().fromarray(pixels)
        return image
