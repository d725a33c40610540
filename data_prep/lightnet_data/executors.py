"""Where the tasks of a stage run: processes of this machine, a Slurm array, or a Ray cluster, by datatrove's executors."""

import contextlib
import io
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from lightnet_data.errors import DataError

KINDS = ("local", "slurm", "ray")


@dataclass(frozen=True)
class Execution:
    """``kind`` of ``KINDS``; ``workers`` tasks at once; ``settings`` further arguments of datatrove's executor."""

    kind: str = "local"
    workers: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor with its tasks, logs and marks of completion, over ``concurrent.futures``.

    The ``multiprocess`` pool that datatrove uses waits for ever when a worker is killed, and starts a further process
    to number the workers. The error of the lowest failing task is raised, whichever came first.
    """

    def __init__(self, *arguments: Any, done: Callable[[int], Any] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._done = done or _nothing

    def run(self) -> None:
        """Run what is not complete.

        Raises:
            DataError: of a step, or a worker died.
        """
        ranks = self.get_incomplete_ranks()
        done, self._done = self._done, _nothing  # not for other processes
        if self.workers == 1:
            for rank in ranks:
                self._quiet(rank)
                done(rank)
            return
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        running: dict[Future[None], int] = {}
        failed: dict[int, BaseException] = {}
        with ProcessPoolExecutor(min(self.workers, len(ranks) or 1), context, initializer=_start_worker) as pool:
            waiting = iter(ranks)
            while True:
                while not failed and len(running) < 2 * self.workers and (rank := next(waiting, None)) is not None:
                    running[pool.submit(self._quiet, rank)] = rank
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    rank = running.pop(future)
                    if future.cancelled():
                        continue
                    error = future.exception()
                    if error is None:
                        done(rank)
                    else:
                        failed[rank] = error
                if failed:
                    for future, rank in running.items():
                        if rank > min(failed):
                            future.cancel()
        if not failed:
            return
        error = failed[min(failed)]
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                f"a worker process died, most likely for want of memory; use fewer than --workers {self.workers}"
            ) from None
        raise error

    def _quiet(self, rank: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # the task's log holds it all
            self._run_for_rank(rank, local_rank=1)


def _nothing(rank: int) -> None:
    pass


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def make(
    pipeline: list[PipelineStep],
    tasks: int,
    name: str,
    logs: Path,
    execution: Execution,
    depends: Any = None,
    done: Callable[[int], Any] | None = None,
) -> Any:
    """The executor of one stage; its ``run`` runs it, or with Slurm submits it behind ``depends``."""
    settings: dict[str, Any] = dict(execution.settings)
    logs = logs / name
    if execution.kind == "local":
        return LocalExecutor(pipeline, tasks=tasks, workers=execution.workers, logging_dir=str(logs), done=done)
    if execution.kind == "slurm":
        from datatrove.executor.slurm import SlurmPipelineExecutor

        absent = [key for key in ("time", "partition") if key not in settings]
        if absent:
            raise DataError(f"--executor slurm needs {' and '.join(absent)}; give --set {absent[0]}=VALUE")
        settings = {"job_name": f"lightnet-prep-{name}", "mail_type": "NONE", "qos": None, **settings}
        return SlurmPipelineExecutor(
            pipeline, tasks=tasks, workers=execution.workers, logging_dir=str(logs), depends=depends, **settings
        )
    if execution.kind == "ray":
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor(pipeline, tasks=tasks, workers=execution.workers, logging_dir=str(logs), **settings)
    raise DataError(f"--executor {execution.kind}: one of {', '.join(KINDS)}")
