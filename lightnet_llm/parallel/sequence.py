"""Sequence parallelism: each rank runs its part of every row, and ranks exchange states (model-spec 1, merge).

What travels per layer is one state a row and rank, whatever the length of the sequence: see :mod:`.exchange` for how. With
packed documents only the states of a row's last (first) segment travel, and only a segment that goes on from another rank
receives one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from lightnet_kernels import ScanState, ToeplitzState, merge_states
from torch import Tensor

from ..config.model import ModelConfig
from ..models.context import ForwardContext
from ..models.dropout import DropoutKey
from .exchange import Kept, arriving
from .fused_exchange import fused_arriving, serves
from .segments import SegmentPlan, SequencePlace, plan_segments
from .states import SCAN, TOEPLITZ, Algebra

__all__ = ["SequenceExchange", "SequencePlace", "plan_segments", "training_context"]


class _Chain:
    """Brings states to the segments that go on from another rank."""

    algebra: Algebra

    def __init__(self, plan: SegmentPlan, place: SequencePlace, kept: Kept | None = None):
        self.plan, self.place, self.kept = plan, place, kept

    def _arriving(self, state: Any, parameter: Tensor | None, backwards: bool = False, meanwhile: Any = None) -> Any:
        """[segments, ...] of this rank's own to [segments, ...] of what lies before (after) on other ranks."""
        line = self.plan.line(backwards)
        if serves(state, self.place):
            return fused_arriving(state, parameter, line, self.place, meanwhile, self.kept)
        own = type(state)(*(x.index_select(0, line.source) for x in state))
        row_state = arriving(self.algebra, own, parameter, line, self.place, meanwhile, self.kept)
        return self._spread(row_state, self.algebra.identity(state), line.target)

    def _spread(self, row_state: Any, like: Any, target: Tensor) -> Any:
        """[B, ...] to [segments, ...]: each row's first (last) segment receives, all others get the identity."""
        return type(row_state)(
            *(empty.index_copy(0, target, value) for empty, value in zip(like, row_state, strict=True))
        )


class ScanExchange(_Chain):
    """Exchange of the additive scan's states; with LRPE each merge moves the frame by the right part's length."""

    algebra = SCAN

    def __init__(
        self,
        plan: SegmentPlan,
        place: SequencePlace,
        theta: Tensor | None,
        meanwhile: Callable[[], None] | None = None,
        kept: Kept | None = None,
    ):
        super().__init__(plan, place, kept)
        self.theta, self.meanwhile = theta, meanwhile

    def prefix(self, state: ScanState) -> ScanState:
        """State of all earlier ranks for each local segment (identity where it begins here)."""
        found: ScanState = self._arriving(state, self.theta, meanwhile=self.meanwhile)
        return found

    def total(self, state: ScanState) -> ScanState:
        """State of each local segment on all ranks, which share one origin (bidirectional calls)."""
        before = self._arriving(state, None, meanwhile=self.meanwhile)
        after = self._arriving(state, None, backwards=True)
        return merge_states(merge_states(before, state), after)


class ToeplitzExchange(_Chain):
    """Exchange of MD-TPE's states along one axis."""

    algebra = TOEPLITZ

    def __init__(self, plan: SegmentPlan, place: SequencePlace, decay: Tensor):
        super().__init__(plan, place)
        self.decay = decay

    def prefix(self, state: ToeplitzState) -> ToeplitzState:
        """As the scan's."""
        found: ToeplitzState = self._arriving(state, self.decay)
        return found

    def suffix(self, state: ToeplitzState) -> ToeplitzState:
        """The same from the other end: sums over the tokens of all later ranks."""
        found: ToeplitzState = self._arriving(state, self.decay, backwards=True)
        return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True)
class SequenceExchange:
    """What a forward context carries; layers ask it for the exchange of their own parameters."""

    plan: SegmentPlan
    place: SequencePlace
    kept: Kept | None = field(default=None, kw_only=True)

    def again(self) -> SequenceExchange:
        """The same for one scan that is computed twice, as activation checkpointing does: states travel once."""
        return replace(self, kept={})

    def scan(self, theta: Tensor | None, meanwhile: Callable[[], None] | None = None) -> ScanExchange:
        """Exchange for an additive scan with frequencies ``theta`` [H, D].

        ``meanwhile`` is called once, while a state is on its way: for work that does not wait for it.
        """
        return ScanExchange(self.plan, self.place, theta, meanwhile, self.kept)

    def toeplitz(self, decay: Tensor) -> ToeplitzExchange:
        """Exchange for a Toeplitz scan with ``decay`` [d, e]."""
        return ToeplitzExchange(self.plan, self.place, decay)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, on every one of them; its gradients are summed as well.

        A loss that every rank computes from it, averaged over the ranks, then has the gradient of one process.
        """
        total: Tensor = _Sum.apply(x, self.place.group)
        return total


def training_context(
    cu_seqlens: Tensor,
    sample_ids: Tensor,
    tokens: int,
    config: ModelConfig,
    seed: int,
    step: int | None,
    place: SequencePlace | None = None,
) -> ForwardContext:
    """The context of a training or validation pass.

    Args:
        cu_seqlens: boundaries over all B x ``tokens`` tokens, also where this rank holds only a part of each row.
        sample_ids: int64 [B].
        tokens: tokens of a whole row, which the ranks that share it need not divide.
        step: optimiser step, for dropout; None (evaluation) turns it off.
        place: this rank among those that share each row; None for one.
    """
    key = exchange = coordinates = None
    width = tokens if place is None else place.width(tokens)
    offset = 0 if place is None else place.rank * width
    rows, device = sample_ids.numel(), sample_ids.device
    if step is not None and (config.dropout > 0 or config.drop_path > 0):
        key = DropoutKey(seed, step, sample_ids, width, offset)
    if place is not None and place.size > 1:
        plan = plan_segments(cu_seqlens, rows, tokens, place, device)
        assert plan.cu_seqlens is not None
        cu_seqlens, exchange = plan.cu_seqlens, SequenceExchange(plan, place)
        if not config.causal:  # one origin for all ranks; only differences within a segment count
            coordinates = torch.arange(offset, offset + width, device=device).repeat(rows)
    return ForwardContext(cu_seqlens=cu_seqlens, dropout=key, exchange=exchange, coordinates=coordinates)
