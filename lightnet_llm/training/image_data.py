"""Folders of images and latents that a classifier or denoiser trains on: found, checked, opened."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

from lightnet_data import autoencoders, sample_shards
from lightnet_data.autoencoders import PosteriorSamples
from lightnet_data.errors import DataError
from lightnet_data.image_dataset import ImageSamples, LatentSamples
from lightnet_data.image_transforms import CenterCrop, Chain, Grey, HorizontalFlip, RandomResizedCrop, Transform
from lightnet_data.rand_augment import Erase, RandAugment

from ..config.model import ImageConfig
from ..config.run import RunConfig
from ..errors import UserError

ORDER = 2  # changes when the sample at a position does
SCALES = (0.5, 2.0)  # standard deviations of scaled latents with which the process's noise makes sense


def image_of(config: RunConfig) -> ImageConfig:
    """The ``model.image`` of an image model."""
    assert config.model.image is not None
    return config.model.image


def folder_of(config: RunConfig) -> str:
    """``data.path``.

    Raises:
        UserError: it is not set, or not a folder.
    """
    made = "`lightnet data images SRC --output DIR`"
    if config.model.head == "denoiser":
        made += ", or from it `lightnet data latents`"
    if config.data.path is None:
        raise UserError(f"data.path is not set; name a folder written by {made}")
    if not Path(config.data.path).is_dir():
        raise UserError(f"data.path {config.data.path}: no such folder; write it with {made}")
    return config.data.path


def _kind(folder: str, config: RunConfig) -> str:
    """ "images" or "latents", checked against the model.

    Raises:
        UserError: of another kind, shape or scale, with more classes, or others than those of ``data.path``.
    """
    image, facts = image_of(config), sample_shards.load(folder)
    kind, names = str(facts["kind"]), sample_shards.class_names(folder)
    if len(names) > image.classes:
        raise UserError(f"{folder}: holds {len(names)} classes; set model.image.classes={len(names)} or more")
    if config.data.path is not None and sample_shards.is_samples(config.data.path):
        check_classes(folder, names, sample_shards.class_names(config.data.path))
    if kind == "images":
        if vae_of(config) is None and image.channels not in (1, 3):
            more = ", or give diffusion.vae to encode them" if config.model.head == "denoiser" else ""
            raise UserError(f"{folder}: holds images; set model.image.channels=3, or 1 to take them as grey{more}")
        return kind
    if vae_of(config) is not None:
        raise UserError(
            f"{folder}: holds latents, which no VAE encodes; leave out diffusion.vae, or name a folder of images"
        )
    if config.model.head == "classifier":
        raise UserError(
            f"{folder}: holds latents, head: classifier takes images; name a folder of lightnet data images"
        )
    latents, wanted = facts["latents"], [image.channels, *image.size]
    if list(latents["shape"][2:]) != wanted:
        channels, high, wide = latents["shape"][2:]
        raise UserError(
            f"{folder}: latents are {list(latents['shape'][2:])}, the model takes {wanted}; set "
            f"model.image.channels={channels} model.image.size=[{high},{wide}]"
        )
    check_scale(float(latents.get("scaled_std", 1.0)), folder, " and make them again with lightnet data latents")
    return kind


def check_scale(spread: float, where: str, then: str = "") -> None:
    """Refuse scaled latents whose standard deviation is far from the noise's.

    Raises:
        UserError: it is.
    """
    if not SCALES[0] <= spread <= SCALES[1]:
        raise UserError(
            f"{where}: scaled latents have a standard deviation of {spread:.3g}, and noise has 1; correct the VAE's "
            f"scaling_factor{then}"
        )


def vae_of(config: RunConfig) -> str | None:
    """``diffusion.vae``, of a denoiser."""
    return config.diffusion.vae if config.model.head == "denoiser" else None


@functools.lru_cache(maxsize=2)
def open_vae(path: str) -> Any:
    """``diffusion.vae``, float32 on the CPU.

    Raises:
        UserError: it is none.
    """
    try:
        return autoencoders.load(path)
    except DataError as error:
        raise UserError(f"diffusion.vae: {error}") from None


def _vae_facts(path: str, image: ImageConfig) -> autoencoders.Facts:
    """Of an autoencoder whose latents the model takes."""
    found = autoencoders.facts(open_vae(path))
    if found.channels != image.channels:
        raise UserError(
            f"diffusion.vae {path}: its latents have {found.channels} channels, the model takes {image.channels}; set "
            f"model.image.channels={found.channels}"
        )
    return found


def check_classes(folder: str, found: list[str], trained_on: list[str]) -> None:
    """Refuse a folder whose numbers stand for other classes than those of training.

    Raises:
        UserError: names the first class that differs.
    """
    pairs = itertools.zip_longest(found, trained_on)
    for number, (mine, its) in enumerate(pairs):
        if mine != its:
            raise UserError(
                f"{folder}: class {number} is {mine or 'none'}, in the training data {its or 'none'}; make it again with "
                "lightnet data images --classes FOLDER of the training data"
            )


def open_split(
    folder: str, split: str, config: RunConfig, training: bool
) -> ImageSamples | LatentSamples | PosteriorSamples:
    """The samples of a split: augmented and shuffled in training, else in stored order and cropped in the middle."""
    image, given = image_of(config), config.augmentation
    if _kind(folder, config) == "latents":
        mirrored = training and sample_shards.load(folder)["latents"]["shape"][0] == 2
        return LatentSamples(folder, split, config.train.seed, training, given.flip if mirrored else 0.0)
    size, vae = image.size, vae_of(config)
    if vae is not None:
        factor = _vae_facts(vae, image).factor
        size = size[0] * factor, size[1] * factor
    steps: list[Transform] = [CenterCrop(size, given.center_share)]
    if training:
        if given.crop_scale is not None:
            steps = [RandomResizedCrop(size, given.crop_scale, given.crop_ratio)]
        steps.append(HorizontalFlip(given.flip))
    steps += [Grey()] if image.channels == 1 and vae is None else []
    drawn: list[Any] = [RandAugment(given.randaugment)] if given.randaugment else []
    drawn += [Erase(given.erasing)] if given.erasing else []
    images = ImageSamples(folder, split, Chain(steps), config.train.seed, training, drawn if training else ())
    return images if vae is None else PosteriorSamples(images, (image.channels, *image.size))


def validation_locations(config: RunConfig) -> dict[str, str]:
    """Named validation sets as FOLDER/SPLIT: that of ``data.path``, where it has one, then ``data.validation``.

    Raises:
        UserError: one named in ``data.validation`` has no such split.
    """
    folder = folder_of(config)
    given = {"heldout": f"{folder}/validation"} if "validation" in sample_shards.load(folder)["splits"] else {}
    for name, place in config.data.validation.items():
        if name in given:
            raise UserError(
                f"data.validation.{name}: that name is a held-out split of the training data; choose another"
            )
        location = f"{place.rstrip('/')}/validation" if Path(place).is_dir() else place
        at, _, split = location.rpartition("/")
        if not sample_shards.is_samples(at) or split not in sample_shards.load(at)["splits"]:
            raise UserError(f"data.validation.{name}: {location} is no split; name a folder of images, or FOLDER/SPLIT")
        given[name] = location
    return given


def check(config: RunConfig) -> dict[str, Any]:
    """Open every split once; what a run must find again when it is resumed.

    Raises:
        UserError, DataError: something is missing, damaged or does not fit the model.
    """
    samples = open_split(folder_of(config), "train", config, True)
    if config.validation.interval:
        check_validation(config)
    digests = "".join(str(shard["sha256"]) for shard in samples.store.shards)
    latents: dict[str, Any] = {}
    if isinstance(samples, LatentSamples):  # of the manifest, not of the shards: other factors are other data
        scale, shift = samples.scaling_factor, samples.shift_factor
        latents = {"latents": {"scaling_factor": scale, "shift_factor": shift, "shape": samples.stored_shape}}
    if (vae := vae_of(config)) is not None:
        facts = _vae_facts(vae, image_of(config))
        shape = [1, 2, facts.channels, *image_of(config).size]
        scales = {"scaling_factor": facts.scaling_factor, "shift_factor": facts.shift_factor}
        latents = {"latents": {**scales, "shape": shape}, "vae": autoencoders.fingerprint(vae)[:16]}
    if config.model.head == "denoiser" and config.diffusion.prediction != "noise":  # weights mean something else
        latents["prediction"] = config.diffusion.prediction
    return {
        "samples": len(samples),
        "kind": samples.kind,
        "classes": samples.classes,
        "order": ORDER,
        "sha256": _short(digests),
        **latents,
    }


def _short(digests: str) -> str:
    import hashlib

    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def check_validation(config: RunConfig) -> None:
    """Find the validation sets, and open them if the run validates."""
    for location in validation_locations(config).values():
        if config.validation.interval:
            folder, _, split = location.rpartition("/")
            open_split(folder, split, config, False)


def epochs(config: RunConfig, samples: int) -> list[dict[str, Any]]:
    """As of :func:`.sources.epochs`, with images in place of tokens."""
    folder = folder_of(config)
    stored = int(sample_shards.load(folder)["splits"]["train"]["samples"])
    row = {"source": "train", "location": f"{folder}/train", "stored_samples": stored, "samples": samples}
    return [{**row, "share": 1.0, "epochs": round(samples / stored, 4)}]


def batch_around(stairs: tuple[tuple[int, int], ...], batch: int, position: int) -> tuple[int, int]:
    """First position and size of the batch that a global position belongs to; arguments as of ``Budget``."""
    start = before = 0
    for until, size in stairs:
        count = (until - before) * size
        if position < start + count:
            return start + (position - start) // size * size, size
        start, before = start + count, until
    return start + (position - start) // batch * batch, batch
