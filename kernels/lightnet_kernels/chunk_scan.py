"""The causal scan over packed chunks, forward and backward (model-spec 1).

Written by hand: autograd through the same operations takes twice the time on a CPU, nearly all of it in element-wise
passes, and keeps several doubled [.., 2D] copies of queries and keys that are cheaper to form again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .carry import Factors, carry, carry_backward
from .lrpe import rotation


class ScanConstants(NamedTuple):
    """What has no gradient. References and factors as in `torch_scan._frame`, all [chunks, H, D]."""

    counts: list[int]
    activation: bool
    exit: Tensor
    enter: Tensor
    keep: Tensor | None
    slow: Tensor | None  # [chunks, H] bool: left out here, whatever is put there


class ChunkResults(NamedTuple):
    output: Tensor | None  # [chunks, H, C, Dv]
    held_kv: Tensor  # [chunks, H, D or 2D, Dv], what each chunk receives, in units of exp(entry)
    held_sum: Tensor  # [chunks, H, D]
    last_kv: Tensor  # [rows, H, D or 2D, Dv], in units of exp(exit) of the last chunk, in its frame
    last_sum: Tensor  # [rows, H, D]


def scan_chunks(
    query: Tensor | None,
    mass: Tensor,
    gain: Tensor | None,
    value: Tensor,
    theta: Tensor | None,
    initial_kv: Tensor,
    initial_sum: Tensor,
    constants: ScanConstants,
) -> ChunkResults:
    """query, mass, gain [chunks, H, C, D] and value [chunks, H, C, Dv], contiguous; initial state per row."""
    return ChunkResults(*_ScanChunks.apply(query, mass, gain, value, theta, initial_kv, initial_sum, constants))


class _ScanChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor | None,
        mass: Tensor,
        gain: Tensor | None,
        value: Tensor,
        theta: Tensor | None,
        initial_kv: Tensor,
        initial_sum: Tensor,
        constants: ScanConstants,
    ) -> tuple[Tensor | None, ...]:
        chunk = mass.shape[2]
        tables = _tables(theta, chunk, mass.dtype)
        weight = (mass - constants.exit.unsqueeze(2)).exp_()
        key = _double(weight if gain is None else weight * gain, tables)
        kv_factors, sum_factors = _factors(constants, theta, chunk)
        # What each chunk adds, and what it finds when it begins.
        added = _halves(key.transpose(-1, -2) @ value, theta)
        held_kv, last_kv = carry(constants.counts, added, _halves(initial_kv, theta), kv_factors)
        held_sum, last_sum = carry(constants.counts, weight.sum(2), initial_sum, sum_factors)
        held_kv, last_kv = _joined(held_kv, theta), _joined(last_kv, theta)
        output = den = None
        if query is not None:
            # A product with a triangle of ones is cumsum along tokens, only faster.
            den = (_ones(weight) @ weight).add_(held_sum.unsqueeze(2))
            if constants.slow is not None:
                den.masked_fill_(constants.slow[..., None, None], 1.0)
            phi = F.silu(query) if constants.activation else query
            read = _double(phi / den, tables)
            # tril selects: beyond the diagonal the product may be anything.
            scores = (read @ key.transpose(-1, -2)).tril_()
            output = scores @ value
            _add_product(output, read, held_kv)
        ctx.constants, ctx.dtypes = constants, (initial_kv.dtype, initial_sum.dtype)
        ctx.save_for_backward(query, weight, gain, value, theta, den, held_kv, held_sum, last_kv, last_sum)
        ctx.set_materialize_grads(False)
        return output, held_kv, held_sum, last_kv, last_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, grad_held_kv, grad_held_sum, grad_last_kv, grad_last_sum = grads
        query, weight, gain, value, theta, den, held_kv, held_sum, last_kv, last_sum = ctx.saved_tensors
        constants: ScanConstants = ctx.constants
        tables = _tables(theta, weight.shape[2], weight.dtype)
        key = _double(weight if gain is None else weight * gain, tables)
        grad_query = read = grad_read = scores = grad_scores = pressure = None
        if grad_output is not None:
            grad_output = grad_output.contiguous()
            phi = F.silu(query) if constants.activation else query
            quotient = phi / den
            read = _double(quotient, tables)
            scores = (read @ key.transpose(-1, -2)).tril_()
            grad_scores = (grad_output @ value.transpose(-1, -2)).tril_()
            grad_read = grad_scores @ key
            _add_product(grad_read, grad_output, held_kv.transpose(-1, -2))
            grad_query = _undouble(grad_read, tables).div_(den)
            pressure = quotient * grad_query  # minus the gradient of den
            grad_held_kv = _sum(grad_held_kv, read.transpose(-1, -2) @ grad_output)
            grad_held_sum = _sum(grad_held_sum, -pressure.sum(2))
            if constants.activation:
                grad_query = torch.ops.aten.silu_backward(grad_query, query)

        kv_factors, sum_factors = _factors(constants, theta, weight.shape[2])
        through_kv = carry_backward(
            constants.counts,
            _halves(held_kv, theta),
            kv_factors,
            _halves(torch.zeros_like(held_kv) if grad_held_kv is None else grad_held_kv, theta),
            None if grad_last_kv is None else _halves(grad_last_kv, theta),
            _halves(last_kv, theta),
        )
        through_sum = carry_backward(
            constants.counts,
            held_sum,
            sum_factors,
            torch.zeros_like(held_sum) if grad_held_sum is None else grad_held_sum,
            grad_last_sum,
            last_sum,
        )
        grad_added = _joined(through_kv.added, theta)
        grad_value = key @ grad_added
        grad_key = value @ grad_added.transpose(-1, -2)
        if scores is not None and grad_scores is not None:
            _add_product(grad_value, scores.transpose(-1, -2), grad_output)
            _add_product(grad_key, grad_scores.transpose(-1, -2), read)
        grad_theta = None
        if theta is not None and ctx.needs_input_grad[4]:
            grad_theta = _theta_gradient(read, grad_read, key, grad_key)
            if through_kv.angle is not None:
                grad_theta = grad_theta + through_kv.angle * weight.shape[2]
            grad_theta = grad_theta.to(theta.dtype)
        grad_mass = _undouble(grad_key, tables)
        grad_gain = None
        if gain is not None:
            grad_gain = grad_mass * weight
            grad_mass = grad_mass.mul_(gain)
        grad_mass = grad_mass.add_(through_sum.added.unsqueeze(2))
        if pressure is not None:
            # A true reverse sum over the later tokens, never total minus prefix.
            _add_product(grad_mass, _ones(weight).T.expand(*weight.shape[:2], -1, -1), pressure, alpha=-1.0)
        return (
            grad_query,
            grad_mass.mul_(weight),
            grad_gain,
            grad_value,
            grad_theta,
            _joined(through_kv.initial, theta).to(ctx.dtypes[0]),
            through_sum.initial.to(ctx.dtypes[1]),
            None,
        )


def _theta_gradient(read: Tensor | None, grad_read: Tensor | None, key: Tensor, grad_key: Tensor) -> Tensor:
    """sum_i i (torque_q + torque_k), i the place in the chunk: float64 [H, D]."""
    key_cos, key_sin = key.chunk(2, dim=-1)
    grad_cos, grad_sin = grad_key.chunk(2, dim=-1)
    torque = key_cos * grad_sin
    torque.addcmul_(key_sin, grad_cos, value=-1)
    if read is not None and grad_read is not None:
        read_cos, read_sin = read.chunk(2, dim=-1)
        grad_cos, grad_sin = grad_read.chunk(2, dim=-1)
        torque.addcmul_(read_cos, grad_sin)
        torque.addcmul_(read_sin, grad_cos, value=-1)
    places = torch.arange(key.shape[2], device=key.device, dtype=torch.float64)
    return torch.einsum("c,hcd->hd", places, torque.sum(0).double())


def _tables(theta: Tensor | None, chunk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin of place times theta, [H, C, D]."""
    if theta is None:
        return None
    cos, sin = rotation(theta, torch.arange(chunk, device=theta.device), dtype)
    return cos.transpose(0, 1).contiguous(), sin.transpose(0, 1).contiguous()


def _double(features: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """As `lrpe.double`, written straight into the result."""
    if tables is None:
        return features
    width = features.shape[-1]
    doubled = features.new_empty(*features.shape[:-1], 2 * width)
    torch.mul(features, tables[0], out=doubled[..., :width])
    torch.mul(features, tables[1], out=doubled[..., width:])
    return doubled


def _undouble(grad: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """Adjoint of `_double`, a tensor that may be written to (grad itself without LRPE)."""
    if tables is None:
        return grad
    cos, sin = grad.chunk(2, dim=-1)
    return (cos * tables[0]).addcmul_(sin, tables[1])


def _ones(like: Tensor) -> Tensor:
    chunk = like.shape[2]
    return torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_()


def _add_product(target: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """target += alpha left @ right, on the last two dimensions, in place."""
    target.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), alpha=alpha)


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _factors(constants: ScanConstants, theta: Tensor | None, chunk: int) -> tuple[Factors, Factors]:
    """Factors of kv and of sum."""
    enter, keep = constants.enter, constants.keep
    angle = None if theta is None else theta.double() * chunk
    wide = [None if x is None else x.unsqueeze(-1) for x in (enter, keep)]
    if theta is not None:
        wide = [None if x is None else x.unsqueeze(2) for x in wide]
    return Factors(wide[0], wide[1], angle), Factors(enter, keep)


def _halves(kv: Tensor, theta: Tensor | None) -> Tensor:
    """[..., H, 2D, Dv] -> [..., H, 2, D, Dv] with LRPE."""
    return kv if theta is None else kv.unflatten(-2, (2, kv.shape[-2] // 2))


def _joined(kv: Tensor, theta: Tensor | None) -> Tensor:
    return kv if theta is None else kv.flatten(-3, -2)
