"""After an out-of-memory error: which micro-batch would have fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM, masked_mean
from ..models.context import ForwardContext

Attempt = Callable[[int], None]


def _attempt(model: CausalLM, batch: dict[str, Tensor], rows: int) -> None:
    """Forward and backward of the first ``rows`` samples, without touching gradients or communicating."""
    input_ids, labels = batch["input_ids"][:rows], batch["labels"][:rows]
    bounds = batch["cu_seqlens"]
    context = ForwardContext(cu_seqlens=bounds[bounds <= input_ids.numel()])
    loss = masked_mean(model.loss(input_ids, labels.clamp(min=0), context), labels)
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
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return low or None


def advice(engine: Any, batch: dict[str, Tensor] | None) -> str:
    """One line for the user; tries smaller micro-batches where that needs no other rank."""
    micro = engine.config.train.micro_batch
    message = f"out of memory with train.micro_batch {micro}"
    alone = engine.groups.get_model_parallel_world_size() == 1 and engine.zero_stage < 3
    fits = None
    if alone and batch is not None and isinstance(engine.module, CausalLM):
        moved = {key: value.to(engine.device) for key, value in batch.items()}
        fits = largest_that_fits(lambda rows: _attempt(engine.module, moved, rows), micro)
        if fits is None:
            return f"{message}: not even 1 fits; use a shorter data.sequence_length, tensor parallelism or ZeRO"
    if fits is not None:
        return f"{message}; the largest that fits here is {fits}: set train.micro_batch={fits} (same results)"
    return f"{message}; set a smaller train.micro_batch (the results stay the same)"
