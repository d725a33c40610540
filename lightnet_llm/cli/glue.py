"""``lightnet glue``: a masked language model fine-tuned and measured on GLUE, or on sentence tasks of one's own."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import click

from ..errors import UserError
from .output import replacing, writable


def _rates(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        rates = tuple(float(part) for part in given.split(","))
    except ValueError:
        rates = ()
    if not rates or any(not 0.0 < rate < 1.0 for rate in rates) or len(set(rates)) < len(rates):
        raise click.BadParameter(f"{given!r}: give different learning rates such as 5e-5,3e-5")
    return rates


@click.command()
@click.argument("checkpoint", metavar="SOURCE")
@click.option(
    "--data",
    required=True,
    metavar="DIR",
    help="Folder with a folder of files for each task, as GLUE's archives have it.",
)
@click.option(
    "--tasks", metavar="NAME,...", help="Some of them: mnli, sst2, stsb, rte, qnli, qqp, mrpc, cola, wnli. [all in DIR]"
)
@click.option(
    "--rates", callback=_rates, metavar="R,...", help="Learning rates. [5e-5,4e-5,3e-5,2e-5, as in the paper]"
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Runs of each rate."
)
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Passes over the training set.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", help="Samples an update."
)
@click.option(
    "--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True, help="In fine-tuning."
)
@click.option("--scratch", is_flag=True, help="Without SOURCE's weights: what pretraining is worth.")
@click.option("--runs", metavar="DIR", help="Folder of the fine-tuning runs. [SOURCE's run folder/glue]")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Runs at a time, a GPU each. [all GPUs]")
@click.option("--keep-all", is_flag=True, help="Keep every run's checkpoint, not only that of a task's best.")
@click.option("--output", metavar="FILE", help="Write the JSON there too; FILE.png: bars and confusion matrices.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and only that, on standard output.")
def glue(
    checkpoint: str,
    data: str,
    tasks: str | None,
    rates: tuple[float, ...] | None,
    seeds: int,
    epochs: float,
    batch: int,
    dropout: float,
    scratch: bool,
    runs: str | None,
    processes: int | None,
    keep_all: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Fine-tune SOURCE (a run folder or checkpoint of head: masked_lm) on sentence tasks, and measure it.

    Every rate and seed is a training run of its own; reported is the rate whose mean over seeds is best. What is done is kept:
    the same command goes on where it was stopped.

    DIR/NAME/train.tsv and dev.tsv are GLUE's; train.jsonl and dev.jsonl of sentence (or sentence1, sentence2) and label make a
    task of any other NAME: labels with a point are values of a regression.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch
    from lightnet_eval.glue import evaluate, table
    from lightnet_eval.glue_picture import draw
    from lightnet_eval.glue_run import RATES, plan_of
    from lightnet_eval.glue_tasks import find

    from ..inference.load import run_folder_of

    for option, value in (("--epochs", epochs), ("--dropout", dropout)):
        if not math.isfinite(value):  # click's ranges let nan pass
            raise UserError(f"{option} {value}: must be a finite number; leave it out for the default")
    target = writable("--output", output)
    found = find(data, tasks.split(",") if tasks else None)
    given = {"seeds": seeds, "epochs": epochs, "batch": batch, "dropout": dropout, "scratch": scratch}
    plan = plan_of(checkpoint, Path(), rates=rates or RATES, **given)
    place = Path(runs) if runs else run_folder_of(plan.checkpoint) / ("glue_scratch" if scratch else "glue")
    plan = replace(plan, output=place)
    start = time.perf_counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = evaluate(
            plan,
            found,
            processes or max(1, torch.cuda.device_count()),
            keep_all,
            lambda line: click.echo(line, err=True),
        )
    except KeyboardInterrupt:
        raise UserError(f"stopped; what is done is kept in {place}, and the same command goes on") from None
    report["seconds"] = round(time.perf_counter() - start, 3)
    report["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    if target is not None:
        with replacing(target) as partial:
            if target.suffix == ".png":
                draw({checkpoint: report}, partial)
            else:
                partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(report) if as_json else table(report))
