"""A profiler's trace of some steps, by one field of the configuration."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

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
    """

    def __init__(self, folder: Path, rank: int, steps: int, start: int):
        self.folder, self.rank, self.first, self.done = folder, rank, start + WAIT + 2, start
        self.profiler: profile | None = None
        if steps:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            plan = schedule(wait=WAIT, warmup=1, active=steps, repeat=1)
            self.last = self.first + steps - 1
            self.profiler = profile(activities=kinds, schedule=plan, on_trace_ready=self._write)
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
