"""From a checkpoint to a running engine, on the layout that wrote it or on another."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

from ..checkpoint import randomness, store, universal
from ..errors import UserError
from ..parallel.agreement import Agreement
from .engine import Engine
from .progress import Progress
from .start import Start, warn


def resume(engine: Engine, start: Start, seed: int, ranks: Agreement) -> None:
    """Bring the engine and this rank's random state to where the run stands.

    Raises:
        UserError: the universal form cannot be made or read.
    """
    state = start.state
    if start.checkpoint is None:
        randomness.derive(seed, state.step, ranks.rank)
        return
    kept = randomness.rank_file(start.checkpoint, ranks.rank)
    if start.moves:
        layout = start.manifest["layout"]
        ranks.log(f"{start.checkpoint} was written by {_describe(layout)}, ZeRO {start.manifest['zero_stage']}")
        engine.load_universal(_universal_form(start, ranks, engine.progress), state.step, state.samples)
    else:
        engine.load(start.checkpoint)
    if kept.is_file() and not start.moves:
        randomness.restore(randomness.load(kept))
    else:
        randomness.derive(seed, state.step, ranks.rank)
    ranks.log(f"resumed {start.checkpoint} at step {state.step}")


def _describe(layout: dict[str, int]) -> str:
    return " x ".join(f"{name} {layout[name]}" for name in ("tensor", "pipeline", "sequence", "data"))


def _universal_form(start: Start, ranks: Agreement, progress: Progress) -> Path:
    """The universal form, made first where a host cannot see it: by rank 0, then by one rank of each other host."""
    assert start.checkpoint is not None
    first_of_host = int(os.environ.get("LOCAL_RANK", "0")) == 0
    problem = ""
    for makes in (ranks.rank == 0, first_of_host and ranks.rank != 0):
        worker = _Maker(start.checkpoint, start.manifest, shown=ranks.rank == 0)
        if makes:
            worker.start()
        seen = 0
        while ranks.any(worker.is_alive()):  # a short exchange at a time, so that no collective times out
            if ranks.any(worker.done != seen):  # it moves: the watchdog's time for a start begins again
                seen = worker.done
                progress.begin("start")
            time.sleep(0.1)
        problem = problem or worker.problem
    if ranks.any(bool(problem)):
        raise UserError(problem or "the universal form could not be made on another rank")
    found = universal.whole(start.checkpoint)
    if ranks.any(found is None):
        raise UserError(
            f"{start.checkpoint}: rank {ranks.rank} cannot see its universal form; put train.output on a file "
            "system that all hosts share",
            shared=found is not None,
        )
    assert found is not None
    return found


class _Maker(Thread):
    """Makes the universal form if it is missing or damaged, and shows how far it is."""

    def __init__(self, checkpoint: Path, manifest: dict[str, Any], shown: bool):
        super().__init__(name="universal form", daemon=True)
        self.checkpoint, self.manifest, self.shown = checkpoint, manifest, shown
        self.problem, self.done = "", 0

    def run(self) -> None:
        found = universal.whole(self.checkpoint)
        try:
            if found is not None:
                try:
                    store.verify(found, checksums=self.shown)  # other hosts look at sizes: rank 0 has read it all
                    return
                except ValueError as error:
                    warn(f"making a damaged universal form again: {error}")
            from tqdm import tqdm

            text = f"universal form of {self.checkpoint.name}"
            with tqdm(desc=text, unit="tensor", file=sys.stderr, disable=not self.shown, dynamic_ncols=True) as bar:
                universal.make(self.checkpoint, self.manifest, lambda done, total: self._show(bar, done, total))
        except (UserError, OSError) as error:
            self.problem = str(error)

    def _show(self, bar: Any, done: int, total: int) -> None:
        self.done, bar.total = done, total
        bar.update(done - bar.n)
