"""Augmentation on batches against Pillow's, one image at a time; nothing depends on how a batch is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import image_operations
from lightnet_data.draws import Draws
from lightnet_data.rand_augment import OPERATIONS, Erase, Operation, RandAugment, arrays
from PIL import Image

from . import pillow_operations

SHARES = (-1.0, -0.87, -0.3, 0.0, 0.3, 0.9, 1.0)
SIZES = [(1, 1, 3), (2, 5, 3), (3, 3, 1), (9, 14, 3), (40, 33, 1), (64, 48, 3)]
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def images_of(height: int, width: int, channels: int, kind: str = "noise") -> torch.Tensor:
    """uint8 [len(SHARES), C, H, W]."""
    random = np.random.default_rng([height, width, channels])
    shape = (len(SHARES), channels, height, width)
    values = random.integers(0, 256, shape, dtype=np.uint8)
    if kind == "smooth":
        values = (120 + 90 * np.sin(np.arange(width) / 7 + np.arange(height)[:, None] / 5)) * np.ones(shape)
        values = (values + random.normal(0, 3, shape)).clip(0, 255).astype(np.uint8)
    elif kind == "two values":
        values = np.where(values < 60, 30, 200).astype(np.uint8)
    elif kind == "one value":
        values = np.full(shape, 77, np.uint8)
    return torch.from_numpy(values)


def picture(x: torch.Tensor) -> Image.Image:
    return Image.fromarray(x[0].numpy() if len(x) == 1 else np.ascontiguousarray(x.permute(1, 2, 0).numpy()))


def applied(images: torch.Tensor, operations: list[list[Operation]]) -> torch.Tensor:
    each = [arrays(one) for one in operations]
    stacked = {name: torch.from_numpy(np.stack([one[name] for one in each])) for name in each[0]}
    return image_operations.augment(images, stacked["operation"], stacked["table"], stacked["factors"])


@pytest.mark.parametrize("kind", ["noise", "smooth", "two values", "one value"])
@pytest.mark.parametrize(("height", "width", "channels"), SIZES)
def test_operations_are_those_of_pillow(height: int, width: int, channels: int, kind: str) -> None:
    assert list(OPERATIONS) == list(pillow_operations.OPERATIONS)
    images = images_of(height, width, channels, kind)
    for name, made in OPERATIONS.items():
        if name == "color" and channels == 1:  # nothing to take from grey
            continue
        found = applied(images, [[made(share, height, width)] for share in SHARES])
        for i, share in enumerate(SHARES):
            wanted = pillow_operations.OPERATIONS[name](picture(images[i]), share)
            values = np.asarray(wanted).astype(np.int64)
            values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
            apart = np.abs(found[i].numpy().astype(np.int64) - values)
            if name in AFFINE:  # whole values, which Pillow's rounding cuts to the one below
                few = 0.1 if kind == "two values" else 0.006
                assert apart.max() <= 1 and apart.sum() <= max(3, few * apart.size), (name, share, apart.sum())
            else:
                assert not apart.any(), (name, share, apart.max(), (apart > 0).mean())


def test_grey_has_no_colour_to_change() -> None:
    images = images_of(9, 14, 1)
    assert torch.equal(applied(images, [[OPERATIONS["color"](share, 9, 14)] for share in SHARES]), images)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**40), rows=st.integers(1, 9), height=st.integers(1, 24), width=st.integers(1, 24))
def test_nothing_depends_on_the_batch(seed: int, rows: int, height: int, width: int) -> None:
    """Images alone, in a batch and in another order: the same; two operations are one after the other."""
    random = np.random.default_rng(rows)
    images = torch.from_numpy(random.integers(0, 256, (rows, 3, height, width), dtype=np.uint8))
    drawn = [RandAugment(9, chance=0.8).operations(Draws(seed, 0, i), height, width) for i in range(rows)]
    boxes = torch.stack([torch.from_numpy(Erase(0.6)(Draws(seed, 1, i), height, width)["erased"]) for i in range(rows)])
    whole = image_operations.erase(applied(images, drawn), boxes)
    order = torch.from_numpy(random.permutation(rows))
    again = image_operations.erase(applied(images[order], [drawn[i] for i in order]), boxes[order])
    assert torch.equal(again, whole[order]) and whole.dtype == torch.uint8
    for i in range(rows):
        first, second = drawn[i]
        step = applied(applied(images[i : i + 1], [[first]]), [[second]])
        assert torch.equal(image_operations.erase(step, boxes[i : i + 1])[0], whole[i])


def test_operations_are_drawn_as_often_as_said() -> None:
    found = [one for i in range(3000) for one in RandAugment().operations(Draws(1, 0, i), 8, 8)]
    taken = [one for one in found if one.kind != "none"]
    assert len(found) == 6000 and abs(len(taken) / 6000 - 0.5) < 0.03
    affine = [one for one in taken if one.kind == "affine"]
    assert abs(len(affine) / len(taken) - 5 / 15) < 0.04, "each of the fifteen as often"
    moved = np.array([one.numbers[2] for one in affine if one.numbers[0] == one.numbers[4] == 1 and one.numbers[2]])
    assert abs(np.abs(moved).mean() / (0.45 * 0.9 * 8) - 1) < 0.02 and abs((moved > 0).mean() - 0.5) < 0.1


def test_boxes_are_erased_as_often_as_said() -> None:
    images = torch.full((400, 3, 32, 32), 7, dtype=torch.uint8)
    boxes = torch.stack([torch.from_numpy(Erase(0.4)(Draws(1, 0, i), 32, 32)["erased"]) for i in range(400)])
    found = image_operations.erase(images, boxes)
    for i, (top, left, bottom, right, _) in enumerate(boxes.tolist()):
        inside = torch.zeros(32, 32, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert (found[i][:, ~inside] == 7).all()
    hit = (boxes[:, 2] > boxes[:, 0]).nonzero().flatten()
    assert abs(len(hit) / 400 - 0.4) < 0.07
    areas = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))[hit] / 32**2
    assert areas.min() > 0.01 and areas.max() < 0.36 and abs(areas.mean() - 0.17) < 0.03
    noises = []
    for i in hit.tolist():
        top, left, bottom, right, _ = boxes[i].tolist()
        noises.append(found[i][:, top:bottom, left:right].reshape(3, -1))
    noise = torch.cat(noises, 1).float()
    assert (noise.mean(1) - torch.tensor([124.0, 116, 104])).abs().max() < 3 and (noise.std(1) - 55).abs().max() < 4
    assert len({int(found[i][0, int(boxes[i, 0]), int(boxes[i, 1])]) for i in hit}) > 30, "each has noise of its own"
    assert torch.equal(image_operations.erase(images, boxes * 0), images)
