"""The causal scan over packed chunks, forward and backward (model-spec 1).

Written by hand: autograd through the same operations is bound by memory, in element-wise passes over doubled [.., 2D]
copies of queries and keys. Here these exist for a few chunks at a time, on a CPU within its cache, and are formed again
in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .carry import Factors, carry, carry_backward, followed
from .lrpe import rotation
from .segments import CHUNK

BLOCK_ITEMS = 32  # (chunk, head) pairs done at once on a CPU, of full chunks; of shorter ones as many tokens
silu_backward = torch.ops.aten.silu_backward


class ScanConstants(NamedTuple):
    """What has no gradient. References and factors as in `torch_scan._frame`, all [chunks, H, D]."""

    counts: list[int]
    activation: bool
    exit: Tensor
    enter: Tensor
    keep: Tensor | None
    slow: Tensor | None  # [chunks, H] bool: left out here, whatever is put there
    need_state: bool = True  # whether last_kv and last_sum are read


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
        kv_factors, sum_factors = _factors(constants, theta, chunk)
        blocks = _blocks(mass)

        # What each chunk adds, and what it finds when it begins.
        weight = torch.empty_like(mass)
        added = mass.new_empty(*mass.shape[:2], initial_kv.shape[2], value.shape[3])
        sums = mass.new_empty(*mass.shape[:2], mass.shape[3])
        for rows in blocks:
            torch.sub(mass[rows], constants.exit[rows].unsqueeze(2), out=weight[rows]).exp_()
        for rows in blocks if constants.need_state else _followed_blocks(mass, constants.counts):
            key = _key(weight, gain, tables, rows)
            torch.matmul(key.transpose(-1, -2), value[rows], out=added[rows])
            torch.sum(weight[rows], 2, out=sums[rows])
        held_kv, last_kv = carry(
            constants.counts, _halves(added, theta), _halves(initial_kv, theta), kv_factors, constants.need_state
        )
        held_sum, last_sum = carry(constants.counts, sums, initial_sum, sum_factors, constants.need_state)
        held_kv, last_kv = _joined(held_kv, theta), _joined(last_kv, theta)

        output = den = None
        if query is not None:
            output, den = torch.empty_like(value), torch.empty_like(mass)
            ones = _ones(mass)
            for rows in blocks:
                key = _key(weight, gain, tables, rows)
                # A product with a triangle of ones is cumsum along tokens, only faster.
                torch.matmul(ones, weight[rows], out=den[rows]).add_(held_sum[rows].unsqueeze(2))
                if constants.slow is not None:
                    den[rows].masked_fill_(constants.slow[rows, :, None, None], 1.0)
                phi = F.silu(query[rows]) if constants.activation else query[rows]
                read = _double(phi / den[rows], tables)
                # tril selects: beyond the diagonal the product may be anything.
                scores = (read @ key.transpose(-1, -2)).tril_()
                torch.matmul(scores, value[rows], out=output[rows])
                _add_product(output[rows], read, held_kv[rows])
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
        kv_factors, sum_factors = _factors(constants, theta, weight.shape[2])
        blocks = _blocks(weight)
        empty = torch.zeros_like if grad_output is None else torch.empty_like
        grad_value, grad_mass = empty(value), empty(weight)
        grad_features = grad_mass if gain is None else empty(weight)  # gradient of weight times gain
        grad_query = None
        torque = weight.new_zeros(weight.shape[1:])  # [H, C, D]

        # Through the products inside the chunks, as far as the states they received.
        if grad_output is not None:
            grad_output = grad_output.contiguous()
            grad_query = torch.empty_like(query)
            through_kv, through_sum = torch.empty_like(held_kv), torch.empty_like(held_sum)
            ones = _ones(weight).T
            for rows in blocks:
                grad = grad_output[rows]
                key = _key(weight, gain, tables, rows)
                phi = F.silu(query[rows]) if constants.activation else query[rows]
                quotient = phi / den[rows]
                read = _double(quotient, tables)
                scores = (read @ key.transpose(-1, -2)).tril_()
                torch.matmul(scores.transpose(-1, -2), grad, out=grad_value[rows])
                torch.matmul(read.transpose(-1, -2), grad, out=through_kv[rows])
                grad_scores = (grad @ value[rows].transpose(-1, -2)).tril_()
                grad_read = grad_scores @ key
                _add_product(grad_read, grad, held_kv[rows].transpose(-1, -2))
                grad_key = grad_scores.transpose(-1, -2) @ read
                if tables is not None:
                    _add_torque(torque, read, grad_read)
                    _add_torque(torque, key, grad_key)
                grad_phi = _undouble(grad_read, tables).div_(den[rows])
                pressure = quotient * grad_phi  # minus the gradient of den
                torch.sum(pressure, 2, out=through_sum[rows]).neg_()
                grad_query[rows] = silu_backward(grad_phi, query[rows]) if constants.activation else grad_phi
                # A true reverse sum over the later tokens, never total minus prefix.
                torch.matmul(ones, pressure, out=grad_mass[rows]).neg_()
                if gain is None:
                    grad_mass[rows].add_(_undouble(grad_key, tables))
                else:
                    grad_features[rows] = _undouble(grad_key, tables)
            grad_held_kv = through_kv if grad_held_kv is None else through_kv.add_(grad_held_kv)
            grad_held_sum = through_sum if grad_held_sum is None else through_sum.add_(grad_held_sum)

        from_kv = carry_backward(
            constants.counts,
            _halves(held_kv, theta),
            kv_factors,
            _halves(torch.zeros_like(held_kv) if grad_held_kv is None else grad_held_kv, theta),
            None if grad_last_kv is None else _halves(grad_last_kv, theta),
            _halves(last_kv, theta),
        )
        from_sum = carry_backward(
            constants.counts,
            held_sum,
            sum_factors,
            torch.zeros_like(held_sum) if grad_held_sum is None else grad_held_sum,
            grad_last_sum,
            last_sum,
        )

        # Through what each chunk added to the state.
        grad_added = _joined(from_kv.added, theta)
        for rows in blocks:
            key = _key(weight, gain, tables, rows)
            _add_product(grad_value[rows], key, grad_added[rows])
            grad_key = value[rows] @ grad_added[rows].transpose(-1, -2)
            if tables is not None:
                _add_torque(torque, key, grad_key)
            grad_features[rows].add_(_undouble(grad_key, tables))
            grad_mass[rows].add_(from_sum.added[rows].unsqueeze(2))
            if gain is not None:
                grad_mass[rows].addcmul_(grad_features[rows], gain[rows])
                grad_features[rows].mul_(weight[rows])
            grad_mass[rows].mul_(weight[rows])

        grad_theta = None
        if theta is not None and from_kv.angle is not None:
            places = torch.arange(weight.shape[2], device=weight.device, dtype=torch.float64)
            turned = torch.einsum("c,hcd->hd", places, torque.double())
            grad_theta = (turned + from_kv.angle * weight.shape[2]).to(theta.dtype)
        return (
            grad_query,
            grad_mass,
            None if gain is None else grad_features,
            grad_value,
            grad_theta,
            _joined(from_kv.initial, theta).to(ctx.dtypes[0]),
            from_sum.initial.to(ctx.dtypes[1]),
            None,
        )


def _blocks(packed: Tensor) -> list[slice]:
    """Chunks done at once: all of them on an accelerator, on a CPU what its second-level cache holds."""
    return _cut(packed, 0, packed.shape[0])


def _followed_blocks(packed: Tensor, counts: list[int]) -> list[slice]:
    """The same of those that another chunk of their sequence follows."""
    blocks, start = [], 0
    for depth, count in enumerate(counts):
        blocks += _cut(packed, start, start + followed(counts, depth))
        start += count
    return blocks


def _cut(packed: Tensor, first: int, last: int) -> list[slice]:
    items = packed.shape[1] * packed.shape[2]
    size = max(1, BLOCK_ITEMS * CHUNK // max(items, 1)) if packed.device.type == "cpu" else max(last - first, 1)
    return [slice(start, min(start + size, last)) for start in range(first, last, size)]


def _key(weight: Tensor, gain: Tensor | None, tables: tuple[Tensor, Tensor] | None, rows: slice) -> Tensor:
    """The keys' features of some chunks [.., C, D or 2D]."""
    return _double(weight[rows] if gain is None else weight[rows] * gain[rows], tables)


def _add_torque(torque: Tensor, doubled: Tensor, grad: Tensor) -> None:
    """Gradient of each token's own angle, summed over chunks: torque [H, C, D] += sum (cos part) dsin - (sin part) dcos.

    The sum over places i of i (torque_q + torque_k) is theta's gradient (model-spec 2).
    """
    cos, sin = doubled.chunk(2, dim=-1)
    grad_cos, grad_sin = grad.chunk(2, dim=-1)
    torque += (cos * grad_sin).addcmul_(sin, grad_cos, value=-1).sum(0)


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


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right, on the last two dimensions, in place."""
    target.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))


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
