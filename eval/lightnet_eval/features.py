"""Nets whose features tell how far samples are from real images: an Inception file that the user has, or a classifier of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightnet_data import pictures, sample_shards
from lightnet_data.draws import Draws
from lightnet_data.image_dataset import ImageSamples
from lightnet_data.image_transforms import CenterCrop, Chain, Grey, Transform
from numpy.typing import NDArray
from torch import Tensor

from lightnet_llm.errors import UserError
from lightnet_llm.inference.load import choose_device

from .distances import NEIGHBOUR, Moments, class_score, frechet, precision_recall
from .images import load_classifier
from .inception import SPATIAL, inception_of

Pixels = NDArray[np.uint8]
BATCH = 64
UNDRAWN = Draws(0, 0, 0, 0)  # for transforms that draw nothing


class Seen(NamedTuple):
    """What a net makes of B images.

    Attributes:
        features: float32 [B, F], of the whole image.
        spatial: float32 [B, S], some channels at every place; None of a net that gives none.
        probabilities: float32 [B, classes]; None of a net that gives none.
    """

    features: Tensor
    spatial: Tensor | None
    probabilities: Tensor | None


class FeatureNet(NamedTuple):
    """A net by its name.

    Attributes:
        name: what the figures are said to be of.
        inception: whether they are FID and its kin.
        see: from pixels, uint8 [B, H, W, 3].
    """

    name: str
    inception: bool
    see: Callable[[Pixels], Seen]


def open_net(path: str | Path, device: str | None = None) -> FeatureNet:
    """Inception's weights, a TorchScript file, taken for Inception, or a run (or a checkpoint) of an image classifier.

    Raises:
        UserError: there is none, or weights are of another net.
    """
    path = Path(path)
    if path.is_dir():
        return _classifier(path, device)
    if not path.is_file():
        raise UserError(f"--features {path}: no such file or folder; name a run of a classifier, or Inception's file")
    place = choose_device(device)
    try:
        net = torch.jit.load(str(path), map_location=place).eval()
    except RuntimeError:
        return FeatureNet(path.name, True, _weighted(path, place))
    return FeatureNet(path.name, True, _scripted(net, str(path), place))


def _weighted(path: Path, device: torch.device) -> Callable[[Pixels], Seen]:
    """The net of 2015 with weights of the files published with pytorch-fid and torch-fidelity: see ``inception``."""
    try:
        net = inception_of(torch.load(path, map_location="cpu", weights_only=True)).to(device)
    except Exception as error:  # torch.load raises RuntimeError, UnpicklingError, EOFError, ValueError and others
        said = str(error) if type(error) is ValueError else "neither TorchScript nor tensors saved with torch.save"
        raise UserError(
            f"--features {path}: {said}; wanted: weights of the Inception net of 2015 by torchvision's names (1,008 classes, "
            "as published with pytorch-fid), another net by torch.jit.save, or a classifier's run"
        ) from None

    @torch.no_grad()
    def see(pixels: Pixels) -> Seen:
        given = net(torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).to(device))
        return Seen(given.features, given.spatial, given.logits.softmax(1))

    return see


def _scripted(net: Any, path: str, device: torch.device) -> Callable[[Pixels], Seen]:
    """A scripted net takes uint8 [B, 3, H, W] and sees to size and range itself.

    The one published with StyleGAN2-ADA (inception-2015-12-05.pt) has options for features and for probabilities without the
    last layer's bias, as Inception scores are made. Of others the result counts: features, or (features, logits), or
    (features, logits, spatial).
    """
    options = {argument.name for argument in net.forward.schema.arguments}
    published = {"return_features", "no_output_bias"} <= options

    @torch.no_grad()
    def see(pixels: Pixels) -> Seen:
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).to(device)
        if published:
            return Seen(
                net(images, return_features=True).flatten(1).float(), None, net(images, no_output_bias=True).float()
            )
        given = net(images)
        parts = list(given) if isinstance(given, (tuple, list)) else [given]
        parts += [None] * (3 - len(parts))
        if len(parts) > 3 or not isinstance(parts[0], Tensor) or parts[0].shape[:1] != images.shape[:1]:
            raise UserError(
                f"--features {path}: must give features [B, F], (features, logits) or (features, logits, spatial) of uint8 "
                "images [B, 3, H, W]"
            )
        features, logits, spatial = parts
        return Seen(
            features.flatten(1).float(),
            None if spatial is None else spatial.flatten(1).float(),
            None if logits is None else logits.float().softmax(1),
        )

    return see


def _classifier(path: Path, device: str | None) -> FeatureNet:
    """What the head sees, what it says, and the first channels of every token after half of the blocks."""
    loaded = load_classifier(path, device, "fp32", None)
    model, config = loaded.model, loaded.config
    assert config.model.image is not None
    place, given = model.head.weight.device, config.augmentation
    steps: list[Transform] = [CenterCrop(config.model.image.size, given.center_share)]
    crop = Chain([*steps, Grey()] if config.model.image.channels == 1 else steps)
    mean, std = (torch.tensor(values, device=place).view(-1, 1, 1) for values in (given.mean, given.std))
    caught: dict[str, Tensor] = {}
    model.layers[(config.model.layers - 1) // 2].register_forward_hook(
        lambda module, arguments, output: caught.update(tokens=output[0])
    )
    model.head.register_forward_hook(lambda module, arguments, output: caught.update(features=arguments[0]))

    @torch.no_grad()
    def see(pixels: Pixels) -> Seen:
        from PIL import Image

        cropped = np.stack([np.asarray(crop(Image.fromarray(image), UNDRAWN)) for image in pixels])
        channels_last = torch.from_numpy(cropped[..., None] if cropped.ndim == 3 else cropped).to(place)
        images = channels_last.permute(0, 3, 1, 2).float() / 255.0
        logits = model((images - mean) / std).logits
        return Seen(caught["features"], caught["tokens"][..., :SPATIAL].flatten(1), logits.softmax(1))

    return FeatureNet(f"{path} (classifier, step {loaded.step})", False, see)


@dataclass
class Look:
    """All that the figures need of one set of images."""

    moments: Moments = field(default_factory=Moments)
    spatial: Moments = field(default_factory=Moments)
    features: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Of a batch."""
        self.moments.add(seen.features)
        self.features.append(seen.features.cpu())
        if seen.spatial is not None:
            self.spatial.add(seen.spatial)
        if seen.probabilities is not None:
            self.probabilities.append(seen.probabilities.cpu())


class Reference:
    """Real images, read as they are asked for: a split of shards, or the arrays of an .npz file.

    Args:
        location: FOLDER/SPLIT, FOLDER (its validation split), or a file with uint8 [N, H, W, 3] ``images``, as ``lightnet
            sample --npz`` writes, or ``arr_0``, as ADM's reference batches have.
        size: height and width that images of shards are cropped to.
        center_share: as of the model's validation; None: as ``lightnet data latents`` crops to squares.

    Raises:
        UserError: no images there.
    """

    def __init__(self, location: str, size: tuple[int, int], center_share: float | None = None) -> None:
        self.arrays: Pixels | None = None
        if Path(location).is_file():
            self.arrays = _arrays(location)
            self.count = len(self.arrays)
            return
        if sample_shards.is_samples(location):
            location = f"{location.rstrip('/')}/validation"
        folder, _, split = location.rpartition("/")
        if not sample_shards.is_samples(folder) or split not in sample_shards.load(folder)["splits"]:
            raise UserError(
                f"--reference {location}: name a folder of lightnet data images, FOLDER/SPLIT, or a .npz file"
            )
        crop: Transform
        if center_share is None:
            crop = lambda image, draws: pictures.center_crop(image, size[0])  # noqa: E731
        else:
            crop = CenterCrop(size, center_share)
        self.samples = ImageSamples(folder, split, crop, shuffle=False)
        self.count = self.samples.samples_per_epoch

    def __iter__(self) -> Iterator[Pixels]:
        """Batches, uint8 [B, H, W, 3]."""
        for first in range(0, self.count, BATCH):
            if self.arrays is not None:
                yield self.arrays[first : first + BATCH]
            else:
                numbers = range(first, min(first + BATCH, self.count))
                yield np.stack([self.samples[i]["image"].transpose(1, 2, 0) for i in numbers])


def _arrays(path: str) -> Pixels:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = file["images" if "images" in file else "arr_0"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--reference {path}: holds no arrays `images` or `arr_0` ({error})") from None
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[3] != 3 or not len(found):
        raise UserError(f"--reference {path}: is {found.dtype} {list(found.shape)}; wanted is uint8 [N, H, W, 3]")
    images: Pixels = found
    return images


def look(net: FeatureNet, batches: Iterable[Pixels], progress: Callable[[int], object] = lambda count: None) -> Look:
    """See images, batches of uint8 [B, H, W, 3]."""
    found = Look()
    for batch in batches:
        found.add(net.see(batch))
        progress(len(batch))
    return found


def batches(images: Pixels) -> Iterator[Pixels]:
    """Of uint8 [N, H, W, 3]."""
    return (images[first : first + BATCH] for first in range(0, len(images), BATCH))


def compare(net: FeatureNet, drawn: Look, real: Look) -> dict[str, Any]:
    """Figures of drawn images: how far from the real ones, and (class score) by themselves.

    Raises:
        UserError: too few of either.

    Returns:
        features: the net's name; images and reference_images: counts; of Inception fid, sfid, inception_score, else
        frechet_distance, spatial_frechet_distance, class_score; class_score_deviation, precision, recall. None where a net
        does not give what a figure is made of.
    """
    names = ("fid", "sfid", "inception_score")
    if not net.inception:
        names = ("frechet_distance", "spatial_frechet_distance", "class_score")
    score: tuple[float | None, float | None] = (None, None)
    if drawn.probabilities:
        given = torch.cat(drawn.probabilities)  # drawn class by class, perhaps: a split of one class says nothing
        score = class_score(given[torch.randperm(len(given), generator=torch.Generator().manual_seed(0))])
    fewest = min(drawn.moments.count, real.moments.count)
    if fewest <= NEIGHBOUR:
        raise UserError(f"{fewest} images are too few to compare; draw {NEIGHBOUR + 1} or more (--per-class)")
    precision, recall = precision_recall(torch.cat(real.features), torch.cat(drawn.features))
    return {
        "features": net.name,
        "images": drawn.moments.count,
        "reference_images": real.moments.count,
        names[0]: frechet(drawn.moments, real.moments),
        names[1]: frechet(drawn.spatial, real.spatial) if drawn.spatial.count and real.spatial.count else None,
        names[2]: score[0],
        f"{names[2]}_deviation": score[1],
        "precision": precision,
        "recall": recall,
    }
