"""An exponential average of the weights, kept while training: ``ema <- decay * ema + (1 - decay) * weights``.

It lies in the optimiser's state beside Adam's moments, in fp32 and of the master weights. So it is cut as they are (ZeRO
1 to 3), saved and resumed with them, and moves with them to another layout. It begins as the weights after the first step
that reached them, and a step that is skipped does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.native import EMA, STEP


def follow(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Let the average follow every step of torch's optimiser, whatever wraps it.

    Args:
        decay: in (0, 1): 0.999 averages over the last 1000 steps or so.
    """

    @torch.no_grad()
    def update(stepped: torch.optim.Optimizer, *_: Any) -> None:
        # DeepSpeed steps one group at a time. A parameter without a gradient was passed over: the step was skipped.
        moved = [p for group in stepped.param_groups for p in group["params"] if p.grad is not None]
        states = [stepped.state[p] for p in moved]
        if getattr(stepped, "found_inf", None) is not None:
            _follow_on_device(moved, states, stepped.found_inf, decay)
            return
        known = [(state[EMA], p) for state, p in zip(states, moved, strict=True) if EMA in state]
        for state, p in zip(states, moved, strict=True):
            if EMA not in state:
                state[EMA] = p.detach().clone()
        if known:
            averages, weights = map(list, zip(*known, strict=True))
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    optimizer.register_step_post_hook(update)


def _follow_on_device(weights: list[Tensor], states: list[dict[str, Tensor]], skipped: Tensor, decay: float) -> None:
    """The same where only the device knows whether the step was skipped.

    Args:
        skipped: fp32 scalar, 1.0 for a step that was.
    """
    for weight, state in zip(weights, states, strict=True):
        if EMA not in state:
            state[EMA] = weight.detach().clone()
        share = torch.where(state[STEP] <= 1, 1.0, 1.0 - decay) * (1.0 - skipped)  # of which the first is a copy
        state[EMA].lerp_(weight, share)


def reader(optimizer: Any, zero_stage: int) -> Callable[[nn.Parameter], Tensor | None] | None:
    """What gives this rank's full fp32 average of a parameter (None: it is not trained), or None: no step was made yet.

    Every data-parallel rank calls it for the same parameters in the same order: ZeRO's pieces are gathered, one parameter
    at a time.

    Args:
        optimizer: DeepSpeed's, or torch's own at stage 0.
        zero_stage: the stage it runs.
    """
    states = (optimizer if zero_stage == 0 else optimizer.optimizer).state
    if not any(EMA in state and float(state[STEP]) > 0 for state in states.values()):
        return None
    if zero_stage == 0:
        return lambda parameter: states[parameter][EMA] if parameter.requires_grad else None
    if zero_stage == 3:
        return lambda parameter: optimizer.get_full_hp_param(parameter, EMA)
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    flats = {
        parameter: group["params"][0]
        for group, parameters in zip(optimizer.optimizer.param_groups, groups, strict=True)
        for parameter in parameters
    }

    def joined(parameter: nn.Parameter) -> Tensor | None:
        if parameter not in flats:
            return None
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        mapping = parameter._hp_mapping
        if mapping is not None:  # else it lies wholly in other ranks' partitions
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            full.narrow(0, there.start, there.numel).copy_(
                states[flats[parameter]][EMA].narrow(0, here.start, here.numel)
            )
        dist.all_reduce(full, group=parameter._dp_group)
        return full.view_as(parameter)

    return joined
