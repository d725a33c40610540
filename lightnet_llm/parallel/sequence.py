"""Sequence parallelism: each rank runs its part of every row, and ranks exchange states (model-spec 1, merge).

What travels per layer is one state a row and rank, whatever the length of the sequence. With packed documents only the state of a
row's last segment travels, and only a segment that began on an earlier rank receives one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightnet_kernels import ScanState, ToeplitzState, identity_state, merge_states, merge_toeplitz_states
from torch import Tensor

from ..config.model import ModelConfig
from ..models.context import ForwardContext
from ..models.dropout import DropoutKey


class _AllGather(torch.autograd.Function):
    """[...] to [ranks, ...]; backward sums over ranks what each rank's part received."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


@dataclass(frozen=True)
class SequencePlace:
    """This rank's place among those that share each row."""

    rank: int
    size: int
    group: Any

    def part(self, x: Tensor) -> Tensor:
        """This rank's columns of [B, N]."""
        width = x.shape[1] // self.size
        return x[:, self.rank * width : (self.rank + 1) * width].contiguous()


@dataclass(frozen=True)
class SegmentPlan:
    """How segments of B rows fall on ranks; all from the global boundaries, so every rank knows all of it.

    Attributes:
        cu_seqlens: int32 boundaries of this rank's tokens, its part of row 0 first.
        first, last: int64 [B], index of each row's first and last local segment.
        continues: bool [ranks, B], whether a rank's part of a row begins inside a segment.
        single: bool [ranks, B], whether a rank's part of a row holds one segment only.
        tail: int64 [ranks, B], tokens of a rank's last segment in a row.
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor
    continues: Tensor
    single: Tensor
    tail: Tensor


def plan_segments(cu_seqlens: Tensor, rows: int, tokens: int, place: SequencePlace) -> SegmentPlan:
    """Plan from global boundaries over ``rows`` x ``tokens`` flattened tokens; ``tokens`` is a multiple of the ranks."""
    device, width = cu_seqlens.device, tokens // place.size
    begins = torch.zeros(rows * tokens + 1, dtype=torch.bool, device=device)
    begins[cu_seqlens.long()] = True
    parts = begins[:-1].view(rows, place.size, width)
    continues = ~parts[:, :, 0]
    starts = parts.clone()
    starts[:, :, 0] = True
    counts = starts.sum(-1)  # segments of each part, [B, ranks]
    position = torch.arange(width, device=device).expand_as(starts)
    tail = width - torch.where(starts, position, 0).amax(-1)
    mine = starts[:, place.rank].reshape(-1)
    bounds = torch.cat([mine.nonzero()[:, 0], torch.tensor([rows * width], device=device)]).to(torch.int32)
    last = counts[:, place.rank].cumsum(0) - 1
    first = last - counts[:, place.rank] + 1
    return SegmentPlan(bounds, first, last, continues.T, (counts == 1).T, tail.T)


class _Chain:
    """Carries states from rank to rank along each row."""

    def __init__(self, plan: SegmentPlan, place: SequencePlace):
        self.plan, self.place = plan, place

    def _select(self, flag: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        return torch.where(flag.view(-1, *[1] * (yes.dim() - 1)), yes, no)

    def _carry(self, tails: list[Any], identity: Any, merge: Any) -> Any:
        """State that arrives at this rank, a named tuple of [B, ...].

        The loop has the same shape on all ranks, so that every rank's backward takes part in the gather.
        """
        arriving = identity
        for rank in range(self.place.size - 1):
            whole = merge(arriving, tails[rank])
            reached = [self._select(self.plan.single[rank], a, b) for a, b in zip(whole, tails[rank], strict=True)]
            live = self.plan.continues[rank + 1] & (rank < self.place.rank)
            passed = [self._select(live, a, b) for a, b in zip(reached, identity, strict=True)]
            keep = torch.full_like(live, rank < self.place.rank)
            arriving = type(identity)(*(self._select(keep, a, b) for a, b in zip(passed, arriving, strict=True)))
        return arriving

    def _spread(self, row_state: Any, like: Any) -> Any:
        """[B, ...] to [segments, ...]: rows' first segments receive, all others get the identity."""
        return type(row_state)(
            *(empty.index_copy(0, self.plan.first, value) for empty, value in zip(like, row_state, strict=True))
        )


class ScanExchange(_Chain):
    """Exchange of the additive scan's states; with LRPE each merge moves the frame by the right part's length."""

    def __init__(self, plan: SegmentPlan, place: SequencePlace, theta: Tensor | None):
        super().__init__(plan, place)
        self.theta = theta

    def prefix(self, state: ScanState) -> ScanState:
        """State of all earlier ranks for each local segment (identity where it begins here)."""
        rows = [tensor.index_select(0, self.plan.last) for tensor in (state.max.detach(), state.sum, state.kv)]
        maximum, sums, values = (_AllGather.apply(tensor, self.place.group) for tensor in rows)
        tails = [
            ScanState(maximum[rank], sums[rank], values[rank], self.plan.tail[rank]) for rank in range(self.place.size)
        ]
        heads, width = state.max.shape[1:]
        shape = {"lrpe": self.theta is not None, "dtype": state.kv.dtype, "device": state.kv.device}
        empty = identity_state(rows[0].shape[0], heads, width, state.kv.shape[-1], **shape)
        every = identity_state(state.max.shape[0], heads, width, state.kv.shape[-1], **shape)
        arrived = self._carry(tails, empty, lambda left, right: merge_states(left, right, self.theta))
        return self._spread(arrived, every)


class ToeplitzExchange(_Chain):
    """Exchange of MD-TPE's states along one axis."""

    def __init__(self, plan: SegmentPlan, place: SequencePlace, decay: Tensor):
        super().__init__(plan, place)
        self.decay = decay

    def prefix(self, state: ToeplitzState) -> ToeplitzState:
        """As the scan's."""
        hidden = _AllGather.apply(state.hidden.index_select(0, self.plan.last), self.place.group)
        tails = [ToeplitzState(hidden[rank], self.plan.tail[rank]) for rank in range(self.place.size)]
        empty = ToeplitzState(torch.zeros_like(hidden[0]), torch.zeros_like(self.plan.tail[0]))
        every = ToeplitzState(torch.zeros_like(state.hidden), torch.zeros_like(state.length))
        arrived = self._carry(tails, empty, lambda left, right: merge_toeplitz_states(left, right, self.decay))
        return self._spread(arrived, every)


@dataclass(frozen=True)
class SequenceExchange:
    """What a forward context carries; layers ask it for the exchange of their own parameters."""

    plan: SegmentPlan
    place: SequencePlace

    def scan(self, theta: Tensor | None) -> ScanExchange:
        """Exchange for an additive scan with frequencies ``theta`` [H, D]."""
        return ScanExchange(self.plan, self.place, theta)

    def toeplitz(self, decay: Tensor) -> ToeplitzExchange:
        """Exchange for a Toeplitz scan with ``decay`` [d, e]."""
        return ToeplitzExchange(self.plan, self.place, decay)


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
        tokens: tokens of a whole row.
        step: optimiser step, for dropout; None (evaluation) turns it off.
        place: this rank among those that share each row; None for one.
    """
    key = exchange = None
    share = 1 if place is None else place.size
    if step is not None and config.dropout > 0:
        offset = 0 if place is None else place.rank * (tokens // share)
        key = DropoutKey(seed, step, sample_ids, tokens // share, offset)
    if place is not None and place.size > 1:
        plan = plan_segments(cu_seqlens, sample_ids.numel(), tokens, place)
        cu_seqlens, exchange = plan.cu_seqlens, SequenceExchange(plan, place)
    return ForwardContext(cu_seqlens=cu_seqlens, dropout=key, exchange=exchange)
