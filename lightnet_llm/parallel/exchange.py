"""States on their way between the ranks that share each row, and their gradients on the way back.

Every rank gives the state of its part of a row and gets that of all parts before it (model-spec 1, merge). Two ways, with
the same result up to rounding:

- all-gather: every rank gets all states and merges those before its own. One collective, started before and waited for
  after what else the caller has to do meanwhile. A rank of R receives R - 1 states.
- prefix: a rank gets the merged state from the one before, merges its own and hands it on, block by block of heads, so
  that ranks work on different blocks at once. A rank receives and sends one state, whatever R.

The backward pass goes the other way: gradients of what arrived are gathered (or handed on from the last rank to the
first), and each rank differentiates its own merges, which it does again. What travels does not depend on the number of
tokens: per row a state, once forward and, without its maximum and length (by kernels, with its maximum), once backward.
What was gathered is kept where a block computes its activations again, which then waits for no other rank (`Gathering`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .segments import Line, SequencePlace, all_gather
from .states import BLOCKS, Algebra, gradients

Kept = dict[bool, Tensor]  # what a checkpointed block has gathered, by whether the line runs backwards


class Gathering:
    """All-gathers of one exchange, one under way at a time. With ``kept``, empty in a block's forward pass, what that gathers
    is there when the block is computed again, and nothing travels."""

    def __init__(self, line: Line, place: SequencePlace, kept: Kept | None = None):
        self.line, self.place, self.kept = line, place, kept
        self.buffer: Tensor | None = None
        self.work: Any = None

    def gather(self, payload: Tensor) -> None:
        """Start an all-gather of this rank's payload."""
        self.buffer = payload.new_empty(self.place.size, payload.numel())
        self.place.traffic.add(payload, self.place.size - 1)
        self.work = all_gather(self.buffer.view(-1), payload, group=self.place.group, async_op=True)

    def gather_forward(self, payload: Callable[[], Tensor]) -> None:
        """The same of what ``payload`` gives, but where it is kept."""
        kept, self.kept = self.kept, None
        self.buffer = None if kept is None else kept.pop(self.line.backwards, None)
        if self.buffer is None:
            self.gather(payload())
            if kept is not None:
                assert self.buffer is not None
                kept[self.line.backwards] = self.buffer

    def taken(self) -> Tensor:
        """What was gathered, [ranks, payload], in order of rank; waits for it."""
        assert self.buffer is not None
        if self.work is not None:
            self.work.wait()
        buffer, self.buffer, self.work = self.buffer, None, None
        return buffer


def arriving(
    algebra: Algebra,
    state: Any,
    parameter: Tensor | None,
    line: Line,
    place: SequencePlace,
    meanwhile: Callable[[], None] | None = None,
    kept: Kept | None = None,
) -> Any:
    """The state of everything before this rank's part of each row, as far as it belongs to the same segment.

    Differentiable in the state and the parameter; each rank's gradient of the parameter is its share of the sum.

    Args:
        state: [B, ...] of what travels from this rank.
        meanwhile: work that needs nothing of other ranks, done while states are on their way.
        kept: of a block that is computed again; states that are handed on travel again.

    Returns:
        A state like ``state``; the identity where nothing arrives.
    """
    job = _Job(algebra, state, line, place, kept)
    if place.gathers:
        sent = _Start.apply(job, *algebra.flows(state))
        if meanwhile is not None:
            meanwhile()
        flows = _Finish.apply(job, parameter, *sent)
    else:
        if meanwhile is not None:
            meanwhile()
        flows = _HandOn.apply(job, parameter, *algebra.flows(state))
    arrived, job.arrived = job.arrived, None  # what it gave must not hold a job, which its graph holds
    return algebra.put(arrived, flows)


class _Job(Gathering):
    """One exchange: what its two halves share, forward and backward."""

    def __init__(self, algebra: Algebra, state: Any, line: Line, place: SequencePlace, kept: Kept | None):
        super().__init__(line, place, kept)
        self.algebra = algebra
        self.local = type(state)(*(x.detach() for x in state))
        self.arrived: Any = None
        # Of the backward pass, from `_Finish` to `_Start`: states of all positions, what arrived here, the parameter.
        self.tails: list[Any] = []
        self.before: Any = None
        self.parameter: Tensor | None = None

    # Bytes -----------------------------------------------------------------------------------------------------------
    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """uint8 [bytes]: the widest dtype first, so that each starts at a multiple of its size."""
        cast = sorted((x.to(self._sent(x)) for x in tensors), key=lambda x: -x.element_size())
        flat = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in cast])
        return torch.nn.functional.pad(flat, (0, -flat.numel() % 8))

    def unpack(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors back, in their own dtypes."""
        sent = [self._sent(x) for x in like]
        found: list[Tensor] = [flat] * len(like)
        start = 0
        for i in sorted(range(len(like)), key=lambda i: -sent[i].itemsize):
            size = like[i].numel() * sent[i].itemsize
            found[i] = flat[start : start + size].view(sent[i]).view(like[i].shape).to(like[i].dtype)
            start += size
        return found

    def _sent(self, x: Tensor) -> torch.dtype:
        """Weighted values may travel in bf16; maxima and normalisers, a hundredth of the bytes, never do."""
        shrinks = x.dim() == self.algebra.widest and self.place.in_flight == torch.bfloat16
        return torch.bfloat16 if shrinks else x.dtype

    # All-gather ------------------------------------------------------------------------------------------------------
    def gathered(self) -> Tensor:
        """What was gathered, uint8 [ranks, bytes] in order of travel."""
        buffer = self.taken()
        return buffer.flip(0) if self.line.backwards else buffer

    def fold(self, tails: Sequence[Any], end: int, parameter: Tensor | None) -> Any:
        """What arrives at position ``end``."""
        before = self.algebra.identity(self.local)
        for at in range(end):
            before = self.algebra.onward(before, tails[at], self.line, at, parameter)
        return before

    def states(self, gathered: Tensor) -> list[Any]:
        """States of all positions."""
        return [self.algebra.kind(*self.unpack(flat, self.local)) for flat in gathered]

    def share_of_parameter(self, grads: Sequence[Tensor]) -> Tensor:
        """The parameter's gradient from what arrived here."""
        assert self.parameter is not None
        with torch.enable_grad():
            leaf = self.parameter.detach().requires_grad_()
            flows = self.algebra.flows(self.fold(self.tails, self.line.position, leaf))
            return gradients(flows, [leaf], grads)[0]

    def share_of_state(self, gathered: Tensor) -> list[Tensor]:
        """Gradients of what this rank gave, from those of what arrived at later positions."""
        position = self.line.position
        own = self.tails[position]
        leaves = [x.detach().requires_grad_() for x in self.algebra.flows(own)]
        outputs: list[Tensor] = []
        grads: list[Tensor] = []
        with torch.enable_grad():
            before = self.before
            for at in range(position, self.place.size - 1):
                state = self.algebra.put(own, leaves) if at == position else self.tails[at]
                before = self.algebra.onward(before, state, self.line, at, self.parameter)
                flows = self.algebra.flows(before)
                outputs += flows
                grads += self.unpack(gathered[at + 1], flows)
            return gradients(outputs, leaves, grads)

    # Handing on ------------------------------------------------------------------------------------------------------
    def _neighbour(self, step: int) -> int | None:
        """Global rank ``step`` positions on, or None."""
        position, last = self.line.position + step, self.place.size - 1
        if not 0 <= position <= last:
            return None
        return dist.get_global_rank(self.place.group, last - position if self.line.backwards else position)

    def _relay(
        self,
        source: int | None,
        target: int | None,
        shapes: Sequence[Sequence[Tensor]],
        work: Callable[[int, list[Tensor] | None], Sequence[Tensor]],
    ) -> None:
        """Receive block by block, work on each, and send what that gives while the next one comes in."""
        group, leaving = self.place.group, None
        for index in range(len(shapes) + 1):
            operations, coming = [], None
            if leaving is not None and target is not None:
                payload = self.pack(leaving)
                self.place.traffic.add(payload, 1)
                operations.append(dist.P2POp(dist.isend, payload, target, group))
            if index < len(shapes) and source is not None:
                coming = torch.empty_like(self.pack(shapes[index]))
                operations.append(dist.P2POp(dist.irecv, coming, source, group))
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()
            if index < len(shapes):
                leaving = work(index, None if coming is None else self.unpack(coming, shapes[index]))

    def _parameters(self, parameter: Tensor | None, count: int) -> Sequence[Tensor | None]:
        return [None] * count if parameter is None else parameter.chunk(BLOCKS, 0)

    def hand_on(self, parameter: Tensor | None) -> list[Any]:
        """What arrives here, in blocks."""
        kind, locals_ = self.algebra.kind, self.algebra.blocks(self.local)
        angles = self._parameters(parameter, len(locals_))
        arrived: list[Any] = []

        def work(index: int, received: list[Tensor] | None) -> Any:
            own = locals_[index]
            arrived.append(self.algebra.identity(own) if received is None else kind(*received))
            if self._neighbour(1) is None:
                return ()
            return self.algebra.onward(arrived[index], own, self.line, self.line.position, angles[index])

        self._relay(self._neighbour(-1), self._neighbour(1), locals_, work)
        return arrived

    def hand_back(
        self, parameter: Tensor | None, local: Any, arrived: Any, grads: Sequence[Tensor]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of the parameter and of this rank's state, from those of what arrived here."""
        position = self.line.position
        locals_, befores = self.algebra.blocks(local), self.algebra.blocks(arrived)
        angles = self._parameters(parameter, len(locals_))
        upstream = [list(part) for part in zip(*(x.chunk(BLOCKS, 1) for x in grads), strict=True)]
        own_grads: list[list[Tensor]] = []
        angle_grads: list[Tensor] = []

        def work(index: int, received: list[Tensor] | None) -> Sequence[Tensor]:
            own, before, angle = locals_[index], befores[index], angles[index]
            leaves = [x.detach().requires_grad_() for x in (*self.algebra.flows(own), *self.algebra.flows(before))]
            if angle is not None:
                leaves.append(angle.detach().requires_grad_())
            flows = len(self.algebra.flowing)
            if received is None:
                found = [torch.zeros_like(x) for x in leaves]
            else:
                with torch.enable_grad():
                    states = self.algebra.put(before, leaves[flows : 2 * flows]), self.algebra.put(own, leaves[:flows])
                    onward = self.algebra.onward(*states, self.line, position, None if angle is None else leaves[-1])
                    found = gradients(self.algebra.flows(onward), leaves, received)
            own_grads.append(found[:flows])
            angle_grads.extend(found[2 * flows :])
            return [a + b for a, b in zip(upstream[index], found[flows : 2 * flows], strict=True)]

        shapes = [self.algebra.flows(x) for x in locals_]
        self._relay(self._neighbour(1), self._neighbour(-1), shapes, work)
        joined = [torch.cat(parts, 1) for parts in zip(*own_grads, strict=True)]
        return torch.cat(angle_grads) if parameter is not None else None, joined


class _Start(torch.autograd.Function):
    """Sends this rank's state; backward receives the gradients of what others made of it.

    Apart from `_Finish`, so that what the caller does in between lies between them in the backward pass as well.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, *flows: Tensor) -> tuple[Tensor, ...]:
        ctx.job = job
        job.gather_forward(lambda: job.pack(job.local))
        return tuple(x.view_as(x) for x in flows)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        grads = job.share_of_state(job.gathered())
        job.tails, job.before, job.parameter = [], None, None
        return None, *grads


class _Finish(torch.autograd.Function):
    """Receives and merges; backward sends the gradients of what arrived."""

    @staticmethod
    def forward(ctx: Any, job: _Job, parameter: Tensor | None, *_: Tensor) -> tuple[Tensor, ...]:
        gathered = job.gathered()
        ctx.job = job
        ctx.save_for_backward(gathered, parameter)
        job.arrived = job.fold(job.states(gathered), job.line.position, parameter)
        return job.algebra.flows(job.arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        gathered, parameter = ctx.saved_tensors
        job.gather(job.pack(grads))
        job.parameter = None if parameter is None else parameter.detach()
        job.tails = job.states(gathered)
        job.before = job.fold(job.tails, job.line.position, job.parameter)
        # The gradients of what `_Start` gave only make it run: it takes its own from the gather.
        return None, job.share_of_parameter(grads) if ctx.needs_input_grad[1] else None, *grads


class _HandOn(torch.autograd.Function):
    """From rank to rank in blocks of heads (channels): while a block is on its way the next one is merged."""

    @staticmethod
    def forward(ctx: Any, job: _Job, parameter: Tensor | None, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.job = job
        with torch.no_grad():
            parts = job.hand_on(parameter)
        job.arrived = job.algebra.joined(parts)
        ctx.save_for_backward(parameter, *job.local, *job.arrived)
        return job.algebra.flows(job.arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parameter, *states = ctx.saved_tensors
        kind = ctx.job.algebra.kind
        local, arrived = kind(*states[: len(states) // 2]), kind(*states[len(states) // 2 :])
        of_parameter, of_state = ctx.job.hand_back(parameter, local, arrived, grads)
        return None, of_parameter if ctx.needs_input_grad[1] else None, *of_state
