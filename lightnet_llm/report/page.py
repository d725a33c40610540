"""From run folders to the page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from ..checkpoint.store import write_text
from ..errors import UserError
from . import facts
from .charts import INK, PALETTE, Line, Mark, chart, color_of
from .read import Run, flat, is_number, read_run
from .template import PAGE, STYLE

LEGEND = (
    "Events: dotted line, resumed; dashed line, stopped; thin line, finished; dots and dashes, a step skipped; "
    "tick on the axis, checkpoint saved. "
    "Long series: the faint line holds every value (extremes kept), the strong one their moving mean."
)


def write_report(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write one HTML page about one or several runs.

    Args:
        paths: run folders.
        output: the file; default RUN/report.html, for a single run.

    Returns:
        the file written.

    Raises:
        UserError: a folder is no run folder, or ``output`` is missing or cannot be written.
    """
    if output is None and len(paths) != 1:
        raise UserError(
            "without --output a page is written into the folder of its run, and there are several; name the file"
        )
    target = Path(output) if output is not None else Path(paths[0]) / "report.html"
    html = render([read_run(path) for path in paths])
    try:
        write_text(target, html)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); name a file in an existing folder") from None
    return target


def render(runs: Sequence[Run]) -> str:
    """The page as a string."""
    _unique_names(runs)
    several = len(runs) > 1
    colors = [color_of(index) for index in range(len(runs))]
    views = [facts.view(run, color, several) for run, color in zip(runs, colors, strict=True)]
    labels = list(dict.fromkeys(label for view in views for label, _ in view["tiles"]))
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        title="LightNet runs: " + ", ".join(run.name for run in runs) if several else f"LightNet run {runs[0].name}",
        style=Markup(STYLE),
        runs=views,
        several=several,
        tile_labels=labels,
        sections=_sections(runs, colors),
        legend=LEGEND,
        differences=_differences(runs) if several else [],
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        sources=", ".join(str(run.path) for run in runs),
    )


def _unique_names(runs: Sequence[Run]) -> None:
    """Runs of the same name are told apart by their paths."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"{runs[0].path}: the same run folder was given twice; name each once")


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Configuration fields whose values are not the same in all runs."""
    trees = [flat(run.config) for run in runs]
    fields = list(dict.fromkeys(field for tree in trees for field in tree))
    rows = [(field, [str(tree.get(field, "")) for tree in trees]) for field in fields]
    return [(field, values) for field, values in rows if len(set(values)) > 1 and field != "train.name"]


def _sections(runs: Sequence[Run], colors: Sequence[str]) -> list[tuple[str, list[tuple[str, Markup]]]]:
    """(heading, [(heading, SVG)]) of every group of charts that has something to show."""
    several = len(runs) > 1
    pairs = list(zip(runs, colors, strict=True))
    marks = [
        Mark(event["step"], str(event["event"]), color if several else INK)
        for run, color in pairs
        for event in run.events
    ]

    def values(name: str, scale: float = 1.0, smooth: bool = False) -> list[Line]:
        lines = []
        for run, color in pairs:
            x, y = run.series(name)
            lines.append(Line(run.name if several else "", x, [v * scale for v in y], color, smooth=smooth))
        return lines

    loss = _loss_lines(pairs, several)
    by_tokens = [_over_tokens(line, run) for line, run in loss]
    bits = _validation_lines(pairs, several, "bits_per_byte")
    top1 = _validation_lines(pairs, several, "top1")
    units = " or ".join(dict.fromkeys(facts.unit(run) for run in runs))
    groups = [
        (
            "Loss",
            [
                ("Loss over steps", chart("Loss over steps", _only(loss), marks, y_label=units, clip_peaks=True)),
                (
                    "Loss over tokens",
                    chart("Loss over tokens", by_tokens, x_label="tokens", y_label=units, clip_peaks=True),
                ),
                ("Validation, bits per byte", chart("Validation bits per byte", _only(bits), marks)),
                ("Validation, top-1", chart("Validation top-1", _only(top1), marks)),
            ],
        ),
        ("Evaluation tasks", _evaluation_charts(pairs, several, marks)),
        (
            "Optimisation",
            [
                ("Learning rate", chart("Learning rate", values("learning_rate"), marks, from_zero=True)),
                ("Gradient norm", chart("Gradient norm", values("grad_norm", smooth=True), marks, log=True)),
                *_norm_charts(runs, marks),
            ],
        ),
        (
            "Throughput and memory",
            [
                (
                    "Tokens per second",
                    chart("Tokens per second", values("tokens_per_second", smooth=True), marks, from_zero=True),
                ),
                ("Peak memory, GB", chart("Peak memory", values("memory_bytes", 1e-9), marks, from_zero=True)),
                (
                    "Model FLOP utilisation, %",
                    chart("Utilisation", values("mfu", 100.0, smooth=True), marks, from_zero=True),
                ),
            ],
        ),
    ]
    shown = [(name, [(head, Markup(svg)) for head, svg in figures if svg]) for name, figures in groups]
    return [(name, figures) for name, figures in shown if figures]


Pairs = list[tuple[Run, str]]


def _only(pairs: list[tuple[Line, Run]]) -> list[Line]:
    return [line for line, _ in pairs]


def _loss_lines(pairs: Pairs, several: bool) -> list[tuple[Line, Run]]:
    """The training loss and each validation loss of every run."""
    lines = []
    for run, color in pairs:
        x, y = run.series("loss")
        lines.append((Line(run.name if several else "train", x, y, color, smooth=True), run))
    return lines + _validation_lines(pairs, several, "loss")


def _validation_lines(pairs: Pairs, several: bool, metric: str) -> list[tuple[Line, Run]]:
    lines = []
    for run, color in pairs:
        for index, (name, (x, y)) in enumerate(run.validation_series(metric).items()):
            own = color if several else color_of(index + 1)
            label = f"{run.name}, {name}" if several else name
            lines.append((Line(label, x, y, own, dashed=several, markers=True), run))
    return lines


def _evaluation_charts(pairs: Pairs, several: bool, marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """A chart a metric with a line a task; for several runs one a metric and task, with a line a run."""
    figures: dict[str, list[Line]] = {}
    for run, color in pairs:
        for metric in run.metrics():
            for index, (task, (x, y)) in enumerate(run.evaluation_series(metric).items()):
                title = f"{metric} of {task}" if several else metric
                label, own = (run.name, color) if several else (task, color_of(index))
                figures.setdefault(title, []).append(Line(label, x, y, own, markers=True))
    return [(title, chart(f"Evaluation {title}", lines, marks)) for title, lines in figures.items()]


def _over_tokens(line: Line, run: Run) -> Line:
    """The same line over tokens; they grow evenly between the steps that were written down."""
    tokens = {0: 0.0, **run.tokens_at()}
    known = sorted(tokens)
    return replace(line, x=np.interp(line.x, known, [tokens[step] for step in known]).tolist())


def _norm_charts(runs: Sequence[Run], marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """Norms by kind of parameter, for a page about one run: the eight largest kinds."""
    if len(runs) != 1:
        return []
    figures = []
    for what in ("gradient", "weight"):
        series: dict[str, tuple[list[float], list[float]]] = {}
        for row in runs[0].steps:
            for kind, value in ((row.get("norms") or {}).get(what) or {}).items():
                if not is_number(value):
                    continue
                steps, numbers = series.setdefault(kind, ([], []))
                steps.append(row["step"])
                numbers.append(value)
        largest = sorted(series, key=lambda kind: -statistics.median(series[kind][1]))[: len(PALETTE)]
        lines = [Line(kind, *series[kind], color) for kind, color in zip(largest, PALETTE, strict=False)]
        title = f"{what.capitalize()} norm by kind"
        figures.append((title, chart(title, lines, marks, log=True)))
    return figures
