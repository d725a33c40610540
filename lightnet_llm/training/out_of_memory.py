"""After an out-of-memory error: which micro-batch would have fitted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..parallel.clock import Clock
from .schedule import Budget
from .tasks import Batch, Task

Attempt = Callable[[int], None]


def _attempt(task: Task, model: nn.Module, batch: Batch, rows: int) -> None:
    """Forward and backward of the first ``rows`` samples, without touching gradients or communicating."""
    loss = task.loss(model, task.rows(batch, rows), Clock(0), True)
    torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def largest_that_fits(attempt: Attempt, failed: int) -> int | None:
    """Bisect the largest size below ``failed`` for which ``attempt(size)`` does not run out of memory."""
    low, high = 0, failed
    while high - low > 1:
        middle = (low + high) // 2
        try:
            attempt(middle)
            low = middle
        except torch.OutOfMemoryError:
            high = middle
        _release()
    return low or None


def advice(engine: Any, budget: Budget) -> str:
    """One line for the user; tries smaller micro-batches where that needs no other rank.

    Only sizes that divide every batch of the run are named: they give the same results.
    """
    micro = engine.config.train.micro_batch
    message = f"out of memory with train.micro_batch {micro}"
    batch, layout = engine.last_batch, engine.groups.layout
    if batch is None or layout.world != layout.data or engine.zero_stage == 3:
        return f"{message}; set a smaller train.micro_batch (the results stay the same)"
    engine.engine.zero_grad()
    _release()
    moved = engine.task.to_device(batch, engine.device)
    fits = largest_that_fits(lambda rows: _attempt(engine.task, engine.module, moved, rows), micro)
    shares = [samples // layout.data for samples in (budget.batch, *(b for _, b in budget.stairs))]
    legal = [size for size in range(1, (fits or 0) + 1) if all(share % size == 0 for share in shares)]
    if not legal:
        return f"{message}: not even 1 fits; use a shorter data.sequence_length, tensor parallelism or ZeRO"
    return f"{message}; the largest that fits here is {legal[-1]}: set train.micro_batch={legal[-1]} (same results)"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
