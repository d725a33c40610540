"""How far a denoiser's samples are from held-out images, checkpoint by checkpoint, without guidance and with it.

    python benchmarks/vision_samples.py runs/fashion_mnist_pixels --features runs/fashion_mnist --output FILE.json
    python benchmarks/vision_samples.py runs/fashion_mnist_latents --vae data/fashion-mnist-vae --images data/fashion-mnist \
        --features runs/fashion_mnist --output FILE.json

Every checkpoint that the run keeps draws the same images (by seed, class and number) with DDIM. Beside them stands what as many
real images of the training split reach: a distance of so few images is not 0 even of the same kind; of latents also what these
very images reach once the VAE has encoded and decoded them, the best that a denoiser can do. A picture of it all goes to
RUN/distances.png, where ``lightnet report`` finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here

import numpy as np
import torch
from lightnet_data import sample_shards
from lightnet_eval.features import Reference, batches, compare, look, open_net

from lightnet_llm.inference import images


def drawn_row(
    checkpoint: Path, given: argparse.Namespace, guidance: float, net: Any, real: Any, coder: Any
) -> dict[str, Any]:
    """Figures of one checkpoint at one guidance."""
    loaded = images.load_denoiser(checkpoint, None, None, given.weights)
    wanted = [(label, number) for label in range(len(loaded.classes)) for number in range(given.per_class)]
    prediction = loaded.config.diffusion.prediction
    how = images.Sampler("ddim", given.steps, guidance, clip=coder is None, prediction=prediction)
    began = time.perf_counter()
    drawn = images.draw(loaded.model, wanted, how, 100)
    pixels = images.as_pixels(drawn if coder is None else images.decode(drawn, coder, loaded.latents, 100))
    row = {"step": loaded.step, "guidance": guidance, "seconds": round(time.perf_counter() - began, 1)}
    return {**row, **compare(net, look(net, batches(pixels)), real)}


@torch.no_grad()
def through(coder: Any, pixels: Any) -> Any:
    """Pixels, uint8 [N, H, W, 3], encoded and decoded."""
    found = []
    for part in torch.from_numpy(pixels).split(100):
        values = part.permute(0, 3, 1, 2).to(coder.device, torch.float32) / 127.5 - 1.0
        found.append(coder.decode(coder.encode(values).latent_dist.mean).sample.cpu())
    return images.as_pixels(torch.cat(found))


def draw(rows: list[dict[str, Any]], floor: dict[str, Any], path: Path) -> None:
    """The distance over steps, a line for each guidance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    key = "fid" if "fid" in floor else "frechet_distance"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for guidance in sorted({row["guidance"] for row in rows}):
        mine = [row for row in rows if row["guidance"] == guidance]
        label = "no guidance" if guidance == 1 else f"guidance {guidance:g}"
        axes.plot([row["step"] for row in mine], [row[key] for row in mine], marker="o", label=label)
    axes.axhline(floor[key], color="grey", linestyle="--", label=f"as many training images: {floor[key]:.3g}")
    axes.set(xlabel="step", ylabel=key.replace("_", " "), title=f"features of {floor['features']}", yscale="log")
    axes.title.set_fontsize(9)
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110, format="png")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path)
    parser.add_argument("--features", required=True, help="As of lightnet sample.")
    parser.add_argument("--reference", help="As of lightnet sample. [default: the held-out split of the images]")
    parser.add_argument(
        "--images", help="Folder of the images; of latents those they were made of. [default: the run's]"
    )
    parser.add_argument("--vae", help="Of a run on latents, as of lightnet sample.")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--steps", type=int, default=50, help="Of DDIM.")
    parser.add_argument("--guidance", type=float, action="append", help="[default: 1 and 1.5]")
    parser.add_argument("--weights", choices=["trained", "ema"], help="[default: ema where the run keeps one]")
    parser.add_argument("--output", type=Path, help="The table as JSON.")
    given = parser.parse_args()
    checkpoints = sorted(path for path in (given.run / "checkpoints").glob("step_*") if path.is_dir())
    newest = images.load_denoiser(given.run)
    config, folder = newest.config, given.images or str(newest.config.data.path)
    assert config.model.image is not None
    if bool(newest.latents) != bool(given.vae and given.images):
        parser.error("a run on latents wants --vae and --images, another one has none of them")
    shape: tuple[Any, float | None] = (config.model.image.size, config.augmentation.center_share)
    coder = None
    if given.vae:
        coder = images.open_vae(given.vae, config.model.image.channels, newest.model.head.weight.device)
        factor = 2 ** (len(coder.config.block_out_channels) - 1)
        shape = (tuple(side * factor for side in config.model.image.size), None)
    net = open_net(given.features)
    real = look(net, Reference(given.reference or folder, *shape))
    count = given.per_class * len(newest.classes)
    train = Reference(f"{folder}/train", *shape)
    chosen = np.random.default_rng(0).permutation(train.count)[:count]
    pixels = np.stack([train.samples[int(i)]["image"].transpose(1, 2, 0) for i in chosen])
    floor = compare(net, look(net, batches(pixels)), real)
    coded = None if coder is None else compare(net, look(net, batches(through(coder, pixels))), real)
    rows = []
    for checkpoint in checkpoints:
        for guidance in given.guidance or [1.0, 1.5]:
            rows.append(drawn_row(checkpoint, given, guidance, net, real, coder))
            shown = {k: round(v, 4) for k, v in rows[-1].items() if isinstance(v, (int, float))}
            print(json.dumps(shown), flush=True)
    draw(rows, floor, given.run / "distances.png")
    if given.output:
        facts = {"run": str(given.run), "sampler": f"ddim, {given.steps} steps", "torch": torch.__version__}
        facts |= {"classes": len(sample_shards.class_names(folder)), "date": time.strftime("%Y-%m-%d")}
        facts |= {"training_images": floor, "rows": rows}
        if coded is not None:
            facts["training_images_through_the_vae"] = coded
        given.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
