"""After an out-of-memory error: which micro-batch would have fitted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM
from ..models.context import ForwardContext
from .schedule import Budget

Attempt = Callable[[int], None]


def _attempt(model: CausalLM, batch: dict[str, Tensor], rows: int) -> None:
    """Forward and backward of the first ``rows`` samples, without touching gradients or communicating."""
    input_ids, labels = batch["input_ids"][:rows], batch["labels"][:rows]
    bounds = batch["cu_seqlens"]
    context = ForwardContext(cu_seqlens=bounds[bounds <= input_ids.numel()])
    loss = model(input_ids, context, labels).loss
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
    moved = {key: value.to(engine.device) for key, value in batch.items()}
    fits = largest_that_fits(lambda rows: _attempt(engine.module, moved, rows), micro)
    shares = [samples // layout.data for samples in (budget.batch, *(b for _, b in budget.stairs))]
    legal = [size for size in range(1, (fits or 0) + 1) if all(share % size == 0 for share in shares)]
    if not legal:
        return f"{message}: not even 1 fits; use a shorter data.sequence_length, tensor parallelism or ZeRO"
    return f"{message}; the largest that fits here is {legal[-1]}: set train.micro_batch={legal[-1]} (same results)"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
