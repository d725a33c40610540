"""Line charts as inline SVG that takes its text colour from the page, so that one picture suits light and dark."""

from __future__ import annotations

import colorsys
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

# Mid tones that stay readable on white and on near-black; told apart also by people with colour-blindness (Okabe-Ito).
PALETTE = ("#0d80c9", "#e07b00", "#0aa06e", "#d1569c", "#b8860b", "#8a63d2", "#d64f2b", "#4c9fb3")
SHADES = (0.0, -0.12, 0.12, -0.06, 0.06, -0.18, 0.18)  # lightness that each further round of the palette adds
INK = "#010203"  # stands for the page's text colour until the SVG is done
BACK = "#030201"  # and this for what is behind it
POINTS = 1200  # more than a screen shows
MOST_MARKS = 150
MANY = 120  # from here on, a line of means is drawn over the single values


def color_of(index: int) -> str:
    """The colour of a line, of as many as there are in the palette and its shades: 56."""
    base, shade = PALETTE[index % len(PALETTE)], SHADES[index // len(PALETTE) % len(SHADES)]
    if not shade:
        return base
    hue, light, saturation = colorsys.rgb_to_hls(*(int(base[at : at + 2], 16) / 255 for at in (1, 3, 5)))
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light + shade, saturation))


@dataclass
class Line:
    """A series of a chart: values y [n] at places x [n]."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dashed: bool = False
    markers: bool = False
    smooth: bool = False


@dataclass
class Mark:
    """Something that happened at a place of the x axis; ``kind`` is one of ``MARKS``, or saved."""

    x: float
    kind: str
    color: str


MARKS = {
    "resumed": (":", 1.2, 0.9),
    "stopped": ("--", 1.0, 0.7),
    "finished": ("-", 0.8, 0.35),
    "skipped": ("-.", 0.8, 0.6),
}


def chart(
    title: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    x_label: str = "step",
    y_label: str = "",
    log: bool = False,
    from_zero: bool = False,
    clip_peaks: bool = False,
) -> str:
    """An SVG element, or an empty string when there is nothing to draw.

    Args:
        marks: dotted (resumed), dashed (stopped), thin (finished) or dash-dotted (skipped) lines, ticks on the axis (saved).
        log: logarithmic y axis, when all values are positive.
        from_zero: y axis starts at 0.
        clip_peaks: the y axis leaves out the highest values of the lines' beginnings, so that the rest can be told apart.
    """
    drawn = [line for line in (_finite(line) for line in lines) if len(line.x)]
    if not drawn:
        return ""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "sans-serif",
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for index, line in enumerate(drawn):
            _draw(axes, line, f"line-{index}")
        _draw_marks(axes, marks)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        values = [value for line in drawn for value in line.y]
        if log and min(values) > 0:
            axes.set_yscale("log")
            for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                which(_plain_numbers())
        elif max(map(abs, values)) >= 10_000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        elif max(map(abs, values)) < 0.01:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        if from_zero:
            axes.set_ylim(0, 1.08 * max(values) or None)  # a level line, too, stays clear of the edge
        if clip_peaks and (top := max(_top(line.y) for line in drawn)) < max(values):
            axes.set_ylim(top=top)
        if len(drawn) > 1 or drawn[0].label:
            axes.legend(facecolor=BACK, framealpha=0.8, edgecolor="none", fontsize=8, ncols=2 if len(drawn) > 4 else 1)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), title)


def _plain_numbers() -> Any:
    """The labels that a logarithmic axis chooses, as 0.5 and not as 5 x 10^-1."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: Any = None) -> str:
            return f"{value:.3g}" if super().__call__(value, position) else ""

    return Plain(minor_thresholds=(1.5, 0.7))


def _finite(line: Line) -> Line:
    pairs = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    return replace(line, label=_plain(line.label), x=[x for x, _ in pairs], y=[y for _, y in pairs])


def _plain(label: str) -> str:
    """A label that matplotlib takes as it is: no mathematics between $, and not hidden for a leading underscore."""
    label = label.replace("$", r"\$")
    return "\u200b" + label if label.startswith("_") else label


def _draw(axes: Any, line: Line, gid: str) -> None:
    """``gid`` becomes the id of the group that holds the line, and its markers, in the SVG."""
    style = "--" if line.dashed else "-"
    marker = "o" if (line.markers and len(line.x) < MANY) or len(line.x) == 1 else None
    if line.smooth and len(line.x) >= MANY:
        x, y = thin(line.x, line.y)
        axes.plot(x, y, color=line.color, linewidth=0.7, alpha=0.3)
        x, y = thin(line.x, moving_mean(line.y, max(3, len(line.y) // 60)))
        axes.plot(x, y, style, color=line.color, linewidth=1.5, label=line.label, gid=gid)
        return
    x, y = thin(line.x, line.y)
    axes.plot(x, y, style, color=line.color, linewidth=1.5, label=line.label, marker=marker, markersize=3, gid=gid)


def _draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """At most ``MOST_MARKS`` of a kind and colour, evenly chosen: more would only blacken the picture."""
    groups: dict[tuple[str, str], list[float]] = {}
    for mark in marks:
        groups.setdefault((mark.kind, mark.color), []).append(mark.x)
    along = axes.get_xaxis_transform()  # x as data, y from 0 to 1 over the height
    for (kind, color), places in groups.items():
        places = places[:: -(-len(places) // MOST_MARKS)]
        if kind == "saved":
            axes.vlines(places, 0.0, 0.03, color=color, linewidth=1.0, alpha=0.8, transform=along)
        elif kind in MARKS:
            style, width, alpha = MARKS[kind]
            axes.vlines(places, 0.0, 1.0, color=color, linestyle=style, linewidth=width, alpha=alpha, transform=along)


def _top(values: Sequence[float]) -> float:
    """The highest value of a line to show: leaves room for all after its first tenth, generously."""
    low, most, high = min(values), max(values), max(values[len(values) // 10 :])
    return high + (high - low) if most > high + 2 * (high - low) > high else most


def thin(x: Sequence[float], y: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about ``points`` of the values, the lowest and highest of every stretch kept, so that spikes show."""
    if len(x) <= points:
        return list(x), list(y)
    kept = {0, len(x) - 1}
    edges = [round(index * len(x) / (points // 2)) for index in range(points // 2 + 1)]
    for start, end in pairwise(edges):
        stretch = range(start, end)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    order = sorted(kept)
    return [x[i] for i in order], [y[i] for i in order]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over ``window`` values around each, fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    half, count = window // 2, len(values)
    means = []
    for index in range(count):
        start, end = max(0, index - half), min(count, index + half + 1)
        means.append((sums[end] - sums[start]) / (end - start))
    return means


def _inline(svg: str, title: str) -> str:
    """The ``<svg>`` element alone: no outside addresses, ids of its own, the page's text colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)  # known to HTML without being named
    svg = svg.replace("xlink:href", "href")
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace(INK, "currentColor").replace(BACK, "var(--back)")
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r'<svg\s+height="[^"]*"(.*?)\swidth="[^"]*"', r"<svg\1", svg, count=1, flags=re.DOTALL).replace(
        "<svg", f'<svg role="img" aria-label="{label}"', 1
    )
