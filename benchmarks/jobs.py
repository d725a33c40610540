"""Jobs of the benchmarks: ranks forked from one process that has imported torch, DeepSpeed and the training engine.

A job is a function of one JSON-like request that every rank calls; what rank 0 returns is the job's result.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE = 2.0  # seconds in which the others of a rank that failed may say why

PACKAGES = (
    "torch",
    "triton",
    "deepspeed",
    "megatron-core",
    "flash-linear-attention",
    "transformers",
    "diffusers",
    "timm",
)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "deepspeed", "lightnet_llm.training.engine", "lightnet_kernels.scan"])


def facts() -> dict[str, Any]:
    """What every kept result says: date, cards, versions and arguments. Asks no CUDA context of this process."""
    import torch

    cards: list[str] = []
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        cards = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cards": cards or ["cpu"],
        "versions": versions,
        "arguments": sys.argv[1:],
    }


def side_by_side(sizes: dict[str, int], run: Callable[[str, list[int]], object]) -> None:
    """Call ``run(name, cards)`` for every name, the smallest first, as many at a time as there are cards for.

    Args:
        sizes: how many cards each takes; without GPUs one runs at a time.
    """
    import torch

    have = torch.cuda.device_count()
    free: SimpleQueue[int] = SimpleQueue()
    for card in range(have):
        free.put(card)
    taking = Lock()  # a job takes all of its cards before another takes any: nobody waits for half

    def one(name: str) -> None:
        if not have:
            run(name, list(range(sizes[name])))
            return
        with taking:
            cards = [free.get() for _ in range(sizes[name])]
        try:
            run(name, cards)
        finally:  # or those that wait for them wait for ever
            for card in cards:
                free.put(card)

    with ThreadPoolExecutor(max(1, have)) as pool:
        list(pool.map(one, sorted(sizes, key=lambda name: sizes[name])))


def run_job(
    job: Callable[[Any], Any], request: Any, cards: list[int], seconds: float, **environment: str
) -> dict[str, Any]:
    """Call ``job(request)`` on one rank per card; rank 0's answer, or {"failed": why}.

    ``cards`` are those of CUDA_VISIBLE_DEVICES where that is set; without GPUs only their number counts.
    """
    from lightnet_llm.launch.host import has_gpus, threads
    from lightnet_llm.launch.hosts import free_port

    # Read by the process that forks ranks when it starts: to import must not start CUDA, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["DS_ACCELERATOR"] = "cuda" if has_gpus() else "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [visible.split(",")[card] for card in cards] if visible else [str(card) for card in cards]
    where = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(cards)),
        "CUDA_VISIBLE_DEVICES": ",".join(chosen), **environment,
    }  # fmt: skip
    count = int(os.environ.get("OMP_NUM_THREADS", threads(len(cards), has_gpus())))
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log")
        ranks = [
            _SERVER.Process(
                target=_rank,
                args=(job, request, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}, count, folder),
            )
            for rank in range(len(cards))
        ]
        for rank in ranks:
            rank.start()
        end, died = time.time() + seconds, list[str]()
        while any(rank.is_alive() for rank in ranks):
            if time.time() > end or any(rank.exitcode for rank in ranks):
                died = [
                    f"rank {n}: {signal.Signals(-x.exitcode).name}"
                    for n, x in enumerate(ranks)
                    if (x.exitcode or 0) < 0
                ]
                time.sleep(GRACE)
                for rank in ranks:
                    rank.kill()
            time.sleep(0.1)
        if found.is_file():
            return json.loads(found.read_text())
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
        short = any("OutOfMemoryError" in line or "out of memory" in line for line in lines)
        return {"failed": "out of memory" if short else " | ".join([*lines[-3:], *died])[-400:] or "time is up"}


def _end_with_parent() -> None:
    """Whoever ends the benchmark wants its cards back."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _rank(job: Callable[[Any], Any], request: Any, where: dict[str, str], threads: int, folder: str) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(where)
    os.chdir(ROOT)
    with Path(folder, "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    try:
        result = job(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    if dist.get_rank() == 0:
        partial = Path(folder, "found.json.partial")
        partial.write_text(json.dumps(result))
        partial.replace(Path(folder, "found.json"))
    dist.barrier()
    os._exit(0)  # without waiting for NCCL's threads
