"""Learning rate, batch size and budget as functions of the step alone (laws 1 and 2 of a run)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.run import RunConfig, ScheduleConfig, TrainConfig
from ..errors import UserError
from ..parallel.legality import batch_problem


def learning_rate_factor(schedule: ScheduleConfig, step: int, total: int) -> float:
    """Share of the peak rate used by the update number ``step`` (from 0) of ``total``.

    ``cosine``: half a cosine to ``final_ratio``; ``inverse_sqrt``: sqrt(warmup / step); ``constant``; ``wsd``: constant, then
    linear to ``final_ratio`` over the last ``decay_share``; ``triangle``: linear up over ``peak_share`` of the budget and
    linear down to ``final_ratio`` (warm-up steps are ignored there).
    """
    floor = schedule.final_ratio
    if schedule.kind == "triangle":
        peak = max(1.0, schedule.peak_share * total)
        if step < peak:
            return (step + 1) / (peak + 1)
        return 1.0 - (1.0 - floor) * min(1.0, (step + 1 - peak) / max(1.0, total - peak))
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "inverse_sqrt":
        return math.sqrt(max(1, warmup) / (step + 1))
    if schedule.kind == "constant":
        return 1.0
    progress = (step + 1 - warmup) / max(1, total - warmup)
    if schedule.kind == "cosine":
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    start = 1.0 - schedule.decay_share
    return 1.0 - (1.0 - floor) * min(1.0, max(0.0, (progress - start) / schedule.decay_share))


@dataclass(frozen=True)
class Budget:
    """Batch sizes and length of a run.

    Attributes:
        stairs: (until_step, batch) of the ramp, ascending.
        batch: samples per step after the ramp.
        steps: optimiser steps of the whole run; 0 as long as those of ``train.hours`` are not known.
        sequence_length: tokens per sample.
    """

    stairs: tuple[tuple[int, int], ...]
    batch: int
    steps: int
    sequence_length: int

    def batch_at(self, step: int) -> int:
        """Samples of the update number ``step`` (from 0)."""
        for until, batch in self.stairs:
            if step < until:
                return batch
        return self.batch

    def samples_before(self, step: int) -> int:
        """Samples consumed by all earlier updates: the first global sample position of ``step``."""
        total, previous = 0, 0
        for until, batch in self.stairs:
            total += max(0, min(step, until) - previous) * batch
            previous = until
        return total + max(0, step - previous) * self.batch


def budget_of(config: RunConfig, data_parallel: int) -> Budget:
    """The budget of a run on ``data_parallel`` ranks that read different samples.

    Raises:
        UserError: a batch size is not a multiple of micro_batch x data-parallel size.
    """
    train = config.train
    stairs = tuple((point.until_step, point.batch) for point in train.batch_ramp)
    problem = batch_problem(train, data_parallel)
    if problem is not None:
        raise UserError(problem)
    budget = Budget(stairs, train.global_batch, train.steps or 0, config.data.sequence_length)
    if train.tokens is None:
        return budget
    steps = steps_for(train, -(-train.tokens // config.data.sequence_length))
    return Budget(stairs, train.global_batch, steps, config.data.sequence_length)


def steps_for(train: TrainConfig, samples: int) -> int:
    """Steps that read so many samples, the ramp's included; rounded up."""
    stairs = tuple((point.until_step, point.batch) for point in train.batch_ramp)
    budget, end = Budget(stairs, train.global_batch, 0, 1), stairs[-1][0] if stairs else 0
    if budget.samples_before(end) >= samples:
        return next(s for s in range(end + 1) if budget.samples_before(s) >= samples)
    return end + -(-(samples - budget.samples_before(end)) // train.global_batch)
