"""``lightnet train``: check everything first, then start the deepspeed launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from ..config import RunConfig, load_config
from ..config.deepspeed import effective_zero_stage
from ..errors import UserError


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def _ranks(config: RunConfig, gpus: int | None, hostfile: str | None) -> int:
    """Number of ranks of the run: from --gpus, the hostfile's slots, all GPUs here, or the smallest that fits."""
    if hostfile is not None:
        return sum(_slots(Path(hostfile)).values())
    if gpus is not None:
        return gpus
    parallel = config.parallel
    return _device_count() or parallel.tensor * parallel.pipeline * parallel.sequence


def _slots(path: Path) -> dict[str, int]:
    """``host slots=N`` lines of a hostfile.

    Raises:
        UserError: the file is missing or a line is not of that form; names line number and content.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"--hostfile {path}: cannot be read ({error.strerror}); give lines of the form 'host slots=8'"
        ) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].split()
        if not text:
            continue
        key, _, value = text[1].partition("=") if len(text) == 2 else ("", "", "")
        if key != "slots" or not value.isdigit() or int(value) < 1 or text[0] in slots:
            raise UserError(
                f"{path}:{number}: '{line.strip()}' is not 'host slots=N' with a host named once and N >= 1"
            )
        slots[text[0]] = int(value)
    if not slots:
        raise UserError(f"{path}: names no host; give lines of the form 'host slots=8'")
    return slots


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
    with torch.device("meta"):
        parameters = count_parameters(CausalLM(config.model))
    return {
        "name": config.train.name,
        "parameters": parameters,
        "layout": layout.as_dict(),
        "ranks": [layout.coordinates(rank) for rank in range(min(world, 64))],
        "zero_stage": effective_zero_stage(config),
        "precision": config.train.precision,
        "steps": budget.steps,
        "tokens": budget.samples_before(budget.steps) * config.data.sequence_length,
        "gradient_accumulation_steps": config.train.global_batch // (config.train.micro_batch * layout.data),
        "config": config.model_dump(mode="json"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher_command(name: str, overrides: tuple[str, ...], world: int, hostfile: str | None) -> list[str]:
    """The deepspeed launcher's command line for a run."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if hostfile is not None:
        command += ["--hostfile", hostfile]
    else:
        command += ["--hostfile", os.devnull, "--num_nodes", "1", "--num_gpus", str(world)]
    command += ["--master_port", str(_free_port())]
    return [*command, "--module", "lightnet_llm.training.main", "--config", name, *overrides]


def _environment(world: int) -> dict[str, str]:
    environment = dict(os.environ, LIGHTNET_LAUNCHED="1")
    if not _device_count():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    return environment


def _supervise(process: subprocess.Popen[bytes], request_stop: Any) -> int:
    """Wait for the launcher; the first SIGTERM or Ctrl-C asks the ranks to save and stop, the second kills them."""
    asked: float | None = None

    def handle(number: int, _frame: object) -> None:
        nonlocal asked
        if asked is not None and time.monotonic() - asked < 2.0:
            return  # the same request, delivered to the process and to its group
        if asked is not None:
            click.echo("second signal: killing the ranks", err=True)
            os.killpg(process.pid, signal.SIGKILL)
            return
        asked = time.monotonic()
        click.echo("stop requested: the ranks save after the step they are in (again to kill them)", err=True)
        request_stop()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        with contextlib.suppress(ProcessLookupError):  # nothing of the run stays behind, whatever ended the launcher
            os.killpg(process.pid, signal.SIGKILL)


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--gpus", type=click.IntRange(min=1), help="Ranks on this machine (CPU processes without a GPU).")
@click.option("--hostfile", help="Hosts and slots of a multi-node run.")
@click.option("--dry-run", is_flag=True, help="Resolve and check everything, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the resolved run as JSON.")
def train(
    config: str, overrides: tuple[str, ...], gpus: int | None, hostfile: str | None, dry_run: bool, as_json: bool
) -> None:
    """Train CONFIG (a YAML file or a preset's name) with key=value overrides."""
    loaded = load_config(config, overrides)
    world = _ranks(loaded, gpus, hostfile)
    resolved = resolve(loaded, world)
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
        return
    from ..training.data import check_tokenizer, validation_prefixes
    from ..training.run_folder import RunFolder

    folder = RunFolder(loaded)
    folder.check()
    check_tokenizer(loaded)
    validation_prefixes(loaded)
    folder.clear_stop()
    process = subprocess.Popen(
        launcher_command(config, overrides, world, hostfile), env=_environment(world), start_new_session=True
    )
    code = _supervise(process, folder.request_stop)
    if code:
        raise UserError(f"the run ended with exit code {code}; its own message stands above")
    if as_json:
        return
    click.echo(f"{folder.path}: step {_last_step(folder)}", err=True)


def _last_step(folder: Any) -> str:
    from ..checkpoint.store import listed

    saved = listed(folder.checkpoints)
    return saved[-1].name.removeprefix("step_").lstrip("0") if saved else "0"
