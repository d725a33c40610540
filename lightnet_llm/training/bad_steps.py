"""Steps that must not reach the weights: skipped on all ranks alike, from globally reduced numbers (law 6 of a run).

The hook is the one place before the update where every engine knows the global gradient norm: DeepSpeed's own norm
function (ZeRO 1 to 3), or the clip (no ZeRO). There, loss and norm are summed over all ranks, so that every rank judges
the same two numbers, and a bad step takes the way of DeepSpeed's overflow: no update, no moments, gradients dropped. The
schedule and the data position go on, as if the step had been taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor

from ..config.run import BadStepsConfig

# A deviation is never taken for smaller than this: one per cent of the loss, ten per cent of the norm.
LOSS_FLOOR, NORM_FLOOR = 0.01, 0.1
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass
class Judge:
    """Decides which steps are bad, and remembers what it decides from. The same on every rank.

    Attributes:
        streak: steps skipped since the last good one.
        skipped: steps skipped in the whole run.
        losses, norms: of the last ``config.window`` good steps: nats, and natural log of the gradient norm.
    """

    config: BadStepsConfig
    streak: int = 0
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def reason(self, loss: float, norm: float) -> str | None:
        """Why a step with this global loss and gradient norm must be skipped, or None."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "not finite"
        if self.config.deviations <= 0 or len(self.losses) < self.config.after:
            return None
        for name, value, seen, floor in (
            ("loss", loss, self.losses, LOSS_FLOOR * abs(statistics.median(self.losses))),
            ("gradient norm", _log(norm), self.norms, NORM_FLOOR),
        ):
            far = deviations(value, seen, floor)
            if far > self.config.deviations:
                return f"{name} {far:.1f} deviations above the last {len(seen)}"
        return None

    def judge(self, loss: float, norm: float) -> str | None:
        """As :meth:`reason`; the step is then counted."""
        reason = self.reason(loss, norm)
        if reason is not None:
            self.streak, self.skipped = self.streak + 1, self.skipped + 1
            return reason
        self.streak = 0
        self.losses = [*self.losses, loss][-self.config.window :]
        self.norms = [*self.norms, _log(norm)][-self.config.window :]
        return None

    @property
    def too_many(self) -> bool:
        """Whether the run must stop."""
        return self.streak >= self.config.in_a_row

    def as_dict(self) -> dict[str, Any]:
        """What survives a restart."""
        recent = self.config.deviations > 0  # not worth a place in every checkpoint otherwise
        return {
            "streak": self.streak,
            "skipped": self.skipped,
            "losses": self.losses if recent else [],
            "norms": self.norms if recent else [],
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Inverse of :meth:`as_dict`; an empty mapping leaves a fresh judge."""
        for name in ("streak", "skipped", "losses", "norms"):
            if name in values:
                setattr(self, name, values[name])


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def deviations(value: float, seen: list[float], floor: float) -> float:
    """How many robust deviations ``value`` lies above the median of ``seen`` (median absolute deviation, scaled)."""
    middle = statistics.median(seen)
    spread = MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in seen)
    return (value - middle) / max(spread, floor, 1e-30)


def pick_suspects(losses: list[tuple[float, list[int]]]) -> list[int]:
    """Sample ids to look at first after a bad step.

    Args:
        losses: mean loss and sample ids of every micro-batch of the step.

    Returns:
        Those of the micro-batches whose loss is not finite, or, where all are, of the one with the highest.
    """
    broken = [ids for loss, ids in losses if not math.isfinite(loss)]
    if not broken and losses:
        broken = [max(losses)[1]]
    return sorted({sample for ids in broken for sample in ids})


class Guard:
    """Puts the judge in front of an engine's updates.

    Args:
        engine: DeepSpeed's engine.
        judge: shared with the loop, which saves it.
        local_loss: this rank's share of the step's loss: the shares of all ranks add up to the mean loss.

    Attributes:
        loss, norm: of the last step, global; not finite when that is why it was skipped.
        reason: why the last step was skipped, or None.
    """

    def __init__(self, engine: Any, judge: Judge, local_loss: Callable[[], Tensor]):
        self.judge, self.local_loss = judge, local_loss
        self.loss, self.norm = float("nan"), float("nan")
        self.reason: str | None = None
        self.engine, self.optimizer = engine, engine.optimizer
        self.device: torch.device = engine.device
        if hasattr(self.optimizer, "scaled_global_norm"):  # ZeRO 1 and 2
            # DeepSpeed would first look through all gradients for what is not finite, which the norm says anyway.
            self.optimizer.check_grad_overflow = False
            self.original = self.optimizer.scaled_global_norm
            self.optimizer.scaled_global_norm = self._stage_one_and_two
        elif hasattr(self.optimizer, "_get_norm_groups"):  # ZeRO 3
            self.original = self.optimizer._get_norm_groups
            self.optimizer._get_norm_groups = self._stage_three
        elif isinstance(self.optimizer, bf16_optimizer.BF16_Optimizer):  # ZeRO 1 with fp32 accumulation for bf16
            self.original = bf16_optimizer.get_global_norm_of_tensors
            bf16_optimizer.get_global_norm_of_tensors = self._bf16  # it has no method of its own for it
        else:
            self.original = engine.clip_fp32_gradients
            engine.clip_fp32_gradients = self._no_stage

    def _is_bad(self, norm: Tensor) -> bool:
        """Every rank comes here with the same norm, at the same point of its schedule."""
        share = norm.detach().double().reshape(()).to(self.device) / dist.get_world_size()
        share = torch.where(share < 0, float("inf"), share)  # DeepSpeed writes -1 for a norm that is not finite
        both = torch.stack([self.local_loss().detach().double().reshape(()).to(self.device), share])
        dist.all_reduce(both)
        self.loss, self.norm = both.tolist()
        self.reason = self.judge.judge(self.loss, self.norm)
        return self.reason is not None

    def _stage_one_and_two(self, *args: Any, **kwargs: Any) -> Tensor:
        norm = self.original(*args, **kwargs)
        bad = self._is_bad(norm)
        # In bf16 DeepSpeed looks at this flag before it takes a norm that is not finite for an overflow.
        self.optimizer.check_grad_overflow = bad
        return torch.full_like(norm, float("inf")) if bad else norm

    def after_step(self) -> None:
        """Called after the optimiser's step."""
        if hasattr(self.optimizer, "check_grad_overflow"):
            self.optimizer.check_grad_overflow = False

    def _stage_three(self) -> list[Tensor]:
        norms = self.original()
        norm = combine_grad_norm_groups(norms)
        return [torch.full_like(norm, float("inf"))] if self._is_bad(norm) else norms

    def _bf16(self, *args: Any, **kwargs: Any) -> Tensor:
        norm = self.original(*args, **kwargs)
        return torch.full_like(norm, float("inf")) if self._is_bad(norm) else norm

    def _no_stage(self) -> None:
        self.original()
        if self._is_bad(torch.as_tensor(self.engine._global_grad_norm)):
            for parameter in self.engine.module.parameters():
                parameter.grad = None  # torch's optimiser passes over it, moments and step count included
