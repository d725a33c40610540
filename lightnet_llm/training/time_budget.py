"""A budget in hours, turned into steps once: by a trial before the first step, whose result the run folder keeps.

Rates and batches are functions of the step and of how many there are (law 1 of a run), so what fits into the time must be known
before the run begins, and must stay what it was when the run is resumed, on a faster machine, too.
"""

from __future__ import annotations

import gc
import json
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.store import write_text
from ..config.run import RunConfig
from ..parallel.agreement import Agreement
from ..parallel.layout import Groups
from . import data
from .engine import build_engine
from .run_folder import METRICS, RunFolder
from .schedule import Budget, steps_for

FILE = "time_budget.json"
WARM_UP, TIMED = 3, 5  # steps of a trial


def known(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The configuration with the steps that an earlier start found, where one has trained.

    What a start found that failed before its first step may be of another batch, layout or machine, and binds nobody. Once steps
    were trained, hours and batch are those of the file: :meth:`.RunFolder.check` refuses others.
    """
    path = folder.path / FILE
    if config.train.hours is None or config.train.steps is not None or not path.is_file():
        return config
    metrics = folder.path / METRICS  # it may be there already, with what `lightnet train` says of the start that failed
    if not folder.has_checkpoint and not (metrics.is_file() and '"loss"' in metrics.read_text()):
        return config
    return _with_steps(config, int(json.loads(path.read_text())["steps"]))


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def fixed(config: RunConfig, folder: RunFolder, groups: Groups, device: torch.device, ranks: Agreement) -> RunConfig:
    """The configuration with the steps that ``train.hours`` allow; as it is where it has steps or no hours.

    The trial runs whole steps of the batch behind the ramp, on a model that is thrown away. Validation and saving are not in it.

    Raises:
        UserError, DataError: what would keep the run from starting.
    """
    hours = config.train.hours
    if hours is None or config.train.steps is not None:
        return config
    config = ranks.on_rank_zero(lambda: _checked(config, folder))
    if config.train.steps is not None:
        return config
    seconds = _seconds_per_step(config, groups, device, ranks)
    samples = math.floor(hours * 3600.0 / seconds * config.train.global_batch)
    steps = max(1, steps_for(config.train, samples))
    facts = {"hours": hours, "seconds_per_step": round(seconds, 6), "steps": steps}
    ranks.on_rank_zero(lambda: write_text(folder.path / FILE, json.dumps(facts) + "\n"))
    ranks.log(f"{seconds:.4g} s a step of {config.train.global_batch} samples: {hours:g} hours are {steps:,} steps")
    return _with_steps(config, steps)


def _checked(config: RunConfig, folder: RunFolder) -> RunConfig:
    """What is known of the steps, after what a start refuses before any work."""
    folder.check()
    found = known(config, folder)
    if found.train.steps is None:
        data.check_tokenizer(config)
        data.check_sets(config)
        folder.path.mkdir(parents=True, exist_ok=True)
    return found


def _seconds_per_step(config: RunConfig, groups: Groups, device: torch.device, ranks: Agreement) -> float:
    """Mean over ranks of the time of a whole step."""
    trial = _with_steps(config, WARM_UP + TIMED)
    budget = Budget((), config.train.global_batch, WARM_UP + TIMED, config.data.sequence_length)
    engine = build_engine(trial, groups, device)
    batches = data.training_batches(trial, budget, groups.place["data"], groups.layout.data, 0)
    began = 0.0
    for step in range(budget.steps):
        if step == WARM_UP:
            _wait(device)
            began = time.perf_counter()
        engine.set_rate(0.0)
        engine.train_step(batches, step, config.train.global_batch)
    _wait(device)
    micros = ranks.sum(int((time.perf_counter() - began) / TIMED * 1e6))
    del batches
    _forget(engine)
    return max(micros, 1) / 1e6 / dist.get_world_size()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(engine: Any) -> None:
    """Free a trial's model and optimiser, which the run will build anew."""
    engine.engine.destroy()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
