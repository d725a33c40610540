"""Everything that is checked and decided before a run does any work; rank 0 does it and tells the others."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import store
from ..config.deepspeed import deepspeed_config, effective_zero_stage
from ..config.run import RunConfig
from ..errors import UserError
from ..parallel.layout import Layout
from . import data, sources
from .run_folder import RunFolder
from .schedule import Budget, budget_of
from .state import RunState


def warn(message: str) -> None:
    """A warning on screen."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        finished: step at which the run had already reached its budget; nothing is left to do.
        checkpoint: folder to resume from.
        manifest: its manifest.
        stages: bounds of its pipeline stages, which a run keeps on the layout that wrote it.
        moves: whether another layout wrote it, so that it is read in its universal form.
        state: where it stands.
        weights: folder whose weights (only) start the run.
        identity: what the training data are, kept in every checkpoint.
    """

    finished: int | None
    checkpoint: Path | None
    state: RunState
    weights: Path | None
    identity: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    stages: list[int] | None = None
    moves: bool = False


def prepare(config: RunConfig, folder: RunFolder, layout: Layout, launched: bool) -> Start:
    """Check everything, decide where to begin, and only then write to the run folder.

    Raises:
        UserError, DataError: in one line; nothing was changed.
    """
    folder.check()
    folder.lock()
    deepspeed_config(config, layout.data, layout.sequence)
    tokenizer = data.check_tokenizer(config)
    identity = data.check_sets(config, warn)
    budget = budget_of(config, layout.data)
    for line in sources.lines(sources.epochs(config, budget.samples_before(budget.steps))):
        print(line, file=sys.stderr, flush=True)
    resume = config.train.resume != "never"
    done = folder.finished_step() if resume else None
    if done is not None and done >= budget.steps:
        return Start(done, None, RunState(), None, identity)
    found = store.newest_whole(folder.checkpoints, warn) if resume else None
    if resume and found is None and folder.has_checkpoint:
        raise UserError(
            f"no checkpoint in {folder.checkpoints} is whole; restore one, or start another run with train.name=NAME"
        )
    state, weights = RunState(), None
    if found is not None:
        state = _check_checkpoint(*found, config, identity, budget)
    elif config.train.init_from is not None:
        weights = store.resolve(Path(config.train.init_from), warn)
    if found is not None:
        store.set_aside_newer(folder.checkpoints, found[0])
    folder.record(layout.as_dict(), tokenizer)
    if not launched:  # `lightnet train` has done it before it started the ranks, and may ask for a stop at any time
        folder.clear_stop()
    if found is None:
        return Start(None, None, state, weights, identity)
    native = {**layout.as_dict(), **_native(config)}
    written = {**found[1]["layout"], **{key: found[1].get(key, now) for key, now in _native(config).items()}}
    moves = written != native
    stages = None if moves else found[1].get("stages")
    return Start(None, found[0], state, weights, identity, found[1], stages, moves)


def _native(config: RunConfig) -> dict[str, Any]:
    """What beside the layout decides how DeepSpeed's own files are cut."""
    return {
        "zero_stage": effective_zero_stage(config),
        "pipeline_partition": config.parallel.pipeline_partition,
    }


def _check_checkpoint(
    path: Path, manifest: dict[str, Any], config: RunConfig, identity: dict[str, Any], budget: Budget
) -> RunState:
    if manifest["data"].get("order", 1) != identity["order"]:
        raise UserError(
            f"{path} was trained on samples in another order (version {manifest['data'].get('order', 1)}, this is "
            f"{identity['order']}); continue it with the version that wrote it, or start another run with train.init_from={path}"
        )
    if manifest["data"] != identity:
        raise UserError(
            f"{_named(config)} holds other data than {path} was trained on ({identity} now, "
            f"{manifest['data']} then); restore them, or start another run with train.init_from={path}"
        )
    state = RunState.from_dict(manifest["state"])
    if state.step > budget.steps:
        raise UserError(f"{path} is at step {state.step} already, beyond the budget of {budget.steps} steps; raise it")
    return state


def _named(config: RunConfig) -> str:
    return "data.mixture" if config.data.mixture else f"data.path {config.data.path}"
