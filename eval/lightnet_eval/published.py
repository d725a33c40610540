"""The paper's zero-shot table (its appendix, commonsense reasoning), and a run's row in the same shape."""

from __future__ import annotations

from typing import Any, NamedTuple

# Column, task of lm-eval, metric. The paper names no metrics; these are the ones that give its rows of public models.
COLUMNS = (
    ("PIQA", "piqa", "acc"),
    ("HS", "hellaswag", "acc_norm"),
    ("WG", "winogrande", "acc"),
    ("ARC-e", "arc_easy", "acc"),
    ("ARC-c", "arc_challenge", "acc_norm"),
    ("OBQA", "openbookqa", "acc_norm"),
)
TASKS = tuple(task for _, task, _ in COLUMNS)


class Row(NamedTuple):
    """One model: parameters and training tokens in billions (None: not given), percentages by column, None where missing."""

    model: str
    parameters: float
    tokens: float | None
    scores: tuple[float | None, ...]

    @property
    def average(self) -> float | None:
        """Of all columns; None unless all are there."""
        known = [score for score in self.scores if score is not None]
        return sum(known) / len(known) if len(known) == len(self.scores) else None


PUBLISHED = (
    Row("GPT-Neo", 0.13, 300, (63.06, 30.40, 50.43, 43.73, 23.12, 26.20)),
    Row("OPT", 0.16, 300, (62.95, 31.35, 50.43, 43.52, 22.70, 28.00)),
    Row("Pythia", 0.16, 300, (61.32, 30.16, 51.93, 43.18, 23.12, 26.80)),
    Row("RWKV-4", 0.17, None, (65.07, 32.26, 50.83, 47.47, 24.15, 29.60)),
    Row("HGRN", 0.15, 100, (65.02, 33.33, 50.20, 46.68, 23.81, 28.60)),
    Row("LightNet", 0.15, 100, (63.49, 30.55, 50.83, 46.04, 24.40, 27.40)),
    Row("OPT", 0.35, 300, (64.58, 36.69, 52.49, 44.02, 23.89, 28.20)),
    Row("Pythia", 0.40, 300, (67.08, 40.52, 53.59, 51.81, 24.15, 29.40)),
    Row("BLOOM", 0.56, 350, (64.09, 36.97, 52.80, 47.35, 23.98, 28.20)),
    Row("RWKV-4", 0.43, None, (67.52, 40.90, 51.14, 52.86, 25.17, 32.40)),
    Row("HGRN", 0.35, 100, (66.70, 38.12, 51.70, 49.20, 25.26, 30.60)),
    Row("LightNet", 0.39, 100, (66.87, 38.82, 50.75, 51.39, 25.17, 28.20)),
    Row("GPT-Neo", 1.3, 300, (71.11, 48.93, 54.93, 56.19, 25.85, 33.60)),
    Row("OPT", 1.3, 300, (71.71, 53.70, 59.35, 57.24, 29.69, 33.20)),
    Row("Pythia", 1.4, 300, (70.67, 47.18, 53.51, 56.99, 26.88, 31.40)),
    Row("BLOOM", 1.1, 350, (67.14, 42.98, 54.93, 51.47, 25.68, 29.40)),
    Row("RWKV-4", 1.5, None, (72.36, 52.48, 54.62, 60.48, 29.44, 34.00)),
    Row("HGRN", 1.0, 100, (70.89, 48.02, 51.62, 55.64, 27.90, 31.60)),
    Row("LightNet", 1.0, 100, (69.75, 44.68, 51.85, 55.35, 27.65, 32.80)),
    Row("OPT", 2.7, 300, (73.83, 60.60, 61.01, 60.77, 31.31, 35.20)),
    Row("Pythia", 2.8, 300, (74.10, 59.31, 59.91, 64.14, 33.02, 35.60)),
    Row("BLOOM", 3.0, 350, (70.57, 54.53, 58.48, 59.43, 30.38, 32.20)),
    Row("RWKV-4", 3.0, None, (72.42, 58.75, 57.30, 62.92, 35.15, 36.20)),
    Row("LightNet", 2.9, 100, (73.56, 55.47, 57.77, 61.57, 32.94, 33.60)),
)


def measured(results: dict[str, Any], parameters: int, tokens: int | None) -> Row:
    """The row of a run, from lm-eval's results.

    Args:
        parameters: of the model. tokens: it was trained on; None where unknown.
    """
    scores: list[float | None] = []
    for _, task, metric in COLUMNS:
        value = results.get(task, {}).get(f"{metric},none")
        scores.append(None if value is None else 100 * value)
    return Row("this run", parameters / 1e9, None if tokens is None else tokens / 1e9, tuple(scores))


def table(run: Row) -> str:
    """The run's row above the published ones of its size (those whose LightNet is nearest in parameters)."""
    ends = [index for index, row in enumerate(PUBLISHED) if row.model == "LightNet"]
    nearest = min(ends, key=lambda index: abs(PUBLISHED[index].parameters - run.parameters))
    begin = max([index + 1 for index in ends if index < nearest], default=0)
    rows = [["model", "P (B)", "T (B)", *(name for name, _, _ in COLUMNS), "AVG"], _cells(run)]
    rows += [_cells(row) for row in PUBLISHED[begin : nearest + 1]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append(
            "  ".join(text.rjust(width) if place else text.ljust(width) for place, (text, width) in enumerate(cells))
        )
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    tokens = "-" if row.tokens is None else f"{row.tokens:.3g}"
    scores = ["-" if score is None else f"{score:.2f}" for score in (*row.scores, row.average)]
    return [row.model, f"{row.parameters:.2g}", tokens, *scores]
