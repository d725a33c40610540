"""Pictures of ``lightnet glue``'s results: ``python -m lightnet_eval.glue_picture OUT.png NAME=REPORT.json ...``.

Bars of several models side by side, and the first one's confusion matrices.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightnet_llm.errors import UserError

COLUMNS = 3  # panels side by side


def draw(reports: dict[str, dict[str, Any]], path: str | Path) -> None:
    """Scores of every task by model, and how the first model's best run takes classes for each other.

    Args:
        reports: what ``lightnet glue --json`` gave, by the name to be shown.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    first = next(iter(reports.values()))["tasks"]
    matrices = [
        (f"{task['name']} ({split})", task["classes"], np.array(best["confusion"][split]))
        for task in first.values()
        for best in [max((run for run in task["runs"] if run["rate"] == task["rate"]), key=_score)]
        for split in best["confusion"]
    ]
    columns = min(1 + len(matrices), COLUMNS)
    lines = -(-(1 + len(matrices)) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(6 * columns, 5 * lines), layout="constrained", squeeze=False
    )
    bars, *plots = grid.flatten()
    width = 0.8 / len(reports)
    for index, (name, report) in enumerate(reports.items()):
        tasks = [report["tasks"].get(key) for key in first]
        scores = [100 * task["score"] if task else 0.0 for task in tasks]
        errors = [100 * (task["deviation"] or 0.0) if task else 0.0 for task in tasks]
        places = np.arange(len(first)) + (index - (len(reports) - 1) / 2) * width
        drawn = bars.bar(places, scores, width, label=name, yerr=errors if any(errors) else None)
        bars.bar_label(drawn, fmt="%.1f", fontsize=8)
    bars.set_xticks(range(len(first)), [task["name"] for task in first.values()])
    bars.set(ylabel="score in hundredths", title="best rate, mean over seeds")
    bars.legend(loc="lower right")
    for plot in plots[len(matrices) :]:
        plot.set_axis_off()
    for plot, (title, names, counts) in zip(plots, matrices, strict=False):
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        plot.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        plot.set_xticks(range(len(names)), names, rotation=60, ha="right")
        plot.set_yticks(range(len(names)), names)
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            plot.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=color, fontsize=8)
        plot.set(xlabel="predicted", ylabel="true", title=title)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _score(run: dict[str, Any]) -> float:
    return sum(next(iter(figures.values())) for figures in run["sets"].values())


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lightnet_eval.glue_picture", description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("reports", nargs="+", metavar="NAME=REPORT.json")
    given = parser.parse_args(arguments)
    try:
        reports = {}
        for pair in given.reports:
            name, equals, place = pair.rpartition("=")
            if not equals:
                raise UserError(f"{pair}: write NAME=REPORT.json")
            try:
                reports[name] = json.loads(Path(place).read_text(encoding="utf-8"))
                reports[name]["tasks"].items()
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{place}: no report of `lightnet glue --output`; write it again") from None
        draw(reports, given.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
