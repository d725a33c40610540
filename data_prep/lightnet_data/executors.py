"""Where the tasks of a stage run: processes of this machine, a Slurm array, or a Ray cluster, by datatrove's executors."""

import contextlib
import io
import logging
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datatrove.data import DocumentsPipeline
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from lightnet_data import workers as processes
from lightnet_data.errors import DataError

KINDS = ("local", "slurm", "ray")


@dataclass(frozen=True)
class Execution:
    """``kind`` of ``KINDS``; ``workers`` tasks at once; ``settings`` further arguments of datatrove's executor."""

    kind: str = "local"
    workers: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


class Submitted(Exception):
    """A stage waits in a queue: run the same command again when ``job`` is done."""

    def __init__(self, stage: str, tasks: int, job: str) -> None:
        super().__init__(stage, tasks, job)
        self.stage, self.tasks, self.job = stage, tasks, job


class Recorded(PipelineStep):
    """The last step of a stage, with its error left in a file: a queue or a Ray actor does not hand it back."""

    name, type = "recorded", "📝 - RECORD"

    def __init__(self, step: PipelineStep, folder: Path) -> None:
        super().__init__()
        self.step, self.folder = step, folder

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """As the step's."""
        try:
            self.step.run(data, rank, world_size)
        except Exception as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            known = isinstance(error, DataError)
            (self.folder / f"{rank:05d}").write_text(str(error) if known else f"{type(error).__name__}: {error}")
            raise


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
        running: dict[Future[None], int] = {}
        failed: dict[int, BaseException] = {}
        workers = min(self.workers, len(ranks) or 1)
        pool = processes.pool(workers)
        waiting = iter(ranks)
        try:
            # After a failure only what may fail earlier in the corpus is waited for.
            while not failed or any(rank < min(failed) for rank in running.values()):
                while not failed and len(running) < 2 * workers and (rank := next(waiting, None)) is not None:
                    running[pool.submit(self._quiet, rank)] = rank
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    rank = running.pop(future)
                    if (error := future.exception()) is None:
                        done(rank)
                    else:
                        failed[rank] = error
        except BrokenProcessPool as broken:  # of a task that was handed to it just then
            failed.setdefault(len(ranks), broken)
        finally:  # also after Ctrl-C: a part is whole or not there, so that nothing need be waited for
            started = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started if running else ():
                process.kill()
            for process in started:
                process.join()
        if not failed:
            return
        first = failed[min(failed)]
        if isinstance(first, BrokenProcessPool):
            raise processes.died(self.workers) from None
        raise first

    def _quiet(self, rank: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # the task's log holds it all
            self._run_for_rank(rank, local_rank=1)


def _nothing(rank: int = 0) -> None:
    pass


def run(
    pipeline: list[PipelineStep],
    tasks: int,
    name: str,
    logs: Path,
    execution: Execution,
    done: Callable[[int], Any] | None = None,
) -> None:
    """Run a stage to its end, or with Slurm submit what is not done of it.

    Raises:
        DataError: of a step, or no cluster is there.
        Submitted: parts of it are in a queue.
    """
    logs = logs / name
    settings: dict[str, Any] = dict(execution.settings)
    if execution.kind == "local":
        LocalExecutor(pipeline, tasks=tasks, workers=execution.workers, logging_dir=str(logs), done=done).run()
        return
    from datatrove.utils.logging import logger

    logger.disable("datatrove")  # here; the tasks' logs have it all
    steps = [*pipeline[:-1], Recorded(pipeline[-1], logs / "errors")]
    common = {"tasks": tasks, "workers": execution.workers, "logging_dir": str(logs)}
    if execution.kind == "slurm":
        _submit(steps, name, logs, common, settings)
    elif execution.kind == "ray":
        _on_ray(steps, logs, common, settings)
    else:
        raise DataError(f"--executor {execution.kind}: one of {', '.join(KINDS)}")


def _raise_recorded(logs: Path) -> None:
    """The error of the lowest task that left one; a further run tries again."""
    errors = logs / "errors"
    for path in sorted(errors.glob("*")):
        message = path.read_text()
        shutil.rmtree(errors)
        raise DataError(message)


def _submit(steps: list[PipelineStep], name: str, logs: Path, common: Any, settings: dict[str, Any]) -> None:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    absent = [key for key in ("time", "partition") if key not in settings]
    if absent:
        raise DataError(f"--executor slurm needs {' and '.join(absent)}; give --set {absent[0]}=VALUE")
    settings = {"job_name": f"lightnet-prep-{name}", "mail_type": "NONE", "qos": None, **settings}
    try:
        executor = SlurmPipelineExecutor(steps, **common, **settings)
        executor.launch_merge_stats = _nothing  # a job more, for figures nobody reads
    except TypeError as error:  # a setting that is none
        raise DataError(
            f"--executor slurm: {str(error).split(') ')[-1]}; see datatrove's SlurmPipelineExecutor"
        ) from None
    left = executor.get_incomplete_ranks()
    if not left:
        return
    job = logs / "job"
    if job.is_file() and _queued(job.read_text()):
        raise Submitted(name, len(left), job.read_text())
    _raise_recorded(logs)
    try:
        executor.run()
    except (OSError, subprocess.CalledProcessError) as error:
        detail = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise DataError(
            f"--executor slurm: sbatch failed ({detail}); the script is {logs}/launch_script.slurm"
        ) from None
    job.write_text(str(executor.job_id))
    raise Submitted(name, len(left), str(executor.job_id))


def _queued(job: str) -> bool:
    try:
        found = subprocess.run(["squeue", "-h", "-o", "%T", "-j", job], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return found.returncode == 0 and bool(found.stdout.strip())


def _on_ray(steps: list[PipelineStep], logs: Path, common: Any, settings: dict[str, Any]) -> None:
    try:
        import ray
    except ImportError:
        raise DataError("--executor ray needs Ray: pip install ray") from None
    from datatrove.executor.ray import RayPipelineExecutor

    address = str(settings.pop("address", "auto"))
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():  # Ray tries for minutes
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"--executor ray: no cluster at {address} ({reason}); start one with ray start --head"
        ) from None
    try:
        executor = RayPipelineExecutor(steps, **common, **settings)
    except TypeError as error:
        raise DataError(f"--executor ray: {str(error).split(') ')[-1]}; see datatrove's RayPipelineExecutor") from None
    executor.run()
    _raise_recorded(logs)
    left = len(executor.get_incomplete_ranks())
    if left:
        raise DataError(
            f"--executor ray: {left} of {executor.world_size} tasks did not finish, and a run goes on from there; their "
            f"logs are in {logs}. Do all nodes see this folder?"
        )
