"""What ``lightnet eval`` does with an image classifier."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..errors import UserError
from .output import replacing
from .sample import size_of


def measure_images(
    checkpoint: str,
    location: str | None,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    weights: str,
    output: Path | None,
    as_json: bool,
    size: str | None = None,
) -> None:
    """Top-1 and top-5 on a split; ``output``: all figures as JSON, or the confusion matrix as ``.png``.

    ``size``: HxW that images are cropped to, other than in training.
    """
    from lightnet_data import sample_shards
    from lightnet_eval.images import draw_confusion, load_classifier, measure
    from tqdm import tqdm

    if location is not None and Path(location).is_dir():
        location = f"{location.rstrip('/')}/validation"
    if location is not None and not sample_shards.is_samples(location.rpartition("/")[0]):
        raise UserError(f"--data {location}: name a folder of lightnet data images, or FOLDER/SPLIT")
    loaded = load_classifier(checkpoint, device, dtype, weights)
    step, image = loaded.step, loaded.config.model.image
    assert image is not None
    wanted = size_of(size, image.patch)
    with tqdm(file=sys.stderr, leave=False, delay=1, desc="eval", unit="images") as bar:
        facts = measure(loaded, location, limit, bar.update, wanted)
    if output is not None:
        with replacing(output) as partial:
            if output.suffix == ".png":
                draw_confusion(facts, partial)
            else:
                partial.write_text(json.dumps({"step": step, **facts}, indent=1) + "\n", encoding="utf-8")
    of = "" if wanted is None else f"{wanted[0]} x {wanted[1]} pixels, "
    shown = f"{facts['images']:,} images of {of}step {step:,}: top-1 {facts['top1']:.2%}, top-5 {facts['top5']:.2%}, "
    click.echo(json.dumps({"step": step, **facts}) if as_json else f"{shown}{facts['loss']:.4f} nats")
