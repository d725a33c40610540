"""``lightnet sample``: draw a grid of images from a denoiser's checkpoint."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import click

from ..errors import UserError
from .output import replacing, writable, writable_picture


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--output", metavar="FILE.png", default="samples.png", show_default=True, help="The grid, a row a class.")
@click.option("--npz", metavar="FILE", help="Also every image: uint8 [N, H, W, 3] `images` and int64 `labels`.")
@click.option("--classes", metavar="LIST", help="Names or numbers with commas, or none. [default: the first ten]")
@click.option("--per-class", type=click.IntRange(min=1), default=8, show_default=True, help="Images of each class.")
@click.option("--sampler", type=click.Choice(["ddpm", "ddim"]), default="ddpm", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Passes of the model. [default: 250 for ddpm, 50 for ddim]")
@click.option("--guidance", type=float, default=1.0, show_default=True, help="1 is none; 4 is usual for pictures.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same images.")
@click.option("--size", metavar="HxW", help="Pixels (of latents) instead of those trained on, in whole patches.")
@click.option("--vae", metavar="DIR", help="AutoencoderKL that decodes latents. [default: the run's diffusion.vae]")
@click.option("--weights", type=click.Choice(["trained", "ema"]), help="[default: ema where the run keeps one]")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Changes no image.")
@click.option("--device", help="cpu, cuda, cuda:1 ... [default: the first GPU]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="[default: as trained; fp32 on the CPU]")
@click.option(
    "--reference", metavar="DIR|NPZ", help="Real images, DIR[/SPLIT]: also say how far from them all classes are."
)
@click.option("--features", metavar="RUN|FILE", help="With --reference: a classifier's run, or a file of Inception.")
@click.option("--figures", metavar="FILE", help="With --reference: the figures as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def sample(
    checkpoint: str,
    output: str,
    npz: str | None,
    classes: str | None,
    per_class: int,
    sampler: str,
    steps: int | None,
    guidance: float,
    seed: int,
    size: str | None,
    vae: str | None,
    weights: str | None,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    reference: str | None,
    features: str | None,
    figures: str | None,
    as_json: bool,
) -> None:
    """Draw images from CHECKPOINT (a run folder or a step's folder of head: denoiser).

    Under torchrun every rank draws its share, on a GPU of its own where there are as many; the images are the same.

    With --reference and --features: the Frechet distance from real images, class score, precision and recall in the features
    of the net named; of Inception's these are FID, sFID and Inception score. The grid then shows eight of ten classes.
    """
    import numpy as np
    import torch
    from PIL import Image
    from tqdm import tqdm

    from ..inference import images

    place = _Place()
    picture = writable_picture("--output", output)
    arrays, table = writable("--npz", npz), writable("--figures", figures)
    files = [path.resolve() for path in (picture, arrays, table) if path is not None]
    if len(set(files)) < len(files):
        raise UserError("--output, --npz and --figures name one file twice; give each its own")
    if not math.isfinite(guidance):
        raise UserError(f"--guidance {guidance}: must be a number, 1 for none")
    if (reference is None) != (features is None) or (figures is not None and reference is None):
        raise UserError("--reference, --features go together, and --figures with both; give what is missing")
    loaded = images.load_denoiser(checkpoint, device or place.device, dtype, weights)
    image = loaded.config.model.image
    assert image is not None
    latent = bool(loaded.latents)
    vae = vae or (loaded.config.diffusion.vae if latent else None)
    if latent and vae is None:
        raise UserError(
            f"{checkpoint}: draws latents; name the folder of the AutoencoderKL they were made with: --vae DIR"
        )
    if not latent and vae is not None:
        raise UserError(f"{checkpoint}: draws pixels, which no VAE decodes; leave out --vae")
    trained = min(len(loaded.classes) or image.classes, image.classes)
    default = [str(number) for number in range(trained if reference else min(10, image.classes))]
    numbers = images.class_numbers(classes.split(",") if classes else default, loaded)
    steps = steps if steps is not None else (250 if sampler == "ddpm" else 50)
    prediction = loaded.config.diffusion.prediction
    how = images.Sampler(sampler, steps, guidance, seed, clip=not latent, prediction=prediction)
    how.scheduler()
    coder = None if vae is None else images.open_vae(vae, image.channels, loaded.model.head.weight.device)
    against = None
    if reference is not None and features is not None and not place.rank:  # before the work: it may not be there
        against = _Against(reference, features, device or place.device)
        against.check(len(numbers) * per_class)
    wanted = [(label, number) for label in numbers for number in range(per_class)]
    mine = wanted[place.rank :: place.size]
    with tqdm(
        total=steps * len(mine), file=sys.stderr, leave=False, delay=1, desc="sample", disable=place.rank > 0
    ) as bar:
        drawn = images.draw(loaded.model, mine, how, batch_size, size_of(size, image.patch), bar.update)
    if coder is not None and mine:
        drawn = images.decode(drawn, coder, loaded.latents)
    if not torch.isfinite(drawn).all():
        raise UserError(
            f"{checkpoint}: step {loaded.step} draws what is not finite; try --dtype fp32, another --guidance or step"
        )
    pixels = place.together(images.as_pixels(drawn), len(wanted))
    if pixels is None:
        return
    if arrays is not None:
        with replacing(arrays) as partial, partial.open("wb") as file:  # given a name, numpy would add .npz to it
            np.savez_compressed(file, images=pixels, labels=np.array([label for label, _ in wanted]))
    facts: dict[str, Any] = {"checkpoint": checkpoint, "step": loaded.step, "output": output, "images": len(wanted)}
    facts |= {"sampler": sampler, "steps": steps, "guidance": guidance, "seed": seed, "classes": numbers}
    shown, columns = pixels, per_class
    if against is not None:
        share = None if latent else loaded.config.augmentation.center_share
        facts["figures"] = against.figures(pixels, share)
        if table is not None:
            with replacing(table) as partial:
                partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        columns = min(per_class, 8)
        shown = pixels.reshape(len(numbers), per_class, *pixels.shape[1:])[:10, :columns].reshape(-1, *pixels.shape[1:])
    assert picture is not None
    with replacing(picture) as partial:
        Image.fromarray(images.grid(shown, columns)).save(partial, "PNG")
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{output}: {len(wanted)} images of step {loaded.step:,}, a row a class")
    if "figures" in facts:
        click.echo(_shown(facts["figures"]))


def _shown(figures: dict[str, Any]) -> str:
    """One line of figures that are there."""
    values = {name: value for name, value in figures.items() if isinstance(value, float) and "deviation" not in name}
    listed = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items())
    counts = f"{figures['images']:,} images against {figures['reference_images']:,}"
    return f"in features of {figures['features']}, {counts}: {listed}"


class _Against:
    """Real images and the net that looks at them and at the drawn ones."""

    def __init__(self, reference: str, features: str, device: str | None) -> None:
        from lightnet_eval.features import Reference, open_net

        self.reference, self.net = reference, open_net(features, device)
        self.count = Reference(reference, (1, 1), 1.0).count  # is there

    def check(self, drawn: int) -> None:
        """Refuse so few images, drawn or real, that none has the neighbour that recall asks for."""
        from lightnet_eval.distances import NEIGHBOUR

        least = NEIGHBOUR + 1
        if drawn < least:
            raise UserError(
                f"--reference: {drawn} drawn images are too few to compare; draw {least} or more (--per-class)"
            )
        if self.count < least:
            raise UserError(f"--reference {self.reference}: {self.count} images are too few; give {least} or more")

    def figures(self, pixels: Any, center_share: float | None) -> dict[str, Any]:
        """Of uint8 [N, H, W, 3]."""
        from lightnet_eval.features import Reference, batches, compare, look
        from tqdm import tqdm

        real = Reference(self.reference, pixels.shape[1:3], center_share)
        with tqdm(total=real.count + len(pixels), file=sys.stderr, leave=False, delay=1, desc="figures") as bar:
            return compare(self.net, look(self.net, batches(pixels), bar.update), look(self.net, real, bar.update))


def size_of(given: str | None, patch: int) -> tuple[int, int] | None:
    """Height and width of ``--size``.

    Raises:
        UserError: not a size, or not one of whole patches.
    """
    if given is None:
        return None
    high, _, wide = given.partition("x")
    if not (high.isdecimal() and wide.isdecimal()) or int(high) < 1 or int(wide) < 1:
        raise UserError(f"--size {given}: must be HEIGHTxWIDTH, such as 32x48")
    if int(high) % patch or int(wide) % patch:
        raise UserError(f"--size {given}: not made of whole patches of {patch}; use multiples of it")
    return int(high), int(wide)


class _Place:
    """This process among those of torchrun; alone without it."""

    def __init__(self) -> None:
        import os

        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device: str | None = None
        if self.size > 1:
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")  # what travels is finished images
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if torch.cuda.device_count() > local:
                self.device = f"cuda:{local}"

    def together(self, pixels: Any, count: int) -> Any:
        """All images in order on rank 0, None elsewhere."""
        if self.size == 1:
            return pixels
        import numpy as np
        import torch.distributed as dist

        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(pixels, parts)
        dist.destroy_process_group()
        if parts is None:
            return None
        whole = np.empty((count, *pixels.shape[1:]), np.uint8)
        for rank, part in enumerate(parts):
            if len(part):  # nothing drawn is nothing decoded: of a latent's shape
                whole[rank :: self.size] = part
        return whole
