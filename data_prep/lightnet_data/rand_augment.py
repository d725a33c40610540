"""RandAugment (Cubuk et al. 2020) and random erasing (Zhong et al. 2020), as DeiT's recipe has them: what is drawn for an image.

The fifteen operations and their ranges are those of timm's ``rand-m9-mstd0.5-inc1``: every one grows with the magnitude. They
are done where the model is, on whole batches, by ``image_operations``; a loader only draws them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightnet_data.draws import Draws

MOST = 10.0
NOISE = 1 << 20  # normal values that erased boxes are filled from
KINDS = ("none", "table", "equalize", "autocontrast", "color", "contrast", "sharpness", "affine")
LEVELS = np.arange(256)


class Operation(NamedTuple):
    """One operation on an image of 8 bits a channel.

    Attributes:
        kind: of ``KINDS``.
        table: new value of each, 0 to 255 ("table").
        numbers: the factor ("color", "contrast", "sharpness"), or a to f of out(x, y) = in(a x + b y + c, d x + e y + f)
            ("affine").
    """

    kind: str
    table: NDArray[Any] = LEVELS
    numbers: tuple[float, ...] = ()


# Share of the largest effect, -1 to 1 (the sign is drawn), and the image's height and width to the operation.
Made = Callable[[float, int, int], Operation]


def _always(kind: str) -> Made:
    return lambda share, height, width: Operation(kind)


def _enhanced(kind: str) -> Made:
    return lambda share, height, width: Operation(kind, numbers=(_factor(share),))


def _factor(share: float) -> float:
    return max(0.1, 1.0 + 0.9 * share)


def _table(values: Callable[[float], Any]) -> Made:
    return lambda share, height, width: Operation("table", np.clip(values(share), 0, 255).astype(np.int64))


def _brightness(share: float) -> Any:
    return np.float32(_factor(share)) * LEVELS.astype(np.float32)


def _posterize(share: float) -> Any:
    return LEVELS & -(1 << 8 - (4 - int(4 * abs(share)) or 1))


def _solarize(share: float) -> Any:
    return np.where(256 - min(256, int(256 * abs(share))) > LEVELS, LEVELS, 255 - LEVELS)


def _solarize_add(share: float) -> Any:
    return np.where(LEVELS < 128, LEVELS + int(110 * abs(share)), LEVELS)


def _affine(matrix: Callable[[float, int, int], tuple[float, ...]]) -> Made:
    return lambda share, height, width: Operation("affine", numbers=matrix(share, height, width))


def _rotation(share: float, height: int, width: int) -> tuple[float, ...]:
    """Counter-clockwise about the middle, by up to 30 degrees."""
    angle = -math.radians(30 * share)
    a, b, d, e = math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle)
    x, y = width / 2, height / 2
    return a, b, x - a * x - b * y, d, e, y - d * x - e * y


OPERATIONS: dict[str, Made] = {
    "autocontrast": _always("autocontrast"),
    "equalize": _always("equalize"),
    "invert": _table(lambda share: 255 - LEVELS),
    "rotate": _affine(_rotation),
    "posterize": _table(_posterize),
    "solarize": _table(_solarize),
    "solarize_add": _table(_solarize_add),
    "color": _enhanced("color"),
    "contrast": _enhanced("contrast"),
    "brightness": _table(_brightness),
    "sharpness": _enhanced("sharpness"),
    "shear_x": _affine(lambda share, height, width: (1, 0.3 * share, 0, 0, 1, 0)),
    "shear_y": _affine(lambda share, height, width: (1, 0, 0, 0.3 * share, 1, 0)),
    "translate_x": _affine(lambda share, height, width: (1, 0, 0.45 * share * width, 0, 1, 0)),
    "translate_y": _affine(lambda share, height, width: (1, 0, 0, 0, 1, 0.45 * share * height)),
}


@dataclass(frozen=True)
class RandAugment:
    """``count`` operations, each taken with ``chance``, of a normally drawn magnitude from 0 to 10."""

    magnitude: float = 9.0
    spread: float = 0.5
    count: int = 2
    chance: float = 0.5

    def operations(self, draws: Draws, height: int, width: int) -> list[Operation]:
        """Those of an image, in their order; "none" where one is not taken."""
        made, found = list(OPERATIONS.values()), []
        for _ in range(self.count):
            operation, taken = made[draws.integer(len(made))], draws.uniform() < self.chance
            drawn = self.magnitude + self.spread * float(draws.normals((1,))[0])
            sign = -1.0 if draws.uniform() < 0.5 else 1.0
            share = sign * min(MOST, max(0.0, drawn)) / MOST
            found.append(operation(share, height, width) if taken else Operation("none"))
        return found

    def __call__(self, draws: Draws, height: int, width: int) -> dict[str, NDArray[Any]]:
        """As ``image_operations.augment`` takes it: see :func:`arrays`."""
        return arrays(self.operations(draws, height, width))


def arrays(operations: list[Operation]) -> dict[str, NDArray[Any]]:
    """operation int64 [count], of ``KINDS``; table uint8 [count, 256]; factors float64 [count, 6]."""
    numbers = [(*one.numbers, *(0.0,) * (6 - len(one.numbers))) for one in operations]
    return {
        "operation": np.array([KINDS.index(one.kind) for one in operations], np.int64),
        "table": np.stack([one.table for one in operations]).astype(np.uint8),
        "factors": np.array(numbers, np.float64),
    }


@dataclass(frozen=True)
class Erase:
    """With this chance a box of ``area`` of the image becomes noise of ImageNet's mean and deviation."""

    chance: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)

    def __call__(self, draws: Draws, height: int, width: int) -> dict[str, NDArray[Any]]:
        """erased int64 [5]: top, left, bottom and right of the box, and the place among ``NOISE`` values where its noise begins;
        zeros where nothing is erased."""
        box = (0, 0, 0, 0, 0)
        if draws.uniform() < self.chance:
            for _ in range(10):
                area = height * width * draws.uniform(*self.area)
                ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
                high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
                if 0 < high < height and 0 < wide < width:
                    top, left = draws.integer(height - high + 1), draws.integer(width - wide + 1)
                    box = (top, left, top + high, left + wide, draws.integer(NOISE))
                    break
        return {"erased": np.array(box, np.int64)}
