"""``lightnet data images``, ``vae`` and ``latents``, and what ``lightnet data inspect`` shows of images and latents."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from .output import replacing
from .progress import bar


def counting(stack: ExitStack, stage: str, quiet: bool) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """A bar that is told its total later: functions for the total and for each number done."""
    state: dict[str, Any] = {}

    def total(count: int) -> None:
        state["update"] = stack.enter_context(bar(stage, count, quiet, "images"))

    return total, lambda count: state["update"](count)


@click.command()
@click.argument("sources", metavar="[SPLIT=]SRC...", nargs=-1, required=True)
@click.option("--output", metavar="DIR", required=True, help="Folder to make.")
@click.option("--labels", metavar="FILE", help="Lines FILE CLASS, for images that are in no class folder.")
@click.option("--classes", metavar="DIR", help="Use the class numbers of another folder (its classes.json).")
@click.option(
    "--resize", type=int, metavar="N", help="Shrink the shorter side to N pixels. [default: bytes as they are]"
)
@click.option("--convert", is_flag=True, help="Take grey, transparent and CMYK images; they are read as RGB.")
@click.option(
    "--min-size", type=int, default=16, show_default=True, metavar="N", help="Least pixels of the shorter side."
)
@click.option("--holdout", type=float, default=0.0, show_default=True, help="Share of images for validation.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in the shards, and of --holdout.")
@click.option(
    "--shard-size", type=int, default=1024, show_default=True, metavar="MB", help="Megabytes of a shard, about."
)
@click.option("--workers", type=int, default=1, show_default=True, metavar="N", help="Processes that decode.")
@click.option("--skip-bad", is_flag=True, help="Count and report bad images instead of stopping at the first.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON, and only that, on stdout.")
def images(
    sources: tuple[str, ...],
    output: str,
    labels: str | None,
    classes: str | None,
    resize: int | None,
    convert: bool,
    min_size: int,
    holdout: float,
    seed: int,
    shard_size: int,
    workers: int,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Turn images into WebDataset shards with a class map and size statistics.

    SRC is a folder of class folders, a tar of them, a tar of tars, one a class, as ImageNet's, or WebDataset's: a tar in which
    KEY.cls stands beside KEY.jpg, or a folder of such tars. SPLIT= names its split ("train"). A folder that holds folders train
    and val (or validation, test) gives these splits. Every image is decoded once; a bad one stops the work.
    """
    from lightnet_data.errors import DataError
    from lightnet_data.images import ImageOptions, prepare_images

    if shard_size < 1:
        raise DataError(f"--shard-size {shard_size}: must be at least 1")
    options = ImageOptions(convert, skip_bad, min_size, resize, holdout, seed, shard_size << 20)
    with ExitStack() as stack:
        total, update = counting(stack, "images", as_json)
        result = _or_full_disk(
            output, lambda: prepare_images(sources, output, options, labels, classes, workers, note, update, total)
        )
    _show(result, output, as_json)


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--vae", required=True, metavar="DIR", help="Folder of a diffusers AutoencoderKL.")
@click.option("--output", metavar="DIR", required=True, help="Folder to make.")
@click.option(
    "--size", type=int, default=256, show_default=True, metavar="N", help="Pixels of the square images are cropped to."
)
@click.option("--flip/--no-flip", default=True, show_default=True, help="Also store the mirrored image's latent.")
@click.option("--batch", type=int, default=32, show_default=True, metavar="N", help="Images encoded at a time.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Of the encoder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON, and only that, on stdout.")
def latents(
    source: str, vae: str, output: str, size: int, flip: bool, batch: int, device: str, precision: str, as_json: bool
) -> None:
    """Encode the images of SRC (lightnet data images) with a VAE: mean and log-variance of each, in shards.

    A command that was stopped goes on behind the last finished shard.
    """
    from lightnet_data.latents import LatentOptions, prepare_latents

    options = LatentOptions(size, flip, precision, batch, device)
    with ExitStack() as stack:
        total, update = counting(stack, "latents", as_json)
        result = _or_full_disk(output, lambda: prepare_latents(source, output, vae, options, note, update, total))
    _show(result, output, as_json)


@click.command()
@click.argument("source", metavar="SRC")
@click.option("--output", metavar="DIR", required=True, help="Folder to make: a diffusers AutoencoderKL.")
@click.option("--size", type=int, required=True, metavar="N", help="Pixels of the square images are cropped to.")
@click.option("--factor", type=int, default=2, show_default=True, help="Pixels to a latent along each side: 2, 4, 8.")
@click.option("--channels", type=int, default=4, show_default=True, help="Of a latent.")
@click.option("--width", type=int, default=16, show_default=True, help="Channels of its first level.")
@click.option("--steps", type=int, default=1000, show_default=True, help="Updates.")
@click.option("--batch", type=int, default=32, show_default=True, metavar="N", help="Images of an update.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Falls to 0 by a cosine.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, order and noise.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
@click.option("--json", "as_json", is_flag=True, help="Print what was reached as JSON, and only that, on stdout.")
def vae(
    source: str,
    output: str,
    size: int,
    factor: int,
    channels: int,
    width: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Train a small autoencoder on the images of SRC (lightnet data images), for `lightnet data latents --vae DIR`.

    By absolute error and a KL divergence: for small pictures. Its scaling and shift factors are measured at the end.
    """
    from lightnet_data.autoencoder import VaeOptions, train_vae

    options = VaeOptions(size, factor, channels, width, steps, batch, learning_rate, seed=seed, device=device)
    options.check()
    with bar("vae", steps, as_json, "steps") as update:
        facts = _or_full_disk(output, lambda: train_vae(source, output, options, note, update))
    if as_json:
        click.echo(json.dumps({"output": output, **facts}))
        return
    side = size // factor
    click.echo(
        f"{output}: {facts['parameters']:,} parameters, latents of {channels} x {side} x {side}; absolute error "
        f"{facts['loss']:.4f} of values in [-1, 1], PSNR {facts['psnr']:.1f} dB on {facts['measured_on']}"
    )


def note(line: str) -> None:
    """A line on stderr that is no error."""
    click.echo(f"note: {line}", err=True)


def _or_full_disk(output: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from lightnet_data.errors import DataError

    try:
        return work()
    except OSError as error:  # a full disk, an output folder that may not be written
        where = error.filename or output
        raise DataError(f"{where}: {error.strerror or error}; {output} was not made") from None


def _show(result: dict[str, Any], output: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"output": output, **result}, ensure_ascii=False))
    else:
        show_facts(output, result)


def show_facts(folder: str, facts: dict[str, Any]) -> None:
    """Print what a manifest of images or latents says."""
    kind = facts["kind"]
    click.echo(f"{folder}: {facts['samples']:,} {kind} of {facts['classes']:,} classes")
    for name, split in facts["splits"].items():
        size = sum(shard["bytes"] for shard in split["shards"])
        fewest, most = min(split["class_counts"]), max(split["class_counts"])
        click.echo(
            f"  {name}: {split['samples']:,} in {len(split['shards']):,} shards, {size:,} bytes; "
            f"{fewest:,} to {most:,} a class"
        )
        for what, values in split.get("sizes", {}).items():
            low, high, median, mean = (f"{values[key]:,.6g}" for key in ("min", "max", "median", "mean"))
            click.echo(f"    {what.replace('_', ' ')}: {low} to {high}, median {median}, mean {mean}")
    if kind == "latents":
        latent = facts["latents"]
        click.echo(
            f"  {latent['dtype']} {latent['shape']}, scaling factor {latent['scaling_factor']:g}; scaled: "
            f"mean {latent['scaled_mean']:.3f}, standard deviation {latent['scaled_std']:.3f}"
        )
    if facts.get("modes", {}).keys() - {"RGB"}:
        click.echo("  modes: " + ", ".join(f"{count:,} {mode}" for mode, count in facts["modes"].items()))
    for bad, entry in facts.get("skipped", {}).items():
        click.echo(f"  skipped, {bad}: {entry['count']:,} (first: {entry['first']})")
    if facts.get("ignored_files"):
        click.echo(
            "  not read: " + ", ".join(f"{count:,} {suffix}" for suffix, count in facts["ignored_files"].items())
        )


def inspect_samples(folder: str, split: str, seed: int, output: Path | None, as_json: bool) -> None:
    """Facts of a folder of images or latents; with ``output`` a sheet of images, or of latents' channels."""
    from lightnet_data import sample_shards

    facts = sample_shards.load(folder)
    names = sample_shards.class_names(folder)
    if output is not None:
        from lightnet_data.inspection_picture import sheet

        store = sample_shards.SampleStore(folder, split)
        with replacing(output) as partial:
            sheet(store, names, seed, partial)
        facts["picture"] = str(output)
    if as_json:
        click.echo(json.dumps({"folder": folder, "class_names": names, **facts}, ensure_ascii=False))
        return
    show_facts(folder, facts)
    counts = facts["splits"].get(split, {}).get("class_counts", [])
    ordered = sorted(zip(counts, names, strict=True), reverse=True)
    shown = ordered if len(ordered) <= 12 else [*ordered[:6], *ordered[-6:]]
    for count, name in shown:
        click.echo(f"    {name}: {count:,}")
    if output is not None:
        click.echo(str(output))
