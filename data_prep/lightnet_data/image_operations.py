"""RandAugment's operations and erased boxes on batches of images, on the device where they are: Pillow's arithmetic as tensors.

Here, a batch at a time, and not one image after the other by Pillow: on a loader's core the two cost two thirds of reading and
cropping an image. What is done to an image is drawn by ``rand_augment``, a function of its (seed, epoch, number); images of one
kind of operation are taken together. Statistics and tables are integers and coordinates float64, so that results do not depend on
how a batch is cut, and are Pillow's but for values that its own roundings move by one.
docs/images.md says which of them kornia has, and how far off.
"""

import functools

import torch
from torch import Tensor

from lightnet_data.draws import Draws
from lightnet_data.rand_augment import KINDS, NOISE

GREY = (124, 116, 104)  # what shows where an image was moved away, and noise's mean: ImageNet's
DEVIATION = 57.0  # of noise
HAIR = 2.0**-10  # what is a whole number but for float32's rounding is not cut to the one below


def _luma(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    """ITU-R 601, int32, of int32."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@functools.lru_cache(maxsize=16)
def _grey(channels: int, device: torch.device) -> Tensor:
    """``GREY`` as float32 [C, 1, 1], its luma where there is one channel."""
    colour = torch.tensor(GREY, dtype=torch.int32)
    return (colour if channels == 3 else _luma(*colour)[None]).to(device, torch.float32).view(-1, 1, 1)


def _bytes(x: Tensor) -> Tensor:
    """Cut to 0 ... 255 and towards zero, as Pillow does."""
    return x.clamp(0, 255).to(torch.uint8)


def _through(images: Tensor, table: Tensor) -> Tensor:
    """Every value through a table, uint8 [n, C or 1, 256]."""
    wide = table.expand(-1, images.shape[1], -1)
    return wide.gather(2, images.flatten(2).long()).view_as(images)


def _histogram(images: Tensor) -> Tensor:
    """int64 [n, C, 256]."""
    values = images.flatten(2).long()
    return torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device).scatter_add_(
        2, values, torch.ones_like(values)
    )


def _table(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    return _through(images, table[:, None])


def _equalize(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    """Each channel's values as evenly often as whole values can be."""
    counts = _histogram(images)
    levels = torch.arange(256, device=images.device)
    last = torch.where(counts > 0, levels, -1).amax(-1, keepdim=True)
    step = (counts.sum(-1, keepdim=True) - counts.gather(2, last)) // 255
    before = counts.cumsum(-1) - counts
    spread = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    alone = (counts > 0).sum(-1, keepdim=True) <= 1
    return _through(images, torch.where(alone | (step == 0), levels, spread).to(torch.uint8))


def _autocontrast(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    """Each channel's darkest value to 0, its lightest to 255."""
    low, high = (edge.double()[..., None] for edge in images.flatten(2).aminmax(dim=-1))
    levels = torch.arange(256, device=images.device, dtype=torch.float64)
    scale = torch.full_like(low, 255.0) / (high - low).clamp(min=1)  # a number over a tensor would round twice
    spread = levels * scale + -low * scale
    return _through(images, _bytes(torch.where(high > low, spread, levels)))


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """other + factor (image - other), other int32."""
    factor, other = factors[:, 0].float().view(-1, 1, 1, 1), other.float()
    return _bytes(other + factor * (images.float() - other))


def _brightness_of(images: Tensor) -> Tensor:
    """int32 [n, 1, H, W]."""
    values = images.int()
    return values if images.shape[1] == 1 else _luma(*values.unbind(1))[:, None]


def _color(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, _brightness_of(images), factors)


def _contrast(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    luma = _brightness_of(images).flatten(1)
    mean = (luma.sum(1, dtype=torch.int64).double() / luma.shape[1] + 0.5).int()
    return _blend(images, mean.view(-1, 1, 1, 1), factors)


def _sharpness(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    """Against means of 3 x 3 pixels, the middle one five times; pixels of the edge stay."""
    values = smooth = images.int()
    height, width = images.shape[2:]
    if height > 2 and width > 2:
        middle = values[..., 1:-1, 1:-1]
        around = 4 * middle
        for y in range(3):
            for x in range(3):
                around = around + values[..., y : y + height - 2, x : x + width - 2]
        smooth = smooth.clone()
        smooth[..., 1:-1, 1:-1] = (2 * around + 13) // 26
    return _blend(images, smooth, factors)


def _cubic(values: list[Tensor], at: Tensor) -> Tensor:
    """Between the second and the third of four values, as Pillow's transforms do."""
    a, b, c, d = values
    return b + at * ((c - a) + at * ((2 * (a - b) + c - d) + at * (b - a + d - c)))


def _affine(images: Tensor, table: Tensor, factors: Tensor) -> Tensor:
    """Bicubic; grey where no pixel of the image is."""
    count, channels, height, width = images.shape
    a, b, c, d, e, f = factors.view(count, 6, 1, 1).unbind(1)
    columns = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    rows = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    across, down = a * columns + b * rows + c, d * columns + e * rows + f
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    across, down = across - 0.5, down - 0.5
    left, top = across.floor(), down.floor()
    right_of, below = (across - left)[:, None].float(), (down - top)[:, None].float()
    flat = images.flatten(2)

    def row(y: int) -> Tensor:
        start = (top.long() + y).clamp(0, height - 1) * width
        places = ((start + (left.long() + x).clamp(0, width - 1)).flatten(1)[:, None] for x in range(-1, 3))
        taken = [flat.gather(2, place.expand(-1, channels, -1)).view_as(images).float() for place in places]
        return _cubic(taken, right_of)

    moved = _cubic([row(y) for y in range(-1, 3)], below) + HAIR
    return _bytes(torch.where(inside[:, None], moved, _grey(channels, images.device)))


APPLY = {
    "table": _table,
    "equalize": _equalize,
    "autocontrast": _autocontrast,
    "color": _color,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "affine": _affine,
}


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for what that has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def augment(images: Tensor, operations: Tensor, tables: Tensor, factors: Tensor) -> Tensor:
    """RandAugment's operations, one after the other.

    Args:
        images: uint8 [B, C, H, W], C 3 or 1.
        operations: int64 [B, K] of ``KINDS``, on the host.
        tables: uint8 [B, K, 256]; factors: float64 [B, K, 6]; as of :class:`~lightnet_data.rand_augment.Operation`.

    Returns:
        uint8 [B, C, H, W].
    """
    for k in range(operations.shape[1]):
        order = operations[:, k].argsort(stable=True)
        counts = torch.bincount(operations[:, k], minlength=len(KINDS)).tolist()
        there, back = (_sent(x, images.device) for x in (order, order.argsort()))
        parts, first = [], 0
        images, table, numbers = images[there], tables[there, k], factors[there, k]
        for kind, count in zip(KINDS, counts, strict=True):
            part = slice(first, first + count)
            if count:
                parts.append(images[part] if kind == "none" else APPLY[kind](images[part], table[part], numbers[part]))
            first += count
        images = torch.cat(parts)[back] if parts else images
    return images


@functools.lru_cache(maxsize=8)
def _noise(device: torch.device) -> Tensor:
    """Standard normal values, float32 [``NOISE``]: everybody's the same."""
    return torch.from_numpy(Draws(0, 0, 0).normals((NOISE,))).to(device)


def erase(images: Tensor, erased: Tensor) -> Tensor:
    """Boxes of noise.

    Args:
        images: uint8 [B, C, H, W].
        erased: int64 [B, 5] on the host, as of :class:`~lightnet_data.rand_augment.Erase`.

    Returns:
        uint8 [B, C, H, W].
    """
    chosen = (erased[:, 2] > erased[:, 0]).nonzero().flatten()
    if not len(chosen):
        return images
    device, (_, channels, height, width) = images.device, images.shape
    rows, boxes = _sent(chosen, device), _sent(erased[chosen], device)
    top, left, bottom, right, start = (edge.view(-1, 1, 1, 1) for edge in boxes.unbind(1))
    y, x = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    places = torch.arange(channels * height * width, device=device).view(channels, height, width)
    noise = _noise(device)[(start + places) % NOISE]
    values = _grey(channels, device) + DEVIATION * noise
    return images.index_copy(0, rows, torch.where(inside, _bytes(values.round()), images[rows]))
