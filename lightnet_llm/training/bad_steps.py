"""Steps that must not reach the weights: skipped on all ranks alike, from globally reduced numbers (law 6 of a run).

The hook is the one place before the update where every engine knows the global gradient norm: DeepSpeed's own norm
function (ZeRO 1 to 3), or the clip (no ZeRO). There, loss and norm are summed over all ranks, so that every rank judges
the same two numbers, and a bad step takes the way of DeepSpeed's overflow: no update, no moments, gradients dropped. The
schedule and the data position go on, as if the step had been taken.

Where the optimiser can leave a step out by itself (:mod:`.bf16`), the numbers stay on the device, and the host reads them
when it needs them, at the latest before it judges the next step. The decision is the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor

from ..config.run import BadStepsConfig
from .bf16 import Bf16Optimizer

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

    def limits(self) -> tuple[float, float]:
        """The loss and the gradient norm beyond which the next step is bad; infinite while too few were seen."""
        if self.config.deviations <= 0 or len(self.losses) < self.config.after:
            return math.inf, math.inf
        loss, norm = (
            middle + self.config.deviations * spread
            for middle, spread in (_middle_and_spread(*seen) for seen in self._seen())
        )
        return loss, math.exp(min(norm, 700.0))  # of which the exponential is finite

    def _seen(self) -> tuple[tuple[list[float], float], tuple[list[float], float]]:
        """Losses and logarithms of norms of the last good steps, each with its smallest deviation."""
        return (self.losses, LOSS_FLOOR * abs(statistics.median(self.losses))), (self.norms, NORM_FLOOR)

    def reason(self, loss: float, norm: float) -> str | None:
        """Why a step with this global loss and gradient norm must be skipped, or None."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "not finite"
        names = ("loss", "gradient norm")
        for name, value, limit, at in zip(names, (loss, norm), self.limits(), (0, 1), strict=True):
            if value > limit:
                seen, floor = self._seen()[at]
                far = deviations(_log(value) if at else value, seen, floor)
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
    middle, spread = _middle_and_spread(seen, floor)
    return (value - middle) / spread


def _middle_and_spread(seen: list[float], floor: float) -> tuple[float, float]:
    middle = statistics.median(seen)
    spread = MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in seen)
    return middle, max(spread, floor, 1e-30)


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


@dataclass
class Verdict:
    """What became of a step.

    Attributes:
        step: number of the update, from 0.
        losses, samples: mean losses and sample ids of this rank's micro-batches; no losses where others compute them.
        loss, norm: global; not finite when that is why the step was skipped.
        reason: why it was skipped, or None.
        streak: steps skipped since the last good one, with this one.
    """

    step: int
    losses: list[Tensor]
    samples: list[Tensor]
    loss: float = math.nan
    norm: float = math.nan
    reason: str | None = None
    streak: int = 0

    def suspects(self) -> list[tuple[float, list[int]]]:
        """Mean loss and sample ids of the micro-batches, where this rank computed the loss."""
        return [(float(loss), ids.tolist()) for loss, ids in zip(self.losses, self.samples, strict=False)]


class Guard:
    """Puts the judge in front of an engine's updates.

    Args:
        engine: DeepSpeed's engine.
        judge: shared with the loop, which saves it.
        local_loss: this rank's share of the step's loss: the shares of all ranks add up to the mean loss.
        begin: the verdict on the step that is being made, to be filled.

    Attributes:
        last: the last step that was judged.
    """

    def __init__(self, engine: Any, judge: Judge, local_loss: Callable[[], Tensor], begin: Callable[[], Verdict]):
        self.judge, self.local_loss, self.begin = judge, local_loss, begin
        self.engine, self.optimizer = engine, engine.optimizer
        self.device: torch.device = engine.device
        self.last = Verdict(-1, [], [])
        self._open: tuple[Verdict, Tensor, torch.cuda.Event | None] | None = None
        self._judged: deque[Verdict] = deque(maxlen=64)  # who does not ask for them does not keep them
        if isinstance(self.optimizer, BF16_Optimizer):  # ZeRO 1 with fp32 accumulation for bf16
            Bf16Optimizer.take_over(engine, self._of_squares)
        elif hasattr(self.optimizer, "scaled_global_norm"):  # ZeRO 1 and 2
            # DeepSpeed would first look through all gradients for what is not finite, which the norm says anyway.
            self.optimizer.check_grad_overflow = False
            self.original = self.optimizer.scaled_global_norm
            self.optimizer.scaled_global_norm = self._stage_one_and_two
        elif hasattr(self.optimizer, "_get_norm_groups"):  # ZeRO 3
            self.original = self.optimizer._get_norm_groups
            self.optimizer._get_norm_groups = self._stage_three
        else:
            self.original = engine.clip_fp32_gradients
            engine.clip_fp32_gradients = self._no_stage

    def _of_squares(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """The global gradient norm from each rank's share of its square, and what :meth:`_decide` says: fp32 scalars."""
        both = torch.stack([self._loss(), squares.double()])
        dist.all_reduce(both)
        both[1].sqrt_()
        return both[1].float(), self._decide(both)

    def _is_bad(self, norm: Tensor) -> bool:
        """Every rank comes here with the same norm, at the same point of its schedule."""
        share = norm.detach().double().reshape(()).to(self.device) / dist.get_world_size()
        share = torch.where(share < 0, float("inf"), share)  # DeepSpeed writes -1 for a norm that is not finite
        both = torch.stack([self._loss(), share])
        dist.all_reduce(both)
        self._decide(both)
        return self.settle().reason is not None

    def _loss(self) -> Tensor:
        return self.local_loss().detach().double().reshape(()).to(self.device)

    def _decide(self, both: Tensor) -> Tensor:
        """1.0 if the step of this global loss and gradient norm is bad, else 0.0, on the device."""
        self.settle()  # the limits depend on it
        most_loss, most_norm = self.judge.limits()
        bad = ~both.isfinite().all() | (both[0] > most_loss) | (both[1] > most_norm)
        event = None
        if both.is_cuda:
            here = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            here.copy_(both, non_blocking=True)
            both, event = here, torch.cuda.Event()
            event.record()
        self._open = (self.begin(), both, event)
        return bad.float()

    def settle(self) -> Verdict:
        """The verdict on the last step; waits for the device if it has not come so far."""
        if self._open is not None:
            self.last, numbers, event = self._open
            self._open = None
            if event is not None:
                event.synchronize()
            self.last.loss, self.last.norm = numbers.tolist()
            self.last.reason = self.judge.judge(self.last.loss, self.last.norm)
            self.last.streak = self.judge.streak
            self._judged.append(self.last)
        return self.last

    def judged(self) -> Iterator[Verdict]:
        """Those not given yet, in order."""
        while self._judged:
            yield self._judged.popleft()

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

    def _no_stage(self) -> None:
        self.original()
        if self._is_bad(torch.as_tensor(self.engine._global_grad_norm)):
            for parameter in self.engine.module.parameters():
                parameter.grad = None  # torch's optimiser passes over it, moments and step count included
