"""``lightnet train``: check everything first, then start the deepspeed launcher."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..config import RunConfig, load_config
from ..config.deepspeed import deepspeed_config, effective_zero_stage
from ..errors import UserError
from ..imports import uncollected, without_compiler
from ..launch.command import HANDOVER, device_count, launcher_command
from ..launch.hosts import read_hostfile
from ..launch.times import VARIABLE
from ..supervisor import Hosts, Supervisor


@uncollected()
def _ranks(config: RunConfig, gpus: int | None, hosts: dict[str, int] | None) -> int:
    """Number of ranks of the run: from --gpus, the hostfile's slots, all GPUs here, or the smallest that fits."""
    if hosts is not None:
        return sum(hosts.values())
    if gpus is not None:
        return gpus
    parallel = config.parallel
    return device_count() or parallel.tensor * parallel.pipeline * parallel.sequence


@uncollected()
def resolve(config: RunConfig, world: int) -> dict[str, Any]:
    """The run in plain terms: exact parameter count, layout, batches, which rank holds what.

    Raises:
        UserError: the layout does not fit the ranks or the batch.
    """
    from ..models import build_model, count_parameters
    from ..models.parameters import shapes_alone
    from ..parallel.holdings import rank_table
    from ..parallel.legality import legal_layout
    from ..training.schedule import budget_of

    layout = legal_layout(config, world)
    budget = budget_of(config, layout.data)
    deepspeed_config(config, layout.data, layout.sequence)
    with shapes_alone():
        parameters = count_parameters(build_model(config.model))
    return {
        "name": config.train.name,
        "parameters": parameters,
        "layout": layout.as_dict(),
        "ranks": rank_table(config, layout),
        "zero_stage": effective_zero_stage(config),
        "precision": config.train.precision,
        "steps": budget.steps or None,
        "tokens": budget.samples_before(budget.steps) * config.data.sequence_length if budget.steps else None,
        "gradient_accumulation_steps": config.train.global_batch // (config.train.micro_batch * layout.data),
        "config": config.model_dump(mode="json"),
    }


def _known(config: RunConfig) -> RunConfig:
    """With the steps of ``train.hours``, where the run has been started before."""
    if config.train.hours is None:
        return config
    from ..training.run_folder import RunFolder
    from ..training.time_budget import known

    return known(config, RunFolder(config))


def _checks(config: RunConfig) -> list[Callable[[], object]]:
    """What a start needs beside a legal configuration."""
    from ..checkpoint.store import resolve as resolve_checkpoint
    from ..training.data import check_tokenizer, check_validation
    from ..training.run_folder import RunFolder

    given = config.train.init_from
    return [
        RunFolder(config).check,
        lambda: check_tokenizer(config),
        lambda: check_validation(config),
        lambda: given is None or resolve_checkpoint(Path(given), lambda warning: None),
    ]


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--gpus", type=click.IntRange(min=1), help="Ranks on this machine (CPU processes without a GPU).")
@click.option("--hostfile", help="Hosts and slots of a multi-node run.")
@click.option(
    "--dry-run", is_flag=True, help="Resolve the run, say which rank holds what and what is missing; start nothing."
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start a failed run again so often, from its newest checkpoint, on the hosts that are left.",
)
@click.option(
    "--back-off",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds before a restart; doubled while the same step fails.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the resolved run as JSON.")
def train(
    config: str,
    overrides: tuple[str, ...],
    gpus: int | None,
    hostfile: str | None,
    dry_run: bool,
    restarts: int,
    back_off: float,
    as_json: bool,
) -> None:
    """Train CONFIG (a YAML file or a preset's name) with key=value overrides."""
    began = [time.time()]
    without_compiler()
    if gpus is not None and hostfile is not None:
        raise UserError("--gpus and --hostfile are both given; a hostfile's slots say how many GPUs each host uses")
    loaded = _known(load_config(config, overrides))
    hosts = None if hostfile is None else read_hostfile(hostfile)
    world = _ranks(loaded, gpus, hosts)
    resolved = resolve(loaded, world)
    if dry_run:
        resolved["problems"] = _problems(loaded)
        resolved["data"] = _epochs(loaded, resolved)
    if as_json:
        click.echo(json.dumps(resolved, indent=2))
    else:
        layout = resolved["layout"]
        axes = " x ".join(f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "sequence", "data"))
        click.echo(
            f"{resolved['name']}: {resolved['parameters']:,} parameters, {resolved['precision']}, "
            f"{world} ranks ({axes}), ZeRO {resolved['zero_stage']}, {_budget(loaded, resolved)}",
            err=not dry_run,
        )
    if dry_run:
        if not as_json:
            from ..parallel.holdings import lines
            from ..training.sources import lines as source_lines

            click.echo("\n".join(lines(resolved["ranks"])))
            if loaded.parallel.pipeline_partition == "time" and loaded.parallel.pipeline > 1:
                click.echo("stages are chosen by measured time when the run starts; shown as if by parameters")
            for line in source_lines(resolved["data"]):
                click.echo(line)
            for problem in resolved["problems"]:
                click.echo(f"would not start: {problem}")
        return
    from ..training.run_folder import RunFolder

    with uncollected():
        for check in _checks(loaded):
            check()
    folder = RunFolder(loaded)
    folder.clear_stop()
    # With --json, standard output is that one object: the launcher talks on standard error.
    output = sys.stderr if as_json else None

    def command(ranks: int, on: Hosts, further: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
        os.environ[VARIABLE] = str(began.pop() if began else time.time())  # of a restart: its own
        return launcher_command(config, (*overrides, *further), ranks, on, folder.path)

    supervisor = Supervisor(
        loaded, folder.path, folder.request_stop, command, restarts, back_off, devices=device_count, output=output
    )
    try:
        supervisor.run(world, hosts)
    finally:
        (folder.path / HANDOVER).unlink(missing_ok=True)  # it holds the environment, which may hold secrets
    if not as_json:
        click.echo(f"{folder.path}: step {_last_step(folder)}", err=True)


def _budget(config: RunConfig, resolved: dict[str, Any]) -> str:
    if resolved["steps"] is None:
        return f"as many steps as {config.train.hours:g} hours allow, which a trial finds at the first start"
    return f"{resolved['steps']:,} steps, {resolved['tokens']:,} tokens"


def _epochs(config: RunConfig, resolved: dict[str, Any]) -> list[dict[str, Any]]:
    """How often the run passes over each source of data; empty where they cannot be read here."""
    from lightnet_data.errors import DataError

    from ..training.sources import epochs

    if resolved["tokens"] is None:
        return []
    try:
        return epochs(config, resolved["tokens"] // config.data.sequence_length)
    except (UserError, DataError) as error:
        problem = str(error)
    if problem not in resolved["problems"]:
        resolved["problems"].append(problem)
    return []


@uncollected()
def _problems(config: RunConfig) -> list[str]:
    """What is missing for a start here; a dry run reports it, because the run may be meant for another machine."""
    from lightnet_data.errors import DataError

    def tasks() -> None:
        if config.evaluation.interval:
            from ..training import evaluation  # which imports lm-eval: a start leaves it to rank 0

            evaluation.check(config)

    found = []
    for check in (*_checks(config), tasks):
        try:
            check()
        except (UserError, DataError) as error:
            found.append(str(error))
    return list(dict.fromkeys(found))  # several checks may stumble over the same thing


def _last_step(folder: Any) -> str:
    from ..checkpoint.store import listed

    saved = listed(folder.checkpoints)
    return saved[-1].name.removeprefix("step_").lstrip("0") if saved else "0"
