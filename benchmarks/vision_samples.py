"""How far a denoiser's samples are from held-out images, checkpoint by checkpoint, without guidance and with it.

    python benchmarks/vision_samples.py runs/fashion_mnist_pixels --features runs/fashion_mnist --output FILE.json

Every checkpoint that the run keeps draws the same images (by seed, class and number) with DDIM. Beside them stands what as many
real images of the training split reach: a distance of so few images is not 0 even of the same kind. A picture of it all goes to
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
    checkpoint: Path, given: argparse.Namespace, guidance: float, net: Any, real: Any, weights: str | None
) -> dict[str, Any]:
    """Figures of one checkpoint at one guidance."""
    loaded = images.load_denoiser(checkpoint, None, None, weights)
    wanted = [(label, number) for label in range(len(loaded.classes)) for number in range(given.per_class)]
    how = images.Sampler("ddim", given.steps, guidance, prediction=loaded.config.diffusion.prediction)
    began = time.perf_counter()
    pixels = images.as_pixels(images.draw(loaded.model, wanted, how, 100))
    row = {"step": loaded.step, "guidance": guidance, "seconds": round(time.perf_counter() - began, 1)}
    return {**row, **compare(net, look(net, batches(pixels)), real)}


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
    parser.add_argument("--reference", help="As of lightnet sample. [default: the held-out split of the run's data]")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--steps", type=int, default=50, help="Of DDIM.")
    parser.add_argument("--guidance", type=float, action="append", help="[default: 1 and 1.5]")
    parser.add_argument("--weights", choices=["trained", "ema"], help="[default: ema where the run keeps one]")
    parser.add_argument("--output", type=Path, help="The table as JSON.")
    given = parser.parse_args()
    checkpoints = sorted(path for path in (given.run / "checkpoints").glob("step_*") if path.is_dir())
    newest = images.load_denoiser(given.run)
    config, folder = newest.config, str(newest.config.data.path)
    assert config.model.image is not None
    shape = (config.model.image.size, config.augmentation.center_share)
    net = open_net(given.features)
    real = look(net, Reference(given.reference or folder, *shape))
    count = given.per_class * len(newest.classes)
    train = Reference(f"{folder}/train", *shape)
    chosen = np.random.default_rng(0).permutation(train.count)[:count]
    pixels = np.stack([train.samples[int(i)]["image"].transpose(1, 2, 0) for i in chosen])
    floor = compare(net, look(net, batches(pixels)), real)
    rows = []
    for checkpoint in checkpoints:
        for guidance in given.guidance or [1.0, 1.5]:
            rows.append(drawn_row(checkpoint, given, guidance, net, real, given.weights))
            shown = {k: round(v, 4) for k, v in rows[-1].items() if isinstance(v, (int, float))}
            print(json.dumps(shown), flush=True)
    draw(rows, floor, given.run / "distances.png")
    if given.output:
        facts = {"run": str(given.run), "sampler": f"ddim, {given.steps} steps", "torch": torch.__version__}
        facts |= {"classes": len(sample_shards.class_names(folder)), "date": time.strftime("%Y-%m-%d")}
        facts |= {"training_images": floor, "rows": rows}
        given.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
