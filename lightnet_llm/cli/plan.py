"""``lightnet plan``: whether a run fits, how long it takes, and in which layout."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import click

from ..config import load_config
from ..errors import UserError
from .output import writable


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--gpus", type=click.IntRange(min=1), help="Cards. [default: launch.nodes x launch.gpus_per_node]")
@click.option(
    "--gpu",
    "card",
    help="Kind of card, such as h100, h200, a100-80, a100-40. [default: h100, or the figures' only one]",
)
@click.option("--price", type=click.FloatRange(min=0), help="Of a card and hour; adds the cost of the whole budget.")
@click.option("--all", "every_row", is_flag=True, help="List every legal layout, those that do not fit among them.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw scaling to 4,096 cards into a .png or .svg file.")
@click.option(
    "--figures", type=click.Path(path_type=Path), help="File written by --calibrate, in place of the shipped figures."
)
@click.option("--calibrate", is_flag=True, help="Measure this machine's cards (or processor) and write their figures.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="With --calibrate: the file to write. [default: calibration.json]",
)
def plan(
    config: str | None,
    overrides: tuple[str, ...],
    gpus: int | None,
    card: str | None,
    price: float | None,
    every_row: bool,
    as_json: bool,
    plot: Path | None,
    figures: Path | None,
    calibrate: bool,
    output: Path | None,
) -> None:
    """Plan CONFIG (a YAML file or a preset's name) with key=value overrides: memory, step time, layout. No GPU is needed."""
    if calibrate:
        _calibrate(config, gpus, output or Path("calibration.json"))
        return
    if output is not None:
        raise UserError(
            f"--output {output}: that is the file of --calibrate; a plan goes to standard output (--json), pictures to --plot"
        )
    if price is not None and not math.isfinite(price):
        raise UserError(f"--price {price}: not a price; give a number, such as 2.5")
    if config is None:
        raise UserError("lightnet plan needs a CONFIG, such as pile_1b, or --calibrate")
    from ..plan import hardware, planner, report, scaling

    if plot is not None:
        scaling.check_output(plot)
    names = hardware.cards(figures)
    loaded = load_config(config, overrides)
    chosen = hardware.load_hardware(card or (names[0] if len(names) == 1 else "h100"), figures)
    world = gpus or loaded.launch.nodes * loaded.launch.gpus_per_node
    found = planner.plan(loaded, world, chosen)
    problem = found.none_fits
    if problem is not None and not (every_row or as_json):
        raise UserError(problem)
    fewer = scaling.enough(found, chosen) if problem is None else None
    points = scaling.scaling(found, chosen) if plot is not None else None
    if plot is not None and points is not None:
        title = f"{loaded.train.name} on {chosen.card}, predicted"
        scaling.draw(points, title, plot)
    if as_json:
        answer = report.as_dict(found, price) | {"enough": asdict(fewer) if fewer else None}
        if points is not None:
            answer["scaling"] = {same: [asdict(point) for point in series] for same, series in points.items()}
        click.echo(json.dumps(answer, indent=2))
    else:
        for line in report.lines(found, (config, *overrides), price, every_row):
            click.echo(line)
    if problem is not None:  # what there is has been shown
        raise UserError(problem)
    if as_json:
        return
    if fewer is not None:
        click.echo(
            f"{world} GPUs are no faster than {fewer.gpus}: {fewer.gpus} make {fewer.tokens_per_second:,.0f} tokens/s as "
            f"{fewer.layout}, {world} make {found.tokens_per_second(found.recommended):,.0f}; plan with --gpus {fewer.gpus}, "
            "with a number that divides the batch, or raise train.global_batch"
        )
    if plot is not None:
        click.echo(f"scaling: {plot}")


def _calibrate(config: str | None, gpus: int | None, output: Path) -> None:
    from ..plan.calibrate import calibrate

    if config is not None:
        raise UserError(f"--calibrate measures this machine and takes no CONFIG; leave '{config}' out")
    writable("--output", str(output))  # before minutes of measuring
    for line in calibrate(output, gpus):
        click.echo(line)
