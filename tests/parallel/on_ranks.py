"""Starts ranks that all call one function, on CPUs (forks) or GPUs (processes): for modules that `python -m` runs."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightnet_llm.launch.hosts import free_port


def attempt(label: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except Exception as error:
        raise AssertionError(f"{label}: {error}") from error


def rank_main(run: Callable[..., None], device: str, *arguments: str) -> None:
    """One rank, placed by the environment."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    run(device, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(module: str, run: Callable[..., None], world: int, device: str, *arguments: str) -> int:
    """What the module does with these arguments: ``run(device, *arguments)`` on so many ranks. Returns the worst exit code."""
    where = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if os.environ.get("RANK"):
        rank_main(run, device, *arguments)
        return 0
    os.environ.update(where)
    if device == "cuda":  # does not survive a fork
        command = [sys.executable, "-m", module, str(world), device, *arguments]
        ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}) for rank in range(world)]
        return max(abs(process.wait()) for process in ranks)
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.unit.kernels import quick_interpreter

        quick_interpreter.install()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            try:
                rank_main(run, device, *arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
