"""A process that imports the training stack once and forks ranks on request: a fast launcher for tests.

On GPUs as on CPUs: nothing of what it imports starts CUDA, which no fork survives. Where a fork cannot use its GPU all the
same, every rank becomes a process of its own, which imports everything again.

Protocol, one JSON object a line. In: {"id", "world", "arguments", "log", "plant", "timeout", "grace", "environment"}, any
number at a time. Out: {"id", "codes"}. ``grace`` is how long ranks may outlive the first that failed before they are killed.
``plant`` names functions of tests.parallel.faults, with commas, that every rank calls before it trains. When its input
ends, so do it and the ranks.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from lightnet_llm.launch.hosts import free_port
from tests.forks import detach, end_with

INTERVAL = 0.02  # seconds between looks at running ranks


@dataclass
class Run:
    """Ranks that run. Times are of the monotonic clock, in seconds."""

    pids: list[int]
    kill_at: float
    grace: float = 0
    id: int = 0
    codes: dict[int, int] = field(default_factory=dict)

    def ended(self) -> bool:
        """Whether all ranks have; kills those that are overdue."""
        for pid in self.pids:
            if pid not in self.codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[pid] = os.waitstatus_to_exitcode(found[1])
                if self.codes[pid]:
                    self.kill_at = min(self.kill_at, time.monotonic() + self.grace)
        if time.monotonic() > self.kill_at:
            self.kill()
        return len(self.codes) == len(self.pids)

    def kill(self) -> None:
        """End the ranks that run yet."""
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)


def train(plant: str, arguments: list[str]) -> NoReturn:
    """The life of a rank, which finds its place in the environment."""

    def run() -> None:
        for name in filter(None, plant.split(",")):
            from tests.parallel import faults

            getattr(faults, name)()
        from lightnet_llm.training.main import start

        sys.argv[1:] = arguments
        start()

    end_with(run)


def _fork(rank: int, port: int, request: dict[str, Any], forks: bool, replies: IO[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    detach(replies, f"{request['log']}.rank{rank}", os.O_CREAT | os.O_TRUNC)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["world"], "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(request["environment"])
    if not forks:
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, request["plant"], *request["arguments"]])
    train(request["plant"], request["arguments"])


def _start(request: dict[str, Any], forks: bool, replies: IO[str]) -> Run:
    port = free_port()  # not an ephemeral one, which a connection of another run may have when ranks come to it
    pids = [_fork(rank, port, request, forks, replies) for rank in range(request["world"])]
    return Run(pids, time.monotonic() + request["timeout"], request["grace"], request["id"])


def _forks_work() -> bool:
    """Whether a fork of this process can use a GPU; said on standard error if not."""
    import torch

    pid = os.fork()
    if not pid:
        try:
            torch.ones(1, device="cuda").sum().item()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    probe = Run([pid], time.monotonic() + 60)
    while not probe.ended():
        time.sleep(INTERVAL)
    if probe.codes[pid]:
        print(f"a fork cannot use CUDA (exit code {probe.codes[pid]}): a process a rank", file=sys.stderr, flush=True)
    return not probe.codes[pid]


def serve() -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else to ask whether there is a GPU starts CUDA
    import torch

    gpu = torch.cuda.is_available()
    os.environ["DS_ACCELERATOR"] = "cuda" if gpu else "cpu"
    import lightnet_llm.training.loop  # noqa: F401  (the import that ranks share)

    if gpu:
        from lightnet_kernels.scan import backends

        backends()  # imports Triton's
    forks = not gpu or _forks_work()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    runs: list[Run] = []
    rest = b""
    while True:
        if select.select([0], [], [], INTERVAL if runs else None)[0]:
            got = os.read(0, 65536)
            if not got:
                break
            *lines, rest = (rest + got).split(b"\n")
            runs += [_start(json.loads(line), forks, replies) for line in lines]
        for run in [run for run in runs if run.ended()]:
            runs.remove(run)
            codes = [run.codes[pid] for pid in run.pids]
            print(json.dumps({"id": run.id, "codes": codes}), file=replies, flush=True)
    for run in runs:
        run.kill()


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1], sys.argv[2:])
    serve()
