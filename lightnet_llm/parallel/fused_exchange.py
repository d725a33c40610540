"""The exchange of scan states by all-gather as a few kernels: what :mod:`.exchange` does for any state, in its definition.

On a GPU the exchange of one layer is some 400 small operators there, forward and backward: more for the host to launch than
all else of the layer. Here a state is packed, merged and differentiated by one kernel each
(:mod:`lightnet_kernels.triton_exchange`). Payloads are the same forward; backward the maxima go along, a hundredth more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightnet_kernels import ScanState
from torch import Tensor

from .exchange import Gathering, Kept
from .segments import Line, SequencePlace


def serves(state: Any, place: SequencePlace) -> bool:
    """Whether the kernels do this exchange: float32 scan states, gathered as they are, where Triton runs (whatever backend
    the scan itself has)."""
    if not isinstance(state, ScanState) or state.kv.dtype != torch.float32 or place.in_flight != torch.float32:
        return False
    from lightnet_kernels.companions import unsupported_device

    device = state.kv.device
    return place.gathers and unsupported_device("triton_exchange", device.type, device.index) is None


def fused_arriving(
    state: ScanState,
    theta: Tensor | None,
    line: Line,
    place: SequencePlace,
    meanwhile: Callable[[], None] | None = None,
    kept: Kept | None = None,
) -> ScanState:
    """[segments, ..] of this rank's own to what each segment receives, the identity where nothing arrives.

    As `exchange.arriving` between selecting the segments that travel and giving what arrives to those that receive.
    """
    job = _Job(ScanState(*(x.detach().contiguous() for x in state)), line, place, kept)
    sent = _Send.apply(job, state.sum, state.kv)
    if meanwhile is not None:
        meanwhile()
    total, kv = _Receive.apply(job, None if theta is None else theta.float().contiguous(), *sent)
    received, job.received = job.received, None
    assert received is not None
    return received._replace(sum=total, kv=kv)


class _Job(Gathering):
    """One exchange: what its halves share."""

    def __init__(self, local: ScanState, line: Line, place: SequencePlace, kept: Kept | None):
        from lightnet_kernels import triton_exchange

        super().__init__(line, place, kept)
        self.kernels = triton_exchange
        self.local: ScanState | None = local
        self.numbers = (place.size, line.position, line.source.shape[0])
        self.received: ScanState | None = None
        # From `_Receive` to `_Send`, backward.
        self.gathered: Tensor | None = None
        self.theta: Tensor | None = None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, total: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        assert job.local is not None
        ctx.job = job
        ctx.save_for_backward(job.local.max)
        local = job.local
        job.gather_forward(lambda: job.kernels.packed(local, job.line.source, True))
        return total.view_as(total), kv.view_as(kv)

    @staticmethod
    def backward(ctx: Any, _: Tensor, kv: Tensor) -> tuple[None, Tensor, Tensor]:
        job: _Job = ctx.job
        (top,) = ctx.saved_tensors
        gathered, job.gathered = job.gathered, None
        theta, job.theta = job.theta, None
        flags = (job.line.continues, job.line.single, job.line.gives)
        assert gathered is not None
        return None, *job.kernels.given(job.taken(), gathered, top, kv, flags, job.numbers, theta, job.line.backwards)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, theta: Tensor | None, *_: Tensor) -> tuple[Tensor, Tensor]:
        gathered, local, line = job.taken(), job.local, job.line
        assert local is not None
        job.local = None
        found = job.kernels.arrived(
            gathered, local, (line.continues, line.single, line.receives), job.numbers, theta, line.backwards
        )
        ctx.job, job.received = job, found
        ctx.save_for_backward(gathered, theta, found.max)
        return found.sum, found.kv

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad_kv: Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        gathered, theta, top = ctx.saved_tensors
        line, grad_sum, grad_kv = job.line, grad_sum.contiguous(), grad_kv.contiguous()
        grads = ScanState(top, grad_sum, grad_kv, line.target)
        job.gather(job.kernels.packed(grads, line.target, False))
        job.gathered, job.theta = gathered, theta
        of_theta = None
        if theta is not None and ctx.needs_input_grad[1]:
            flags = (line.continues, line.single)
            of_theta = job.kernels.theta_grad(
                gathered, top, grad_kv, flags, line.target, job.numbers, theta, line.backwards
            )
        # What `_Send` takes is in the payloads; these only make it run.
        return None, of_theta, grad_sum, grad_kv
