"""The Inception net of 2015 that FID is defined by, from a file of its weights in PyTorch's names (Szegedy et al. 2015).

Names are torchvision's, as in the files published with pytorch-fid and torch-fidelity (``pt_inception-2015-12-05-6726825d.pth``).
torchvision itself is not used: it does not import beside every build of torch, and its net differs from that of 2015 in four
poolings (averages count no padding; the last block takes a maximum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 1008  # of the graph of 2015; torchvision's own weights have 1000
SIDE = 299
SPATIAL = 7  # channels whose places sFID looks at (Nash et al. 2021: the first seven)
POOLS = {
    "average": lambda x: functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False),
    "greatest": lambda x: functional.max_pool2d(x, 3, stride=1, padding=1),
    "halve": lambda x: functional.max_pool2d(x, 3, stride=2),
}
# A layer: name, channels, kernel (one side, or rows and columns). A step of a branch: layers that see the same and are joined.
Layer = tuple[str, int, Any]
Branch = Sequence[Layer | tuple[Layer, Layer]]


class Convolution(nn.Sequential):
    """Without bias, then batch norm and ReLU; sides stay as they are, or are about halved by a stride of 2."""

    def __init__(self, inputs: int, outputs: int, kernel: Any, stride: int = 1, pad: bool = True):
        sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding = tuple(side // 2 if pad else 0 for side in sides)
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)
        self.relu = nn.ReLU()


class Mixed(nn.Module):
    """Branches beside each other, and a pooling; all joined along channels in that order."""

    def __init__(self, inputs: int, branches: Sequence[Branch], pool: str, pooled: int = 0):
        super().__init__()
        self.pool, self.outputs = POOLS[pool], pooled or inputs
        self.steps: list[list[list[str]]] = []
        for branch in branches:
            channels, names = inputs, []
            for i, step in enumerate(branch):
                layers: Sequence[Any] = step if isinstance(step[0], tuple) else (step,)
                last = pool == "halve" and i == len(branch) - 1
                for name, outputs, kernel in layers:
                    self.add_module(
                        f"branch{name}", Convolution(channels, outputs, kernel, 2 if last else 1, pad=not last)
                    )
                names.append([f"branch{name}" for name, _, _ in layers])
                channels = sum(outputs for _, outputs, _ in layers)
            self.steps.append(names)
            self.outputs += channels
        self.branch_pool = Convolution(inputs, pooled, 1) if pooled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, outputs, H, W], or half the sides."""
        found = []
        for branch in self.steps:
            hidden = x
            for names in branch:
                hidden = torch.cat([getattr(self, name)(hidden) for name in names], 1)
            found.append(hidden)
        return torch.cat([*found, self.branch_pool(self.pool(x))], 1)


def _narrow(inputs: int, pooled: int) -> Mixed:
    """At 35 x 35."""
    wide = [("5x5_1", 48, 1), ("5x5_2", 64, 5)]
    twice = [("3x3dbl_1", 64, 1), ("3x3dbl_2", 96, 3), ("3x3dbl_3", 96, 3)]
    return Mixed(inputs, [[("1x1", 64, 1)], wide, twice], "average", pooled)


def _long(inner: int) -> Mixed:
    """At 17 x 17: rows and columns of seven in turn."""
    row, column = (1, 7), (7, 1)
    once = [("7x7_1", inner, 1), ("7x7_2", inner, row), ("7x7_3", 192, column)]
    sides = ((1, inner), (column, inner), (row, inner), (column, inner), (row, 192))
    twice = [(f"7x7dbl_{i}", channels, kernel) for i, (kernel, channels) in enumerate(sides, 1)]
    return Mixed(768, [[("1x1", 192, 1)], once, twice], "average", 192)


def _wide(inputs: int, pool: str) -> Mixed:
    """At 8 x 8: a row and a column of three beside each other."""
    once: Branch = [("3x3_1", 384, 1), (("3x3_2a", 384, (1, 3)), ("3x3_2b", 384, (3, 1)))]
    both = (("3x3dbl_3a", 384, (1, 3)), ("3x3dbl_3b", 384, (3, 1)))
    twice: Branch = [("3x3dbl_1", 448, 1), ("3x3dbl_2", 384, 3), both]
    return Mixed(inputs, [[("1x1", 320, 1)], once, twice], pool, 192)


class InceptionOutput(NamedTuple):
    """features [B, 2048] of the whole image; spatial [B, 7 * 17 * 17]; logits [B, 1008] without the last layer's bias, as
    Inception scores are made."""

    features: Tensor
    spatial: Tensor
    logits: Tensor


class Inception(nn.Module):
    """Takes uint8 [B, 3, H, W] of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, 2, pad=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _narrow(192, 32), _narrow(256, 64), _narrow(288, 64)
        thrice = [("3x3dbl_1", 64, 1), ("3x3dbl_2", 96, 3), ("3x3dbl_3", 96, 3)]
        self.Mixed_6a = Mixed(288, [[("3x3", 384, 3)], thrice], "halve")
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = (_long(inner) for inner in (128, 160, 160, 192))
        seven = [("7x7x3_1", 192, 1), ("7x7x3_2", 192, (1, 7)), ("7x7x3_3", 192, (7, 1)), ("7x7x3_4", 192, 3)]
        self.Mixed_7a = Mixed(768, [[("3x3_1", 192, 1), ("3x3_2", 320, 3)], seven], "halve")
        self.Mixed_7b, self.Mixed_7c = _wide(1280, "average"), _wide(2048, "greatest")
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, images: Tensor) -> InceptionOutput:
        """Of uint8 [B, 3, H, W]."""
        x = (resize(images.float(), SIDE) - 128.0) / 128.0
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(functional.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(functional.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))
        spatial = self.Mixed_6d.branch1x1(x)[:, :SPATIAL]  # mixed_6/conv of the graph
        x = self.Mixed_7a(self.Mixed_6e(self.Mixed_6d(x)))
        features = self.Mixed_7c(self.Mixed_7b(x)).mean((2, 3))
        return InceptionOutput(features, spatial.flatten(1), functional.linear(features, self.fc.weight))


def resize(images: Tensor, side: int) -> Tensor:
    """Bilinear as TensorFlow 1 does it, which all published figures rest on: pixel i of the output is at i * size / side.

    Args:
        images: float [B, C, H, W]; the result is [B, C, side, side].
    """
    rows, columns = (_weights(size, side).to(images) for size in images.shape[2:])
    return torch.einsum("oh,bchw,pw->bcop", rows, images, columns)


def _weights(size: int, side: int) -> Tensor:
    """[side, size]: how much of each pixel a pixel of the output is; places are fp32, as there."""
    places = torch.arange(side, dtype=torch.float32) * torch.tensor(size / side, dtype=torch.float32)
    low = places.long().clamp(max=size - 1)
    share, rows = places - low, torch.arange(side)
    found = torch.zeros(side, size)
    found[rows, low] += 1.0 - share
    found[rows, (low + 1).clamp(max=size - 1)] += share
    return found


def inception_of(weights: Any) -> Inception:
    """The net with weights of the published files.

    Args:
        weights: tensors by name.

    Raises:
        ValueError: weights of another net.
    """
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError("is no mapping of names to tensors")
    net = Inception()
    wanted = net.state_dict()
    known = {name: value for name, value in weights.items() if not name.startswith("AuxLogits.")}
    for name, value in wanted.items():
        if name.endswith("num_batches_tracked"):  # older files have none; it means nothing here
            known.setdefault(name, value)
        if name not in known:
            raise ValueError(f"has no {name}")
        if known[name].shape != value.shape:
            raise ValueError(f"has {name} of {list(known[name].shape)}, wanted is {list(value.shape)}")
    if more := sorted(known.keys() - wanted.keys()):
        raise ValueError(f"has {more[0]}, too")
    net.load_state_dict(known)
    return net.eval().requires_grad_(False)
