"""Top-1 and top-5 of an image classifier on a split of its data, and which class it takes for which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightnet_llm.config import RunConfig
from lightnet_llm.inference.load import load_model_of_head
from lightnet_llm.models import ImageClassifier
from lightnet_llm.parallel.clock import Clock
from lightnet_llm.training.image_data import check_classes
from lightnet_llm.training.image_data import folder_of as data_folder
from lightnet_llm.training.image_tasks import ClassifierTask

BATCH = 64


class LoadedClassifier(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        model: in eval mode, without gradients.
        config: of the run that trained it.
        step: updates that gave the weights.
        classes: names by number, as of the training data then.
    """

    model: ImageClassifier
    config: RunConfig
    step: int
    classes: list[str]


def load_classifier(
    path: str | Path, device: str | None = None, dtype: str | None = None, weights: str | None = "trained"
) -> LoadedClassifier:
    """Load a classifier; arguments as of ``load_model_of_head``.

    Raises:
        UserError: no whole checkpoint there, or of another model.
    """
    model, config, manifest = load_model_of_head(path, ImageClassifier, "classifier", device, dtype, weights)
    step, classes = int(manifest.get("state", {}).get("step", 0)), list(manifest.get("data", {}).get("classes", []))
    return LoadedClassifier(model, config, step, classes)


@torch.no_grad()
def measure(
    loaded: LoadedClassifier,
    location: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda count: None,
    size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Figures of a split, by the crop and the numbers of validation in training.

    Args:
        location: FOLDER/SPLIT; None: the held-out split of the run's data.
        limit: only the first so many images.
        progress: told how many images were done.
        size: height and width of whole patches that images are cropped to, by the same rule; None: as in training. Positions
            are functions of rows and columns, so that any size has them.

    Raises:
        UserError: the split's numbers stand for other classes than those trained on.

    Returns:
        loss in nats, top1, top5, images, size, class_names, and confusion[true class][predicted class] in images.
    """
    model, config = loaded.model, loaded.config
    if size is not None:
        config = config.model_copy(deep=True)
        assert config.model.image is not None
        config.model.image.size = size
    task, clock = ClassifierTask(config), Clock(0)
    where = location or f"{data_folder(config)}/validation"
    samples = task.held_out(where)
    check_classes(where.rpartition("/")[0], samples.classes, loaded.classes or samples.classes)
    count = min(samples.samples_per_epoch, limit or samples.samples_per_epoch)
    classes = max(len(samples.classes), 1)
    confusion, total = torch.zeros(classes, classes, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
    device = model.head.weight.device
    for first in range(0, count, BATCH):
        batch = task.collate([samples[i] for i in range(first, min(first + BATCH, count))])
        batch, rows = task.to_device(batch, device), len(batch["labels"])
        seen: list[torch.Tensor] = []

        def remember(images: torch.Tensor, context: Any, seen: list[torch.Tensor] = seen) -> Any:
            output = model(images, context)
            seen.append(output.logits)
            return output

        total += task.figures(remember, batch, clock).double().cpu() * rows
        guesses = seen[0][:, :classes].argmax(1)
        confusion.view(-1).index_add_(
            0, (batch["labels"] * classes + guesses).cpu(), torch.ones(rows, dtype=torch.int64)
        )
        progress(rows)
    means = dict(zip(("loss", "top1", "top5"), (total / count).tolist(), strict=True))
    facts = {"images": count, "size": list(task.image.size), "class_names": samples.classes}
    return {**means, **facts, "confusion": confusion.tolist()}


def draw_confusion(facts: dict[str, Any], path: str | Path) -> None:
    """The confusion matrix as a PNG: rows are true classes, shares of a row by colour, counts as numbers up to 20 classes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, counts = facts["class_names"], torch.tensor(facts["confusion"], dtype=torch.float64)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    side = max(4.0, min(12.0, 0.55 * len(names) + 2))
    figure, axes = pyplot.subplots(figsize=(side, side), layout="constrained")
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axes.set_yticks(range(len(names)), names)
        for row, column in counts.nonzero().tolist():
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{int(counts[row, column])}", ha="center", va="center", color=color, fontsize=8)
    axes.set(xlabel="predicted", ylabel="true", title=f"top-1 {facts['top1']:.2%} of {facts['images']:,} images")
    figure.savefig(path, dpi=110, format="png")  # whatever the name
    pyplot.close(figure)
