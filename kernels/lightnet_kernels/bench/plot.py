"""A kept result as pictures, on a log-log scale over N. Needs matplotlib and no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], path: Path) -> list[Path]:
    """Write what the report has points for beside `path`: PATH's stem with -lengths.png and -NAME.png for each
    comparison of one scan with two passes. Returns the files."""
    rows = {row["case"]: row for row in report["results"] if "points" in row}
    written = []
    if "cost" in rows:
        written.append(_save(_lengths(rows["cost"], report), path.with_name(f"{path.stem}-lengths.png")))
    for name, row in rows.items():
        if name.startswith("figure1"):
            written.append(_save(_figure(row, report), path.with_name(f"{path.stem}-{name}.png")))
    return written


def _lengths(row: dict[str, Any], report: dict[str, Any]) -> Any:
    """Milliseconds a call over N, the peers beside, and the floor."""
    title = f"causal scan, {row['tokens_a_call']:,} tokens a call, H{row['heads']} D{row['width']}, bf16"
    figure, axes = _axes(["forward", "forward_backward"], f"{title}{', LRPE' if row['lrpe'] else ''}", report)
    for axis, kind in zip(axes, ("forward", "forward_backward"), strict=True):
        _line(axis, row["points"], lambda point, kind=kind: point[kind]["ms"], f"additive scan ({row['backend']})")
        peers = sorted({name for point in row["points"] for name in point.get("peers", {})})
        for name in peers:
            _line(axis, row["points"], lambda p, name=name, kind=kind: p["peers"][name][kind]["ms"], name, "--")
        _floor(axis, row, report, kind)
    return figure, axes


def _floor(axis: Any, row: dict[str, Any], report: dict[str, Any], kind: str) -> None:
    """Every tensor of one scan read or written once at the copy rate of the same run: 4 forward, 11 with backward, bf16."""
    rate = report.get("ceilings", {}).get("copy_tb_s")
    if rate:
        tensors = 4 if kind == "forward" else 11
        floor = 2 * tensors * row["tokens_a_call"] * row["heads"] * row["width"] / rate / 1e9
        axis.axhline(floor, color="gray", linestyle=":", label="each tensor once at the copy rate")


def _figure(row: dict[str, Any], report: dict[str, Any]) -> Any:
    title = f"bidirectional, {row['tokens_a_call']:,} tokens a call, H{row['heads']} D{row['width']}, bf16"
    figure, axes = _axes(["forward", "forward_backward"], f"{title}{', LRPE' if row['lrpe'] else ''}", report)
    for axis, kind in zip(axes, ("forward", "forward_backward"), strict=True):
        for name, label in (("one_scan", "one scan"), ("two_passes", "two causal passes")):
            _line(axis, row["points"], lambda p, name=name, kind=kind: p[name][kind]["ms"], label)
        for name in sorted({name for point in row["points"] for name in point.get("peers", {})}):
            _line(axis, row["points"], lambda p, name=name, kind=kind: p["peers"][name][kind]["ms"], name, "--")
        _floor(axis, row, report, kind)
    return figure, axes


def _line(axis: Any, points: list[dict[str, Any]], value: Any, label: str, style: str = "-") -> None:
    """Points that have no such value (a peer that failed or was left out) are skipped."""
    pairs = []
    for point in points:
        try:
            pairs.append((point["tokens"], value(point)))
        except KeyError:
            continue
    if pairs:
        axis.plot(*zip(*pairs, strict=True), style, marker="o", markersize=4, label=label)


def _axes(kinds: list[str], title: str, report: dict[str, Any]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(kinds))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    figure.suptitle(f"{title}\n{report['card']}, {versions}, {report['date'][:10]}", fontsize=9)
    for axis, kind in zip(axes, kinds, strict=True):
        axis.set(title=kind.replace("_", " + "), xlabel="N, tokens in a sequence", ylabel="ms a call")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(True, which="both", alpha=0.3)
    return figure, axes


def _save(drawn: Any, path: Path) -> Path:
    figure, axes = drawn
    for axis in axes:
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path
