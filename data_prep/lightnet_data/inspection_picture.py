"""Pictures of ``lightnet data inspect``: document lengths as PNG and in a terminal."""

from pathlib import Path
from typing import Any

BLOCKS = " ▏▎▍▌▋▊▉█"
MANY_SETS = 12


def used_bins(lengths: dict[str, dict[str, Any]]) -> range:
    """Bins from the first to the last that holds a document."""
    used = [i for entry in lengths.values() for i, count in enumerate(entry["documents"]) if count]
    return range(min(used), max(used) + 1) if used else range(0)


def label(power: int) -> str:
    """A power of two as people write numbers of tokens: 512, 4k, 1M."""
    for unit, step in (("G", 30), ("M", 20), ("k", 10)):
        if power >= step:
            return f"{2 ** (power - step)}{unit}"
    return str(2**power)


def terminal(lengths: dict[str, dict[str, Any]], width: int = 60) -> list[str]:
    """Lines of a histogram: documents, and the share of all tokens that they hold, by length in tokens."""
    bins = used_bins(lengths)
    documents = [sum(entry["documents"][i] for entry in lengths.values()) for i in bins]
    tokens = [sum(entry["tokens"][i] for entry in lengths.values()) for i in bins]
    lines = [f"{'tokens':>12}  {'documents':>11}  of all tokens"]
    most, total = max(tokens, default=0), sum(tokens)
    for i, count, size in zip(bins, documents, tokens, strict=True):
        eighths = round(size / most * width * 8)
        bar = "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
        lines.append(f"{label(i):>5}-{label(i + 1):<6}  {count:>11,}  {100 * size / total:>5.1f}% {bar}")
    return lines


def draw(facts: dict[str, Any], path: str | Path) -> None:
    """Write a PNG: documents and tokens by length (log2), and bytes per token by subset.

    Args:
        facts: of ``inspection.inspect``.
        path: the file.
    """
    from matplotlib.figure import Figure

    lengths = facts["lengths"]
    bins = list(used_bins(lengths))
    subsets = facts["subsets"] or {"all": facts}
    rows = max(2, min(len(subsets), 40))
    figure = Figure(figsize=(11, 3.6 + 0.14 * rows), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])

    shares = {}
    for kind in ("documents", "tokens"):
        counted = [sum(entry[kind][i] for entry in lengths.values()) for i in bins]
        shares[kind] = [100 * count / max(sum(counted), 1) for count in counted]
    for kind, color, offset in (("documents", "#0d80c9", -0.21), ("tokens", "#e07b00", 0.21)):
        left.bar([i + offset for i in range(len(bins))], shares[kind], 0.42, color=color, label=f"share of {kind}")
    left.set_xticks(range(len(bins)), [label(i) for i in bins], rotation=60 if len(bins) > 14 else 0)
    left.set_xlabel("length of a document in tokens, from this power of two to the next")
    left.set_ylabel("%")
    documents = sum(sum(entry["documents"]) for entry in lengths.values())
    title = f"{Path(facts['folder']).name}, {facts['split']}: {documents:,} documents"
    if len(lengths) == 1:
        (entry,) = lengths.values()
        title += f"\nmedian {entry['median']:,.0f}, mean {entry['mean']:,.0f}, longest {entry['longest']:,} tokens"
    left.set_title(title, fontsize=10)
    left.legend(frameon=False)

    ordered = sorted(subsets.items(), key=lambda item: -item[1]["tokens"])[:40]
    names = [name if len(name) <= 24 else name[:23] + "…" for name, _ in ordered]
    values = [entry["bytes_per_token"] or 0 for _, entry in ordered]
    bars = right.barh(range(len(names)), values, 0.7, color="#0aa06e")
    total = sum(entry["tokens"] for entry in subsets.values())
    right.bar_label(
        bars,
        [
            f"{v:.2f}  ({100 * e['tokens'] / max(total, 1):.1f}% of tokens)"
            for v, (_, e) in zip(values, ordered, strict=True)
        ],
        padding=3,
        fontsize=8,
    )
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set_xlim(0, 1.6 * max(values, default=1))
    right.set_xlabel("bytes of text a token (fertility)")
    right.set_title("by subset, most tokens first" if facts["subsets"] else "whole data set", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, format="png")


def sheet(store: Any, class_names: list[str], seed: int, path: str | Path, rows: int = 6, columns: int = 10) -> None:
    """Write a PNG of some images with their classes, or of the means of some latents (first three channels as colours).

    Args:
        store: a ``sample_shards.SampleStore``.
        class_names: by number.
        seed: of the choice.
        path: the file.
        rows, columns: of the sheet.
    """
    import io
    import random

    import numpy as np
    from matplotlib.figure import Figure

    from lightnet_data.pictures import decode

    chosen = random.Random(seed).sample(range(len(store)), min(len(store), rows * columns))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(1.25 * columns, 1.45 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, number in zip(grid.flat, chosen, strict=False):
        data, label = store.read(number)
        if store.manifest["kind"] == "latents":
            mean = np.load(io.BytesIO(data), allow_pickle=False)[0, 0, :3].astype(np.float32).transpose(1, 2, 0)
            spread = np.abs(mean).max(axis=(0, 1)) + 1e-6
            axes.imshow((mean / spread + 1) / 2 if mean.shape[2] == 3 else mean[..., 0])
        else:
            axes.imshow(np.asarray(decode(data)))
        axes.set_title(class_names[label][:16], fontsize=7)
    figure.savefig(path, dpi=110, format="png")
