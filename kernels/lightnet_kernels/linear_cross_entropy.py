"""The language model's head and loss in one: logits of a chunk of tokens at a time, never of all, over a vocabulary that
tensor-parallel ranks may share.

No library's (read 2026-11): liger-kernel 0.8.5's TP form needs CUDA and counts padded rows, and it, like cut-cross-entropy 25.1.1
(no TP), sums the weight's gradient in bf16; torch 2.13's has no TP; megatron-core's holds all logits, the fused in bf16.

Memory beyond inputs and gradients: one chunk's logits, [chunk, V] in the dtype of ``hidden``, and where the weight has a
gradient its float32 sum [V, W]. A chunk costs three matrix products, of the library, and a Triton kernel in place (PyTorch
on a CPU). With `reduction="sum"` gradients are made in the forward pass, while the chunk's logits are there; with "none",
whose upstream gradient is not known then, the backward pass makes the logits again, a fourth product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .checks import check_tensors
from .companions import choose_triton, kernels, on_device

CHUNK = 4096  # tokens: with fewer, reading and writing the weight's gradient once a chunk would show


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    reduction: str = "none",
    chunk: int = CHUNK,
    backend: str = "auto",
) -> Tensor:
    """Negative log likelihood in nats of labels under softmax(hidden @ weight.T).

    Under autocast hidden and weight are cast as for a linear layer.

    Args:
        hidden: [.., W], bfloat16, float16, float32 or float64, equal on all ranks of ``group``.
        weight: [V, W], this rank's rows of a vocabulary shared evenly; same dtype.
        labels: integer [..], global token ids; negative ones are ignored (loss and gradients 0), and ids beyond the
            vocabulary have loss infinity.
        vocab_size: rows that count, over all ranks; those beyond are padding, with no probability and no gradient.
            None for all.
        group: ranks that share the vocabulary, in the order of their rows; None for one.
        reduction: "none", float32 [..], or "sum", a float32 scalar.
        chunk: tokens of which logits are held at once.
        backend: auto, torch or triton.

    Returns:
        The loss, equal on all ranks. The gradient to ``hidden`` is this rank's part: sum it over ``group``, as
        the input of any column-parallel layer.

    Raises:
        ValueError: on shapes, dtypes, a vocab_size beyond the rows of all ranks, a reduction it does not know, or a backend
            that cannot serve.
    """
    check_tensors("linear_cross_entropy", hidden=hidden, weight=weight, labels=labels)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    _check(hidden, weight, labels, reduction, chunk)
    fused = choose_triton("linear_cross_entropy", backend, "triton_cross_entropy", hidden, weight)
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    rows = weight.shape[0]
    total = ranks * rows if vocab_size is None else vocab_size
    if vocab_size is not None and not 1 <= vocab_size <= ranks * rows:
        raise ValueError(
            f"linear_cross_entropy: vocab_size is {vocab_size}; pass 1 to {ranks * rows}, the rows of weight on all ranks"
        )
    valid = max(0, min(rows, total - rank * rows))  # of this rank's rows
    name = "" if ranks == 1 or group is None else group.group_name
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).contiguous()
    place = (rank * rows, valid, total, name, chunk, fused)
    if reduction == "none":
        return _losses(flat, weight, wanted, *place)[0].view(labels.shape)
    wanted_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _sum(flat, weight, wanted, *place, wanted_gradients)[0]


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """The definition, which holds all logits: one rank, reduction "none"."""
    logits = F.linear(hidden, weight[:vocab_size])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-1).view(
        labels.shape
    )


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, chunk: int) -> None:
    name = "linear_cross_entropy"
    if weight.ndim != 2 or not hidden.ndim or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; expected [.., W] and [V, W]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"{name}: hidden has dtype {hidden.dtype}, weight {weight.dtype}; pass one floating-point dtype"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"{name}: labels have shape {tuple(labels.shape)}; expected {tuple(hidden.shape[:-1])}")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: labels have dtype {labels.dtype}; pass int32 or int64")
    if reduction not in ("none", "sum"):
        raise ValueError(f"{name}: unknown reduction {reduction!r}; choose none or sum")
    if chunk < 1:
        raise ValueError(f"{name}: chunk is {chunk}; pass at least 1")


_PLACE = "int start, int valid, int vocab_size, str group, int chunk, bool fused"


@torch.library.custom_op(
    "lightnet::linear_cross_entropy",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor labels, {_PLACE}) -> (Tensor, Tensor)",
)
def _losses(hidden, weight, labels, start, valid, vocab_size, group, chunk, fused):
    """[T, W] to (nll [T], log of the sum of exponentials [T])."""
    nll, lse = (hidden.new_empty(hidden.shape[0], dtype=_wide(hidden)) for _ in range(2))
    buffer = _buffer(hidden, weight, chunk)
    with on_device(hidden):
        for part in _chunks(hidden, chunk):
            logits = _logits(hidden[part], weight, buffer)
            nll[part], lse[part] = _read(logits, labels[part], start, valid, vocab_size, group, fused)
    return nll.float(), lse


@torch.library.custom_op(
    "lightnet::linear_cross_entropy_backward",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor labels, Tensor lse, Tensor grad, {_PLACE}) -> (Tensor, Tensor)",
)
def _losses_backward(hidden, weight, labels, lse, grad, start, valid, vocab_size, group, chunk, fused):
    """Gradients of (hidden, this rank's part; weight)."""
    sink = _Gradients(hidden, weight)
    buffer = _buffer(hidden, weight, chunk)
    grad = torch.where(labels >= 0, grad, 0.0)
    with on_device(hidden):
        for part in _chunks(hidden, chunk):
            logits = _logits(hidden[part], weight, buffer)
            _to_gradient(logits, labels[part], lse[part], grad[part], start, valid, fused)
            sink.add(part, logits)
    return sink.hidden_grad, sink.weight_grad.to(weight.dtype)


@torch.library.custom_op(
    "lightnet::linear_cross_entropy_sum",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor labels, {_PLACE}, bool gradients) -> (Tensor, Tensor, Tensor)",
)
def _sum(hidden, weight, labels, start, valid, vocab_size, group, chunk, fused, gradients):
    """(sum of nll, its gradients to hidden and, float32, to weight; nothing where not asked for)."""
    total = hidden.new_zeros((), dtype=_wide(hidden))
    sink = _Gradients(hidden, weight) if gradients else None
    buffer = _buffer(hidden, weight, chunk)
    with on_device(hidden):
        for part in _chunks(hidden, chunk):
            logits = _logits(hidden[part], weight, buffer)
            nll, lse = _read(logits, labels[part], start, valid, vocab_size, group, fused)
            total += nll.sum()
            if sink is not None:
                _to_gradient(logits, labels[part], lse, (labels[part] >= 0).to(lse.dtype), start, valid, fused)
                sink.add(part, logits)
    if sink is None:
        return total.float(), hidden.new_empty(0), hidden.new_empty(0)
    return total.float(), sink.hidden_grad, sink.weight_grad


class _Gradients:
    """Gradients of both operands, collected chunk by chunk; the weight's in float32 (float64 for float64)."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        self.hidden, self.weight = hidden, weight
        self.hidden_grad = hidden.new_empty(hidden.shape)
        make = weight.new_empty if hidden.shape[0] else weight.new_zeros
        self.weight_grad = make(weight.shape, dtype=_wide(weight))

    def add(self, part: slice, grad: Tensor) -> None:
        """`grad` [chunk, V] to the logits of these tokens."""
        hidden, total = self.hidden[part], self.weight_grad
        torch.mm(grad, self.weight, out=self.hidden_grad[part])
        beta = 1 if part.start else 0  # 0: what the empty tensor holds does not count
        if grad.dtype == total.dtype:
            torch.addmm(total, grad.t(), hidden, beta=beta, out=total)
        elif grad.device.type == "cuda":
            torch.addmm(total, grad.t(), hidden, beta=beta, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, grad.t().to(total.dtype), hidden.to(total.dtype), beta=beta, out=total)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(hidden: Tensor, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, hidden.shape[0])) for first in range(0, hidden.shape[0], chunk)]


def _buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    return hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.mm(hidden, weight.t(), out=buffer[: hidden.shape[0]])


def _read(
    logits: Tensor, labels: Tensor, start: int, valid: int, vocab_size: int, group: str, fused: bool
) -> tuple[Tensor, Tensor]:
    """(nll, log of the sum of exponentials over all ranks), [chunk] each."""
    statistics = kernels("triton_cross_entropy").statistics if fused else _statistics
    peak, mass, target = statistics(logits, labels, start, valid)
    if group:
        ranks = dist.distributed_c10d._resolve_process_group(group)
        own = peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks)
        sums = torch.stack([mass * torch.exp(own - peak), target])
        dist.all_reduce(sums, group=ranks)
        mass, target = sums.unbind(0)
    lse = peak + mass.log()
    nll = torch.where(labels < vocab_size, lse - target, torch.inf)
    return torch.where(labels >= 0, nll, 0.0), lse


def _statistics(logits: Tensor, labels: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's first `valid` columns: (maximum, sum of exp(logit - maximum), logit of the label or 0)."""
    x = logits[:, :valid].to(_wide(logits))
    peak = x.amax(1) if valid else x.new_full((x.shape[0],), torch.finfo(x.dtype).min)
    local = labels.long() - start
    mine = (local >= 0) & (local < valid)
    target = x.gather(1, torch.where(mine, local, 0)[:, None])[:, 0] if valid else torch.zeros_like(peak)
    return peak, (x - peak[:, None]).exp().sum(1), torch.where(mine, target, 0.0)


def _to_gradient(
    logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, start: int, valid: int, fused: bool
) -> None:
    """Replace logits by the gradient to them, grad * (softmax - the label's unit vector); 0 in padding."""
    if fused:
        kernels("triton_cross_entropy").to_gradient(logits, labels, lse, grad, start, valid)
        return
    x = (logits[:, :valid].to(_wide(logits)) - lse[:, None]).exp()
    local = labels.long() - start
    mine = (local >= 0) & (local < valid)
    if valid:
        x[torch.arange(x.shape[0], device=x.device), torch.where(mine, local, 0)] -= mine.to(x.dtype)
    logits[:, :valid] = torch.where((grad == 0)[:, None], 0.0, x * grad[:, None])
    logits[:, valid:] = 0.0


@_losses.register_fake
def _(hidden, weight, labels, start, valid, vocab_size, group, chunk, fused):
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), hidden.new_empty(
        hidden.shape[0], dtype=_wide(hidden)
    )


@_losses_backward.register_fake
def _(hidden, weight, labels, lse, grad, *place):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


@_sum.register_fake
def _(hidden, weight, labels, start, valid, vocab_size, group, chunk, fused, gradients):
    total = hidden.new_empty((), dtype=torch.float32)
    if not gradients:
        return total, hidden.new_empty(0), hidden.new_empty(0)
    return total, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=_wide(weight))


def _setup_losses(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, *ctx.place = inputs
    ctx.save_for_backward(hidden, weight, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_losses(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    grads = _losses_backward(*ctx.saved_tensors, grad, *ctx.place)
    return (*grads, None, *(None for _ in ctx.place))


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.places = len(inputs) - 2
    ctx.dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_sum(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * ctx.places
    if grad is None:
        return (None, None, *nothing)
    hidden_grad, weight_grad = ctx.saved_tensors
    weight_out = torch.empty_like(weight_grad, dtype=ctx.dtype)
    return (hidden_grad * grad, torch.mul(weight_grad, grad, out=weight_out), *nothing)


_losses.register_autograd(_backward_losses, setup_context=_setup_losses)
_sum.register_autograd(_backward_sum, setup_context=_setup_sum)
