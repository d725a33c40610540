"""``lightnet train``: check everything first, then start the deepspeed launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..config import RunConfig, load_config
from ..config.deepspeed import deepspeed_config, effective_zero_stage
from ..errors import UserError
from ..launch.command import HANDOVER, device_count, launcher_command
from ..launch.hosts import read_hostfile


def _ranks(config: RunConfig, gpus: int | None, hosts: dict[str, int] | None) -> int:
    """Number of ranks of the run: from --gpus, the hostfile's slots, all GPUs here, or the smallest that fits."""
    if hosts is not None:
        return sum(hosts.values())
    if gpus is not None:
        return gpus
    parallel = config.parallel
    return device_count() or parallel.tensor * parallel.pipeline * parallel.sequence


def resolve(config: RunConfig, world: int) -> dict[str, Any]:
    """The run in plain terms: exact parameter count, layout, batches, which rank holds what.

    Raises:
        UserError: the layout does not fit the ranks or the batch.
    """
    import torch

    from ..models import CausalLM, count_parameters
    from ..parallel.layout import layout_for
    from ..training.schedule import budget_of

    layout = layout_for(config.parallel, world)
    budget = budget_of(config, layout.data)
    deepspeed_config(config, layout.data, layout.sequence)
    with torch.device("meta"):
        parameters = count_parameters(CausalLM(config.model))
    return {
        "name": config.train.name,
        "parameters": parameters,
        "layout": layout.as_dict(),
        "ranks": [layout.coordinates(rank) for rank in range(world)],
        "zero_stage": effective_zero_stage(config),
        "precision": config.train.precision,
        "steps": budget.steps,
        "tokens": budget.samples_before(budget.steps) * config.data.sequence_length,
        "gradient_accumulation_steps": config.train.global_batch // (config.train.micro_batch * layout.data),
        "config": config.model_dump(mode="json"),
    }


class _Supervisor:
    """Runs the launcher; the first signal asks the ranks to save and stop, a second one kills them."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, request_stop: Callable[[], None]):
        self.request_stop = request_stop
        self.process: subprocess.Popen[bytes] | None = None
        self.asked: float | None = None

    def _handle(self, _number: int, _frame: object) -> None:
        if self.asked is not None and time.monotonic() - self.asked < 2.0:
            return  # the same request, delivered to the process and to its group
        if self.asked is not None:
            click.echo("second signal: killing the ranks", err=True)
            self._kill()
            return
        self.asked = time.monotonic()
        click.echo("stop requested: the ranks save after the step they are in (again to kill them)", err=True)
        self.request_stop()

    def _kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def run(self, command: list[str], environment: dict[str, str], output: Any) -> int:
        """Exit code of the launcher; nothing it started stays behind."""
        previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        try:
            self.process = subprocess.Popen(command, env=environment, stdout=output, start_new_session=True)
            return self.process.wait()
        finally:
            self._kill()
            for number, handler in previous.items():
                signal.signal(number, handler)


def _checks(config: RunConfig) -> list[Callable[[], object]]:
    """What a start needs beside a legal configuration."""
    from ..checkpoint.store import resolve as resolve_checkpoint
    from ..training.data import check_tokenizer, validation_prefixes
    from ..training.run_folder import RunFolder

    given = config.train.init_from
    return [
        RunFolder(config).check,
        lambda: check_tokenizer(config),
        lambda: validation_prefixes(config),
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
@click.option("--json", "as_json", is_flag=True, help="Print the resolved run as JSON.")
def train(
    config: str, overrides: tuple[str, ...], gpus: int | None, hostfile: str | None, dry_run: bool, as_json: bool
) -> None:
    """Train CONFIG (a YAML file or a preset's name) with key=value overrides."""
    if gpus is not None and hostfile is not None:
        raise UserError("--gpus and --hostfile are both given; a hostfile's slots say how many GPUs each host uses")
    loaded = load_config(config, overrides)
    hosts = None if hostfile is None else read_hostfile(hostfile)
    world = _ranks(loaded, gpus, hosts)
    resolved = resolve(loaded, world)
    if dry_run:
        resolved["problems"] = _problems(loaded)
    if as_json:
        click.echo(json.dumps(resolved, indent=2))
    else:
        layout = resolved["layout"]
        axes = " x ".join(f"{axis} {layout[axis]}" for axis in ("tensor", "pipeline", "sequence", "data"))
        click.echo(
            f"{resolved['name']}: {resolved['parameters']:,} parameters, {resolved['precision']}, "
            f"{world} ranks ({axes}), ZeRO {resolved['zero_stage']}, {resolved['steps']:,} steps, "
            f"{resolved['tokens']:,} tokens",
            err=not dry_run,
        )
    if dry_run:
        if not as_json:
            for rank, place in enumerate(resolved["ranks"]):
                click.echo(f"rank {rank}: " + ", ".join(f"{axis} {index}" for axis, index in place.items()))
            for problem in resolved["problems"]:
                click.echo(f"would not start: {problem}")
        return
    from ..training.run_folder import RunFolder

    for check in _checks(loaded):
        check()
    folder = RunFolder(loaded)
    folder.clear_stop()
    # With --json, standard output is that one object: the launcher talks on standard error.
    output = sys.stderr if as_json else None
    supervisor = _Supervisor(folder.request_stop)
    command, environment = launcher_command(config, overrides, world, hosts, folder.path)
    try:
        code = supervisor.run(command, environment, output)
    finally:
        (folder.path / HANDOVER).unlink(missing_ok=True)  # it holds the environment, which may hold secrets
    if code:
        raise UserError(f"the run ended with exit code {code}; its own message stands above")
    if not as_json:
        click.echo(f"{folder.path}: step {_last_step(folder)}", err=True)


def _problems(config: RunConfig) -> list[str]:
    """What is missing for a start here; a dry run reports it, because the run may be meant for another machine."""
    from lightnet_data.errors import DataError

    found = []
    for check in _checks(config):
        try:
            check()
        except (UserError, DataError) as error:
            found.append(str(error))
    return list(dict.fromkeys(found))  # several checks may stumble over the same thing


def _last_step(folder: Any) -> str:
    from ..checkpoint.store import listed

    saved = listed(folder.checkpoints)
    return saved[-1].name.removeprefix("step_").lstrip("0") if saved else "0"
