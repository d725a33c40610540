"""What an image classifier learns beside a linear probe of the pixels and ordinary attention in the same block.

    python benchmarks/vision_learning.py classify/fashion_mnist --output benchmarks/vision-learning-NAME-DATE.json
    python benchmarks/vision_learning.py classify/emoji train.steps=300           further arguments: overrides of the preset

All three see the same training split and are measured on the whole held-out one. ``lightnet train`` trains the preset, then the
same with ``mixer: softmax`` and as many steps as take the same time: processor seconds of a step (data left out, they are the
same) are measured in turn in one process, so that what else the machine does meets both. The probe is multinomial logistic
regression, its weight decay chosen on a tenth of the training split. A picture goes to RUN/peers.png, where ``lightnet report``
finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # imports in half the time; nothing is compiled here

import torch
from lightnet_eval.images import load_classifier, measure
from torch import Tensor
from torch.nn import functional

from lightnet_llm.config import load_config
from lightnet_llm.config.run import RunConfig
from lightnet_llm.models import build_model, initialize
from lightnet_llm.parallel.clock import Clock
from lightnet_llm.training.image_tasks import ClassifierTask

SOFTMAX = ["model.mixer=softmax", "model.lrpe=false"]
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ROUNDS = 15


def pixels_of(config: RunConfig, split: str) -> tuple[Tensor, Tensor]:
    """Pixels as the classifier's validation sees them, normed, float32 [N, C * H * W], and classes."""
    task = ClassifierTask(config)
    held = task.held_out(f"{config.data.path}/{split}")
    parts = []
    for first in range(0, held.samples_per_epoch, 1000):
        batch = task.collate([held[i] for i in range(first, min(first + 1000, held.samples_per_epoch))])
        parts.append((task.prepared(batch, False)[0].flatten(1), batch["labels"]))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def fitted(pixels: Tensor, labels: Tensor, classes: int, decay: float, rounds: int) -> Tensor:
    """Weights [features + 1, classes] of logistic regression; ``decay``: half the squared norm's weight beside the mean loss."""
    weights = torch.zeros(pixels.shape[1] + 1, classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=rounds, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(pixels @ weights[:-1] + weights[-1], labels)
        value = value + 0.5 * decay * weights[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def hits(pixels: Tensor, labels: Tensor, weights: Tensor, among: int = 1) -> float:
    """Share of images whose class is among the so many likeliest."""
    logits = pixels @ weights[:-1] + weights[-1]
    likeliest = logits.topk(min(among, logits.shape[1]), 1).indices
    return float((likeliest == labels[:, None]).any(1).double().mean())


def probe(config: RunConfig, rounds: int) -> dict[str, Any]:
    """The linear probe's row of the table."""
    assert config.model.image is not None
    classes = config.model.image.classes
    pixels, labels = pixels_of(config, "train")
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    kept, chosen = order[len(order) // 10 :], order[: len(order) // 10]
    fit, few = kept[:10_000], max(20, rounds // 3)  # the decay is chosen on fewer images than the probe is fitted to
    found = {d: hits(pixels[chosen], labels[chosen], fitted(pixels[fit], labels[fit], classes, d, few)) for d in DECAYS}
    decay = max(found, key=lambda d: (found[d], d))
    began = time.process_time()
    weights = fitted(pixels, labels, classes, decay, rounds)
    seconds = time.process_time() - began
    held, truth = pixels_of(config, "validation")
    return {
        "model": "linear probe",
        "parameters": weights.numel(),
        "steps": rounds,
        "seconds": round(seconds, 1),
        "weight_decay": decay,
        "top1": hits(held, truth, weights),
        "top5": hits(held, truth, weights, 5),
        "images": len(truth),
    }


def step_seconds(configs: dict[str, RunConfig]) -> dict[str, float]:
    """Median processor seconds of forward, loss, backward and AdamW of each configuration's model, measured in turn."""
    steps = {}
    for name, config in configs.items():
        task, model = ClassifierTask(config), build_model(config.model)
        initialize(model, 0)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        held = task.held_out(f"{config.data.path}/validation")
        batch = task.collate([held[i] for i in range(config.train.global_batch)])
        steps[name] = (task, model, optimizer, batch, [])
    for _ in range(ROUNDS + 2):
        for task, model, optimizer, batch, times in steps.values():
            began = time.process_time()
            task.loss(model, batch, Clock(0), True).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.process_time() - began)
    return {name: statistics.median(times[2:]) for name, (*_, times) in steps.items()}


def run(*arguments: str) -> None:
    """A command of ours."""
    subprocess.run([sys.executable, "-m", "lightnet_llm.cli", *arguments], check=True)


def trained(preset: str, overrides: list[str], name: str, seconds: float) -> dict[str, Any]:
    """Train, or find trained, and measure: a row of the table."""
    run("train", preset, "train.resume=auto", *overrides, f"train.name={name}")
    config = load_config(preset, [*overrides, f"train.name={name}"])
    folder = Path(config.train.output, name)
    loaded = load_classifier(folder, None, None, None)
    facts = measure(loaded)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [(row["step"], row["validation"]["heldout"]["top1"]) for row in rows if "validation" in row]
    return {
        "model": config.model.mixer,
        "run": str(folder),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "steps": loaded.step,
        "seconds": round(loaded.step * seconds, 1),
        "batch": config.train.global_batch,
        "top1": facts["top1"],
        "top5": facts["top5"],
        "loss": facts["loss"],
        "images": facts["images"],
        "curve": [{"step": step, "seconds": round(step * seconds, 1), "top1": top1} for step, top1 in curve],
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Top-1 over the time of training, the probe as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for row in rows:
        label = f"{row['model']}: {row['top1']:.2%}"
        if "curve" in row:
            axes.plot([p["seconds"] for p in row["curve"]], [p["top1"] for p in row["curve"]], marker="o", label=label)
        else:
            axes.axhline(row["top1"], color="grey", linestyle="--", label=label)
    axes.set(
        xlabel="processor seconds of training",
        ylabel="top-1, held out",
        title=f"legend: all {rows[0]['images']:,} held-out images",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, format="png")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*", help="As of lightnet train: train.steps=300, say.")
    parser.add_argument("--rounds", type=int, default=200, help="Iterations of the probe's L-BFGS.")
    parser.add_argument("--output", type=Path, help="The table as JSON.")
    given = parser.parse_intermixed_args()
    config = load_config(given.preset, given.overrides)
    peer = load_config(given.preset, [*given.overrides, *SOFTMAX])
    seconds = step_seconds({"lightnet": config, "softmax": peer})
    name = config.train.name or given.preset.rpartition("/")[2].removesuffix(".yaml")
    steps = round(config.train.steps * seconds["lightnet"] / seconds["softmax"])
    earlier = Path(config.train.output, f"{name}_softmax", "config.yaml")
    if earlier.is_file():  # its budget is what it was: no two measurements are alike
        steps = load_config(str(earlier)).train.steps
    rows = [
        trained(given.preset, given.overrides, name, seconds["lightnet"]),
        trained(
            given.preset, [*given.overrides, *SOFTMAX, f"train.steps={steps}"], f"{name}_softmax", seconds["softmax"]
        ),
        probe(config, given.rounds),
    ]
    print(f"{'':<14} {'parameters':>10} {'steps':>7} {'seconds':>8} {'top-1':>8} {'top-5':>8}")
    for row in rows:
        figures = f"{row['seconds']:>8.1f} {row['top1']:>8.2%} {row['top5']:>8.2%}"
        print(f"{row['model']:<14} {row['parameters']:>10,} {row['steps']:>7,} {figures}")
    draw(rows, Path(rows[0]["run"]) / "peers.png")
    if given.output:
        facts = {
            "preset": given.preset,
            "overrides": given.overrides,
            "machine": platform.processor() or platform.machine(),
        }
        facts |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        given.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
