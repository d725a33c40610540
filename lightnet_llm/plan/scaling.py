"""How a run scales to thousands of cards: the best layout for each number of them, as figures and as a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightnet_data.output import replace

from ..errors import UserError
from ..parallel.legality import Choice
from ..report.charts import PALETTE
from .hardware import Hardware
from .memory import Parts
from .planner import ALIKE, Plan, find

MOST = 4096
FORMATS = (".png", ".svg")


@dataclass(frozen=True)
class Point:
    """One number of cards."""

    gpus: int
    tokens_per_second: float
    utilisation: float
    days: float
    layout: str
    global_batch: int


def check_output(path: Path) -> None:
    """Before any work.

    Raises:
        UserError: a kind of picture that is not written, or a folder that is not there.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"--plot {path}: pictures are {' or '.join(FORMATS)}; name one, such as {path.with_suffix('.png')}"
        )
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: {path.parent} is not a folder; make it first")


def _drawn(plan: Plan, hardware: Hardware) -> Callable[[Choice], bool]:
    """Layouts that keep a tensor-parallel group inside a host, with sequence parallelism and the ZeRO stage of the run or of
    the layout that is recommended for it, or with ZeRO 1."""
    own = plan.config.parallel
    cards = min(plan.config.launch.gpus_per_node, hardware.per_node)
    sequences: set[int] = {own.sequence}
    stages: set[int] = {1, own.zero_stage}
    if plan.fitting:
        sequences.add(plan.recommended.choice.sequence)
        stages.add(plan.recommended.choice.zero_stage)

    def wanted(choice: Choice) -> bool:
        return choice.sequence in sequences and choice.zero_stage in stages and cards % choice.tensor == 0

    return wanted


def enough(plan: Plan, hardware: Hardware) -> Point | None:
    """The fewest cards, a power of two, that are predicted to be as fast as the plan's. Other numbers of cards may be faster.

    Looked for among the layouts of :func:`scaling` alone, so there may be fewer still. None where the plan's are of use.

    Args:
        hardware: whole, where the plan's has hosts of as many cards as the plan can use.
    """
    config, parts = plan.config, Parts(plan.config)
    wanted = _drawn(plan, hardware)
    for gpus in (2**power for power in range((plan.world - 1).bit_length())):
        point = _point(find(config, gpus, hardware, parts, wanted))
        if point is not None and point.tokens_per_second * ALIKE >= plan.tokens_per_second(plan.recommended):
            return point
    return None


def scaling(plan: Plan, hardware: Hardware) -> dict[str, list[Point]]:
    """Points by what stays the same: ``batch`` (the run's own), and ``batch a card`` (as the plan's number of cards has it;
    none where that is less than a sample), of the best of :func:`_drawn`'s layouts; of the plan's own number of cards, its own.

    Args:
        hardware: as in :func:`enough`.
    """
    config, world, train = plan.config, plan.world, plan.config.train
    wanted, parts = _drawn(plan, hardware), Parts(config)
    own, each = _point(plan), train.global_batch // world
    found: dict[str, list[Point]] = {"batch": [], "batch a card": []}
    for gpus in sorted({2**power for power in range(MOST.bit_length()) if 2**power <= MOST} | {world}):
        point = own if gpus == world else _point(find(config, gpus, hardware, parts, wanted))
        if point:
            found["batch"].append(point)
        if not each or train.global_batch * gpus % world:
            continue
        batch = {
            "global_batch": train.global_batch * gpus // world,
            "batch_ramp": [],
            "tokens": plan.budget,
            "steps": None,
        }
        grown = config.model_copy(update={"train": train.model_copy(update=batch)})
        point = own if gpus == world else _point(find(grown, gpus, hardware, parts, wanted))
        if point:
            found["batch a card"].append(point)
    return found


def _point(plan: Plan | None) -> Point | None:
    if plan is None or not plan.fitting:
        return None
    row = plan.recommended
    batch = plan.config.train.global_batch
    return Point(plan.world, plan.tokens_per_second(row), plan.utilisation(row), plan.days(row), row.name(), batch)


def draw(points: dict[str, list[Point]], title: str, path: Path) -> None:
    """Tokens per second and utilisation over the number of cards, into a PNG or SVG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    rate, share = figure.subplots(1, 2)
    for color, (same, series) in zip(PALETTE, points.items(), strict=False):
        if not series:
            continue
        gpus = [point.gpus for point in series]
        rate.plot(
            gpus, [p.tokens_per_second for p in series], "o-", color=color, markersize=3, label=f"the same {same}"
        )
        share.plot(
            gpus, [100 * p.utilisation for p in series], "o-", color=color, markersize=3, label=f"the same {same}"
        )
    if not any(points.values()):
        raise UserError(f"--plot {path}: no layout of this kind fits on any number of cards; leave --plot out")
    first = min((series[0] for series in points.values() if series), key=lambda point: point.gpus)
    most = max(point.gpus for series in points.values() for point in series)
    ends = [first.gpus, most]
    rate.plot(ends, [first.tokens_per_second * n / first.gpus for n in ends], "--", color="grey", label="proportional")
    rate.set_ylabel("tokens/s")
    rate.set_yscale("log")
    share.set_ylabel("model-FLOP utilisation, %")
    share.set_ylim(bottom=0)
    for axes in (rate, share):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(color="grey", alpha=0.2, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    rate.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    options: dict[str, Any] = {"dpi": 130} if path.suffix == ".png" else {"metadata": {"Date": None}}
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix("."), **options)
    try:
        replace(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from None
