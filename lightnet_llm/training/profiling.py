"""A profiler's trace of some steps, by one field of the configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from .start import warn

WAIT = 5  # steps of a start that compile, fill caches and allocate: not what a run is like


class Trace:
    """Records steps of this rank with torch's profiler: operators and, on a GPU, kernels.

    The file is ``step_A_to_B.rank_R.json.gz`` below ``folder``, for ui.perfetto.dev or chrome://tracing. Steps are slower while
    they are recorded, and the losses the same.

    Args:
        folder: made when the trace is written.
        rank: of the run, for the file's name.
        steps: how many to record, after ``WAIT`` and one that warms the profiler up; 0: none.
        start: steps that were done when the loop began.
        end: the last step of the run; rank 0 warns when that comes before the first to record.
    """

    def __init__(self, folder: Path, rank: int, steps: int, start: int, end: int):
        self.folder, self.rank, self.first, self.done = folder, rank, start + WAIT + 2, start
        self.profiler: profile | None = None
        if steps and end < self.first and rank == 0:
            warn(
                f"logging.profile_steps={steps}: no step is recorded, as the run ends after step {end} and the first to record "
                f"is {self.first}; let it run to step {self.first + steps - 1}, or set logging.profile_steps=0"
            )
        if steps and end >= self.first:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            plan = schedule(wait=WAIT, warmup=1, active=steps, repeat=1)

            def planned(step: int) -> ProfilerAction:
                return plan(max(0, step - start - 1))

            self.last = self.first + steps - 1
            self.profiler = profile(activities=kinds, schedule=planned, on_trace_ready=self._write)
            self.profiler.step_num = start + 1  # the trace numbers steps as the run does
            self.profiler.start()

    def step(self) -> None:
        """Called at the end of every step."""
        self.done += 1
        if self.profiler is None:
            return
        self.profiler.step()
        if self.done >= self.last:
            self.close()

    def close(self) -> None:
        """End the recording; what was recorded of a run that ends early is written, too."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.stop()

    def _write(self, found: profile) -> None:
        if self.done < self.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step_{self.first:08d}_to_{min(self.done, self.last):08d}.rank_{self.rank:05d}.json.gz"
        found.export_chrome_trace(str(self.folder / name))
