"""Saving a run: at once, or from a copy in host memory while training goes on (``checkpoint.async``).

Either way each rank writes its own files, all ranks agree that they are written, and only then rank 0 turns the folder
into a checkpoint. DeepSpeed's own asynchronous engine (0.19.8) is not used: it drops a save without a word when its
process has died, and needs an AIO operator compiled on the machine.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from torch import Tensor, nn

from ..checkpoint import randomness, store
from ..checkpoint.weights import AVERAGE, FOLDER, gather_weights, part_file, write_weights
from ..config.run import RunConfig
from ..errors import UserError
from ..parallel.agreement import Agreement
from ..parallel.layout import Groups
from . import ema
from .engine import Engine
from .run_folder import RunFolder
from .start import warn
from .state import RunState

Report = Callable[[int, dict[str, Any]], None]


class _Job:
    """The files of one checkpoint that this rank writes, and then (on rank 0) what makes it whole."""

    def __init__(self, step: int, folder: Path, facts: dict[str, Any], doubted: bool):
        self.step, self.folder, self.facts, self.doubted = step, folder, facts, doubted
        self.pause = 0.0  # seconds for which training waited
        self.problem: str | None = None
        self.writes: list[Callable[[], None]] = []
        self.thread: Thread | None = None
        self.committing = False
        self.began = time.perf_counter()
        self.step_seconds: list[float] = []

    def run(self, action: Callable[[], None]) -> None:
        """Do it; whatever goes wrong is kept for :attr:`problem`: other ranks wait, and a thread's errors are lost."""
        try:
            action()
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"

    def write_all(self) -> None:
        """Write what was put off."""
        for write in self.writes:
            if self.problem is None:
                self.run(write)
        self.writes.clear()

    def start(self, action: Callable[[], None]) -> None:
        """Run ``action`` beside training; a thread that a dying process takes with it."""
        self.thread = Thread(target=action, name=f"checkpoint {self.step}", daemon=True)
        self.thread.start()

    @property
    def working(self) -> bool:
        """Whether its thread still runs."""
        return self.thread is not None and self.thread.is_alive()


class Saver:
    """Writes this run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        identity: what the training data are.
        report: told on rank 0 (step, figures) when a checkpoint is whole.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        groups: Groups,
        ranks: Agreement,
        engine: Engine,
        identity: dict[str, Any],
        report: Report,
    ):
        self.config, self.folder, self.groups, self.ranks, self.engine = config, folder, groups, ranks, engine
        self.identity, self.report = identity, report
        self.job: _Job | None = None
        self.usual_seconds: list[float] = []  # of the last steps with nothing to write beside them

    def save(self, state: RunState, due: Sequence[int] = (), doubted: bool = False) -> None:
        """Write a checkpoint, or begin to; one that is still being written is finished first.

        Args:
            due: steps at which it fell due, earlier ones where skipped steps put it off.
            doubted: whether its last step was skipped: it then pushes no older one out.

        Raises:
            UserError: it, or the one before, could not be written; older ones are intact.
        """
        began = time.perf_counter()
        self.wait()
        root = self.folder.checkpoints
        folder = Path(self.ranks.on_rank_zero(lambda: str(store.begin(root, state.step))))
        self.job = job = _Job(state.step, folder, self._facts(state, due), doubted)
        self._collect(job, state)
        if self.config.checkpoint.asynchronous:
            job.pause = time.perf_counter() - began
            job.start(job.write_all)
            return
        self._agree(job)
        if self.ranks.rank == 0:
            job.run(lambda: self._commit(job))
        self._agree(job)
        job.pause = time.perf_counter() - began
        self._finish(job)

    def after_step(self, seconds: float) -> None:
        """Look after a checkpoint that is being written; called after every step with its duration.

        Raises:
            UserError: a rank could not write; on all ranks at the same step.
        """
        job = self.job
        if job is None:
            self.usual_seconds = [*self.usual_seconds[-19:], seconds]
            return
        job.step_seconds.append(seconds)
        if not self.ranks.any(job.working):
            self._advance(job)

    def wait(self) -> None:
        """Finish what is being written, on all ranks.

        Raises:
            UserError: a rank could not write.
        """
        while (job := self.job) is not None:
            if job.thread is not None:
                job.thread.join()
            while self.ranks.any(job.working):  # a short exchange at a time, so that no collective times out
                time.sleep(0.2)
            self._advance(job)

    def _advance(self, job: _Job) -> None:
        """No rank works: all have written, or rank 0 has made it whole."""
        self._agree(job)
        if job.committing:
            self._finish(job)
            return
        job.committing = True
        if self.ranks.rank == 0:
            job.start(lambda: job.run(lambda: self._commit(job)))

    def _agree(self, job: _Job) -> None:
        if not self.ranks.any(job.problem is not None):
            return
        self.job = None
        root = self.folder.checkpoints
        free = shutil.disk_usage(root).free / 2**20
        raise UserError(
            f"checkpoint of step {job.step} could not be written ({job.problem or 'on another rank'}; {free:.0f} MiB free "
            f"in {root}); older ones are intact"
        )

    def _finish(self, job: _Job) -> None:
        self.job = None
        figures: dict[str, Any] = {"step": job.step, "pause_seconds": round(job.pause, 4)}
        if self.config.checkpoint.asynchronous:
            figures["write_seconds"] = round(time.perf_counter() - job.began, 4)
            figures["steps_while_writing"] = len(job.step_seconds)
            for name, seconds in (
                ("step_seconds_while_writing", job.step_seconds),
                ("step_seconds", self.usual_seconds),
            ):
                figures[name] = round(sum(seconds) / len(seconds), 5) if seconds else None
        self.report(job.step, figures)

    def _average(self) -> Callable[[nn.Parameter], Tensor | None] | None:
        """Reads the exponential average, where there is one."""
        if self.config.train.ema is None:
            return None
        return ema.reader(self.engine.optimizer, self.engine.zero_stage)

    def _facts(self, state: RunState, due: Sequence[int]) -> dict[str, Any]:
        return {
            "format": 1,
            "state": state.as_dict(),
            "layout": self.groups.layout.as_dict(),
            "zero_stage": self.engine.zero_stage,
            "pipeline_partition": self.config.parallel.pipeline_partition,
            "stages": self.engine.stages,
            "data": self.identity,
            store.DUE: [*due],
            **({} if self._average() is None else {"ema": self.config.train.ema}),
        }

    def _commit(self, job: _Job) -> None:
        world = self.groups.layout.world
        unseen = [rank for rank in range(world) if not randomness.rank_file(job.folder, rank).is_file()]
        if unseen:  # each rank's last file
            raise OSError(
                f"files of ranks {unseen} cannot be seen in {job.folder}; train.output must lie on shared storage"
            )
        (job.folder / "config.yaml").write_bytes((self.folder.path / "config.yaml").read_bytes())
        store.commit(self.folder.checkpoints, job.step, job.facts)
        if job.doubted:
            return
        keep = self.config.checkpoint
        try:
            store.prune(self.folder.checkpoints, keep.keep_last, keep.keep_every)
        except OSError as error:  # this one is whole all the same
            warn(
                f"checkpoint of step {job.step} is saved, but an older one could not be removed ({error}); remove it by hand"
            )

    def _collect(self, job: _Job, state: RunState) -> None:
        """Write this rank's files, or copy what they will hold; a rank that cannot write still joins collectives."""
        later = self.config.checkpoint.asynchronous

        def put(write: Callable[[], None], path: Path) -> None:
            def whole() -> None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write()
                store.sync(path)  # from the machine that wrote it

            if later:
                job.writes.append(whole)
            elif job.problem is None:
                job.run(whole)

        def save_file(content: Any, path: Path) -> None:
            kept = clone_tensors_for_torch_save(content) if later else content
            put(lambda: torch.save(kept, path), path)

        job.run(lambda: self.engine.save(job.folder, state.as_dict(), save_file))
        place = self.groups.place
        # One rank of those that hold the same parameters writes them.
        writes = place["data"] == 0 and place["sequence"] == 0
        average = self._average()
        for which, instead in ((FOLDER, None), *([(AVERAGE, average)] if average is not None else [])):
            tensors, joins = gather_weights(self.engine.module, self.engine.zero_stage, writes, instead)
            if writes:
                path = part_file(job.folder, place["pipeline"], place["tensor"], which)
                put(partial(write_weights, path, tensors, joins, place["tensor"], self.groups.layout.tensor), path)
        # The last of this rank's files: rank 0 takes it for the sign that all of them can be seen.
        save_file(randomness.capture(), randomness.rank_file(job.folder, self.ranks.rank))
