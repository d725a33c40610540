"""The deepspeed launcher's command line for a run, on this machine or on the hosts of a host file."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..training.failures import VARIABLE
from .host import FAILED, RANK, threads, write_handover
from .hosts import free_port, free_port_on, is_here, master_address

# What the `deepspeed` command starts on each host; that command itself would import all of DeepSpeed once more before.
LAUNCHER = [sys.executable, "-m", "deepspeed.launcher.launch"]
TRAINING = "lightnet_llm.training.main"
# Never ask for a password; notice a host that is gone within 20 s.
SSH_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=4"
HANDOVER = "handover.json"


def device_count() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def _visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, numbers or identifiers of cards or their parts: DeepSpeed's launcher sets it anew."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names if device_count() else []


def launcher_command(
    name: str, overrides: tuple[str, ...], world: int, hosts: dict[str, int] | None, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that start the run; each call chooses a port anew, so a restart calls it again.

    Args:
        name: configuration as given: a file or a preset's name.
        overrides: ``key=value``; any characters.
        world: ranks on this machine, if there are no ``hosts``.
        hosts: slots by host name.
        folder: the run folder, which all hosts share.

    Raises:
        UserError: no free port, no pdsh, or a first host that does not answer.
    """
    environment = environment_for(world, hosts)
    if hosts is None:
        return local_command(name, overrides, world), environment
    return hosts_command(name, overrides, hosts, folder, environment), environment


def local_command(name: str, overrides: tuple[str, ...], world: int) -> list[str]:
    """Start ``world`` ranks of the run on this machine.

    Raises:
        UserError: fewer GPUs are visible, or there is no free port.
    """
    visible = _visible_gpus()
    if 0 < len(visible) < world:
        raise UserError(
            f"{world} ranks, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names {len(visible)} GPUs; "
            f"name as many, unset it, or start with --gpus {len(visible)}"
        )
    have = device_count()
    if 0 < have < world:
        raise UserError(
            f"{world} ranks, but this machine has {have} GPU(s); start with --gpus {have}, or name hosts with --hostfile"
        )
    gpus: list[str] | list[int] = visible[:world] or list(range(world))
    return _launcher({"localhost": gpus}, "127.0.0.1", free_port(), "0", name, overrides)


def hosts_command(
    name: str, overrides: tuple[str, ...], hosts: dict[str, int], folder: Path, environment: dict[str, str]
) -> list[str]:
    """Start the run on ``hosts``: pdsh takes one plain word to each of them, where `lightnet_llm.launch.host` reads the rest.

    Args:
        name: the configuration as given; the hosts share the working directory.
        overrides: ``key=value``; any characters.
        hosts: slots by host name.
        folder: existing or new folder that all hosts share, the run folder; receives the handover.
        environment: passed on whole, but for what belongs to a host or a rank; names this start's folder of last words.

    Raises:
        UserError: pdsh is missing, or the first host cannot be used.
    """
    folder = folder.resolve()
    first = next(iter(hosts))
    alone = len(hosts) == 1 and is_here(first)
    if not alone and shutil.which("pdsh") is None:
        raise UserError(
            "a run on several hosts is started through pdsh, which is not installed (apt install pdsh); without it, start "
            "each host by hand: lightnet launch CONFIG --emit torchrun"
        )
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port_on(first, ["ssh", *shlex.split(ssh_arguments())])
    gpus = {host: list(range(slots)) for host, slots in hosts.items()}
    command = _launcher(gpus, master_address(hosts), port, RANK, name, overrides)
    write_handover(folder / HANDOVER, command, hosts, environment, Path(environment[VARIABLE]) / FAILED)
    on_host = [sys.executable, "-m", "lightnet_llm.launch.host", str(folder / HANDOVER)]
    if alone:
        return [*on_host, first]
    # pdsh reads % itself and puts the host's name for %h; ssh hands the words to the remote user's shell.
    words = shlex.join(on_host).replace("%", "%%") + " %h"
    # -S: its exit code is the hosts' largest; -b: it dies at the first signal.
    return ["pdsh", "-S", "-b", "-R", "ssh", "-f", str(len(hosts)), "-w", ",".join(hosts), words]


def _launcher(
    gpus: Mapping[str, Sequence[int | str]], address: str, port: int, host: str, name: str, overrides: tuple[str, ...]
) -> list[str]:
    """One host's launcher. gpus: numbers or names by host; host: its index."""
    world = base64.urlsafe_b64encode(json.dumps(gpus).encode()).decode()
    where = ["--world_info", world, "--node_rank", host, "--master_addr", address, "--master_port", str(port)]
    return [*LAUNCHER, *where, "--module", TRAINING, "--config", name, "--launched", *overrides]


def ssh_arguments() -> str:
    """For pdsh and ssh; the user's own PDSH_SSH_ARGS_APPEND comes first, and ssh lets the first of two options stand."""
    return f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}".strip()


def environment_for(ranks: int, hosts: dict[str, int] | None = None) -> dict[str, str]:
    """The launcher's environment: this process's own, and what CPU ranks or pdsh need.

    Args:
        ranks: of the run; on this machine if there are no ``hosts``.
        hosts: of a multi-node run: each finds out by itself whether it has GPUs.
    """
    environment = dict(os.environ)
    if hosts is not None:
        environment["PDSH_SSH_ARGS_APPEND"] = ssh_arguments()
    else:
        if not device_count():
            environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", str(threads(ranks, bool(device_count()))))
    return environment
