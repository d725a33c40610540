"""RandAugment's operations one image at a time by Pillow: the twin of ``image_operations``."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

GREY = (124, 116, 104)
Operate = Callable[[Any, float], Any]


def _fill(image: Any) -> Any:
    return GREY if image.mode == "RGB" else Image.new("RGB", (1, 1), GREY).convert("L").getpixel((0, 0))


def _affine(matrix: Callable[[Any, float], tuple[float, ...]]) -> Operate:
    return lambda image, share: image.transform(
        image.size, Image.Transform.AFFINE, matrix(image, share), Image.Resampling.BICUBIC, fillcolor=_fill(image)
    )


def _enhanced(name: str) -> Operate:
    return lambda image, share: getattr(ImageEnhance, name)(image).enhance(max(0.1, 1.0 + 0.9 * share))


def _solarize_add(image: Any, share: float) -> Any:
    pixels = np.asarray(image).astype(np.int64)
    return Image.fromarray(
        np.where(pixels < 128, np.minimum(255, pixels + int(110 * abs(share))), pixels).astype(np.uint8)
    )


OPERATIONS: dict[str, Operate] = {
    "autocontrast": lambda image, share: ImageOps.autocontrast(image),
    "equalize": lambda image, share: ImageOps.equalize(image),
    "invert": lambda image, share: ImageOps.invert(image),
    "rotate": lambda image, share: image.rotate(30 * share, Image.Resampling.BICUBIC, fillcolor=_fill(image)),
    "posterize": lambda image, share: ImageOps.posterize(image, 4 - int(4 * abs(share)) or 1),
    "solarize": lambda image, share: ImageOps.solarize(image, 256 - min(256, int(256 * abs(share)))),
    "solarize_add": _solarize_add,
    "color": _enhanced("Color"),
    "contrast": _enhanced("Contrast"),
    "brightness": _enhanced("Brightness"),
    "sharpness": _enhanced("Sharpness"),
    "shear_x": _affine(lambda image, share: (1, 0.3 * share, 0, 0, 1, 0)),
    "shear_y": _affine(lambda image, share: (1, 0, 0, 0.3 * share, 1, 0)),
    "translate_x": _affine(lambda image, share: (1, 0, 0.45 * share * image.width, 0, 1, 0)),
    "translate_y": _affine(lambda image, share: (1, 0, 0, 0, 1, 0.45 * share * image.height)),
}
