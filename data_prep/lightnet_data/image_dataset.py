"""Images and latents for training: the sample at a global position is a function of (seed, position) alone."""

import io
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data import pictures
from lightnet_data.draws import Draws
from lightnet_data.errors import DataError
from lightnet_data.image_transforms import Transform
from lightnet_data.sample_shards import SampleStore, class_names
from lightnet_data.shuffle import Permutation

Sample = dict[str, Any]
ARRAYS = {"box": "boxes", "noise": "noise", "kept": "kept", "posterior": "posterior"}
# Of pictures, those of partners too: what is done to them where the model is.
DRAWN = {"operation": "operations", "table": "tables", "factors": "factors", "erased": "erased"}
NUMBERS = {
    "label": "labels",
    "number": "numbers",
    "sample_id": "sample_ids",
    "timestep": "timesteps",
}
AUGMENTATION, LATENT, MIXING, NOISE, DRAWS = range(5)  # streams of draws
FURTHEST = 100.0  # a scaled latent has deviation 1: what reaches further is of another scale, or damaged


class _Samples(torch.utils.data.Dataset[Sample]):
    """Every sample of a split once an epoch, in an order drawn from (seed, epoch); positions have no end.

    Attributes:
        samples_per_epoch: samples of the split.
        classes: names by number.
    """

    kind: str

    def __init__(self, folder: str | Path, split: str, seed: int, shuffle: bool) -> None:
        self.store = SampleStore(folder, split, self.kind)
        self.classes = class_names(folder)
        self.seed, self.shuffle = seed, shuffle
        self.samples_per_epoch = len(self.store)
        if not self.samples_per_epoch:
            raise DataError(f"{folder}: split {split} holds no sample; make it again")
        outside = (self.store.labels < 0) | (self.store.labels >= len(self.classes))
        if outside.any():
            number, count = int(outside.argmax()), len(self.classes)
            raise DataError(
                f"{folder}/{split}: sample {number} is of class {self.store.labels[number]}, classes.json has {count}, 0 to "
                f"{count - 1}; restore both files or make the folder again"
            )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.samples_per_epoch

    def place(self, position: int) -> tuple[int, int]:
        """Epoch and number of the sample at a global position."""
        position = operator.index(position)
        if position < 0:
            raise IndexError(f"sample position {position} is negative")
        epoch, place = divmod(position, self.samples_per_epoch)
        return epoch, Permutation(self.samples_per_epoch, self.seed, epoch)(place) if self.shuffle else place


class ImageSamples(_Samples):
    """Images of shards made by ``lightnet data images``; map-style, a ``GlobalBatchSampler`` deals the positions.

    Args:
        folder: of the shards.
        split: "train", "validation", ...
        seed: with the position, all that a sample depends on.
        transform: from an RGB image (PIL) and the sample's draws to an RGB or grey image.
        drawn: from draws, height and width to further arrays of the sample: what is done to it later, in batches.
        shuffle: False gives samples in stored order (validation).
    """

    kind = "images"

    def __init__(
        self,
        folder: str | Path,
        split: str,
        transform: Transform | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drawn: Sequence[Callable[[Draws, int, int], dict[str, NDArray[Any]]]] = (),
    ) -> None:
        super().__init__(folder, split, seed, shuffle)
        self.transform, self.drawn = transform, drawn

    def __getitem__(self, position: int) -> Sample:
        """The sample at a global position.

        Returns:
            image: uint8 [3, H, W], or [1, H, W] where the transform makes it grey. label: its class. number: in the split.
            sample_id: the position. What ``drawn`` gives.

        Raises:
            DataError: a shard is missing or changed.
        """
        epoch, number = self.place(position)
        data, label = self.store.read(number)
        try:
            image = pictures.decode(data)
        except pictures.BadImage as error:
            where = f"{self.store.where(number)}: sample {number}"
            raise DataError(f"{where} {error}; the shard has changed, copy it again") from None
        if self.transform is not None:
            image = self.transform(image, Draws(self.seed, epoch, number, AUGMENTATION))
        values = np.asarray(image)
        pixels = np.ascontiguousarray(values[None] if values.ndim == 2 else values.transpose(2, 0, 1))
        sample = {"image": pixels, "label": label, "number": number, "sample_id": operator.index(position)}
        draws = Draws(self.seed, epoch, number, DRAWS)
        for draw in self.drawn:
            sample |= draw(draws, *pixels.shape[1:])
        return sample


class LatentSamples(_Samples):
    """Latents of shards made by ``lightnet data latents``, drawn from their distribution, shifted and scaled.

    Args:
        folder, split, seed, shuffle: as for ``ImageSamples``.
        flip: chance of the mirrored image's latent; 0 where none is stored.
    """

    kind = "latents"

    def __init__(self, folder: str | Path, split: str, seed: int = 0, shuffle: bool = True, flip: float = 0.5) -> None:
        super().__init__(folder, split, seed, shuffle)
        facts = self.store.manifest["latents"]
        self.stored_shape: list[int] = list(facts["shape"])
        self.shape: tuple[int, int, int] = tuple(self.stored_shape[2:])  # type: ignore[assignment]
        self.scaling_factor, self.shift_factor = float(facts["scaling_factor"]), float(facts["shift_factor"])
        if flip and self.stored_shape[0] != 2:
            raise DataError(f"{folder}: holds no mirrored latents; make them with --flip, or set flip to 0")
        self.flip = flip

    def stored(self, number: int) -> NDArray[np.float16]:
        """What is stored of a sample, fp16 [1 or 2, 2, C, h, w]."""
        data, where = self.store.read(number)[0], f"{self.store.where(number)}: sample {number}"
        try:
            array: NDArray[np.float16] = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            said = str(error).partition(chr(10))[0][:80]
            raise DataError(f"{where} is no stored latent ({said}); copy it again") from None
        if list(array.shape) != self.stored_shape:
            raise DataError(f"{where} is {list(array.shape)}, the manifest says {self.stored_shape}; copy it again")
        if not np.isfinite(array).all():
            raise DataError(f"{where} holds values that are not finite; copy it again, or make the latents again")
        return array

    def __getitem__(self, position: int) -> Sample:
        """The sample at a global position.

        Returns:
            latent: float32 [C, h, w]. label: its class. number: in the split. sample_id: the position.

        Raises:
            DataError: a shard is missing or changed, or the latent's scale is far from the noise's.
        """
        epoch, number = self.place(position)
        draws = Draws(self.seed, epoch, number, LATENT)
        mirrored = self.flip > 0 and draws.uniform() >= 1.0 - self.flip
        mean, logvar = self.stored(number)[int(mirrored)].astype(np.float32)
        latent = mean + np.exp(0.5 * logvar) * draws.normals(mean.shape)
        scaled = (latent - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)
        if not (furthest := float(np.abs(scaled).max())) <= FURTHEST:
            raise DataError(
                f"{self.store.where(number)}: sample {number} reaches {furthest:.4g} when scaled, where noise has deviation 1; "
                "copy it again, or correct the VAE's scaling_factor and make the latents again"
            )
        label = int(self.store.labels[number])
        return {"latent": scaled, "label": label, "number": number, "sample_id": operator.index(position)}


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """One micro-batch of samples as tensors.

    Args:
        samples: B samples of one kind and one size.

    Returns:
        images: uint8 [B, 3 or 1, H, W], or latents: float32 [B, C, h, w]. labels, numbers, sample_ids: int64 [B]. What is drawn
        for images: see ``image_operations``. What ``MixedImages``, ``NoisedSamples`` and ``PosteriorSamples`` add: boxes, kept,
        noise, posterior; int64 [B] other_labels, timesteps, and other_rows: places of partners among the images, where those
        that are not of the batch follow its own.

    Raises:
        DataError: images of different sizes.
    """
    name = "image" if "image" in samples[0] else "latent"
    batch, pictures = {}, list(samples)
    if "other" in samples[0]:
        rows = {sample["sample_id"]: row for row, sample in enumerate(samples)}
        others = [sample["other"] for sample in samples]
        for other in others:
            if rows.setdefault(other["sample_id"], len(pictures)) == len(pictures):
                pictures.append(other)
        batch["other_rows"] = torch.tensor([rows[other["sample_id"]] for other in others], dtype=torch.int64)
        batch["other_labels"] = torch.tensor([other["label"] for other in others], dtype=torch.int64)
    for sample in pictures:
        if sample[name].shape != pictures[0][name].shape:
            sizes = f"{list(pictures[0][name].shape)} and {list(sample[name].shape)} (sample {sample['number']})"
            raise DataError(f"a batch of {name}s of {sizes}; crop them to one size by a transform")
    for key, plural, given in (
        (name, f"{name}s", pictures),
        *((key, plural, pictures) for key, plural in DRAWN.items()),
        *((key, plural, samples) for key, plural in ARRAYS.items()),
    ):
        if key in samples[0]:
            batch[plural] = torch.from_numpy(np.stack([sample[key] for sample in given]))
    for key, plural in NUMBERS.items():
        if key in samples[0]:
            batch[plural] = torch.tensor([sample[key] for sample in samples], dtype=torch.int64)
    return batch
