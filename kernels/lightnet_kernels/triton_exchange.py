"""Triton kernels of states that travel between sequence-parallel ranks: what each rank gives, and what arrives.

The merge of model-spec 1 over any number of ranks in one kernel each way, where its definition (`state.merge_states`, one
rank after the other) takes some 45 operators a rank. A row b of the batch passes ranks in order of travel; what rank r
gives reaches position p > r if the row goes on (``continues``) from r to p and no rank between begins a segment
(``single``). On its way it turns by the tokens of the ranks between. With M the largest maximum that arrives,

    sum = sum_r e^(m_r - M) sum_r        kv = sum_r e^(m_r - M) Turn(L_r theta) kv_r

and backward each rank collects what all later ones ask of it, and theta what the turns that arrived here ask.

A payload is float32: the lengths (int64, two places each), maxima [B, H, D], sums [B, H, D] and kv [B, H, rows, V] of the
segments that travel; gradients travel alike, without lengths, beside the maxima in whose units they are.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_parts  # noqa: F401  (mends Triton's interpreter)
from .state import ScanState
from .triton_launch import launch
from .triton_replay import replayed

ROWS = 16  # features of a program


@triton.jit
def pack(
    max_ptr, sum_ptr, kv_ptr, length_ptr, index_ptr, payload_ptr, rows, heads,
    D: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HALVES: tl.constexpr, BD: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """The states of one segment a row, `index`, side by side."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segment = tl.load(index_ptr + row).to(tl.int64)
    feature = tl.program_id(2) * BD + tl.arange(0, BD)
    col = tl.arange(0, VP)
    inside = feature < D
    if LENGTH:
        if (head == 0) & (tl.program_id(2) == 0):
            tl.store(payload_ptr.to(tl.pointer_type(tl.int64)) + row, tl.load(length_ptr + segment))
        payload_ptr += 2 * rows
    source, target = (segment * heads + head) * D + feature, (row * heads + head) * D + feature
    tl.store(payload_ptr + target, tl.load(max_ptr + source, mask=inside, other=0.0), mask=inside)
    payload_ptr += rows * heads * D
    tl.store(payload_ptr + target, tl.load(sum_ptr + source, mask=inside, other=0.0), mask=inside)
    payload_ptr += rows * heads * D
    there = inside[:, None] & (col < V)[None, :]
    for half in tl.static_range(HALVES):
        at = (half * D + feature)[:, None] * V + col[None, :]
        x = tl.load(kv_ptr + (segment * heads + head) * (HALVES * D * V) + at, mask=there, other=0.0)
        tl.store(payload_ptr + (row * heads + head) * (HALVES * D * V) + at, x, mask=there)


@triton.jit
def rank_at(position, ranks, BACKWARDS: tl.constexpr):
    return ranks - 1 - position if BACKWARDS else position


@triton.jit
def scale_to(source, target):
    """e^(source - target), 0 for no tokens."""
    return tl.where(source == float("-inf"), 0.0, tl.exp(source - target))


@triton.jit
def turning(theta, tokens):
    """cos and sin of the angle that so many tokens make, in float64."""
    angle = tokens.to(tl.float64) * theta
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def arrive(
    gathered_ptr, continues_ptr, single_ptr, row_of_ptr, theta_ptr, max_out, sum_out, kv_out, length_out,
    stride, ranks, position, rows, heads,
    D: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HALVES: tl.constexpr, BD: tl.constexpr, TURN: tl.constexpr,
    BACKWARDS: tl.constexpr,
):  # fmt: skip
    """The state that each segment of this rank receives."""
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(row_of_ptr + segment)
    feature = tl.program_id(2) * BD + tl.arange(0, BD)
    col = tl.arange(0, VP)
    inside = feature < D
    there = inside[:, None] & (col < V)[None, :]
    at = (row * heads + head) * D + feature
    matrix = (row * heads + head) * (HALVES * D * V) + feature[:, None] * V + col[None, :]
    size = rows * heads * D
    top = tl.full((BD,), float("-inf"), tl.float32)
    alive = row >= 0
    for step in range(position):
        r = position - 1 - step
        here = gathered_ptr + tl.cast(rank_at(r, ranks, BACKWARDS), tl.int64) * stride
        alive = alive & (tl.load(continues_ptr + r * rows + row, mask=alive, other=0) != 0)
        top = tl.maximum(top, tl.load(here + 2 * rows + at, mask=inside & alive, other=float("-inf")))
        alive = alive & (tl.load(single_ptr + r * rows + row, mask=alive, other=0) != 0)
    mass = tl.zeros((BD,), tl.float32)
    cosine, sine = tl.zeros((BD, VP), tl.float32), tl.zeros((BD, VP), tl.float32)
    tokens = tl.zeros((), tl.int64)
    if TURN:
        theta = tl.load(theta_ptr + head * D + feature, mask=inside, other=0.0).to(tl.float64)
    alive = row >= 0
    for step in range(position):
        r = position - 1 - step
        here = gathered_ptr + tl.cast(rank_at(r, ranks, BACKWARDS), tl.int64) * stride
        alive = alive & (tl.load(continues_ptr + r * rows + row, mask=alive, other=0) != 0)
        scale = scale_to(tl.load(here + 2 * rows + at, mask=inside & alive, other=float("-inf")), top)
        mass += scale * tl.load(here + 2 * rows + size + at, mask=inside & alive, other=0.0)
        real = tl.load(here + 2 * rows + 2 * size + matrix, mask=there & alive, other=0.0)
        if HALVES == 2:
            imag = tl.load(here + 2 * rows + 2 * size + D * V + matrix, mask=there & alive, other=0.0)
            if TURN:
                cos, sin = turning(theta, tokens)
                wide, other = real.to(tl.float64), imag.to(tl.float64)
                real = (cos[:, None] * wide + sin[:, None] * other).to(tl.float32)
                imag = (cos[:, None] * other - sin[:, None] * wide).to(tl.float32)
            sine += scale[:, None] * imag
        cosine += scale[:, None] * real
        tokens += tl.load(here.to(tl.pointer_type(tl.int64)) + row, mask=alive, other=0)
        alive = alive & (tl.load(single_ptr + r * rows + row, mask=alive, other=0) != 0)
    target = (segment * heads + head) * D + feature
    tl.store(max_out + target, top, mask=inside)
    tl.store(sum_out + target, mass, mask=inside)
    target = (segment * heads + head) * (HALVES * D * V) + feature[:, None] * V + col[None, :]
    tl.store(kv_out + target, cosine, mask=there)
    if HALVES == 2:
        tl.store(kv_out + D * V + target, sine, mask=there)
    if (head == 0) & (tl.program_id(2) == 0):
        tl.store(length_out + segment, tokens)


@triton.jit
def give(
    grads_ptr, gathered_ptr, continues_ptr, single_ptr, row_of_ptr, theta_ptr, max_ptr, sum_out, kv_out,
    grads_stride, stride, ranks, position, rows, heads,
    D: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, HALVES: tl.constexpr, BD: tl.constexpr, TURN: tl.constexpr,
    BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Gradients of the states that this rank's segments gave, from those of what arrived at later positions."""
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(row_of_ptr + segment)
    feature = tl.program_id(2) * BD + tl.arange(0, BD)
    col = tl.arange(0, VP)
    inside = feature < D
    there = inside[:, None] & (col < V)[None, :]
    at = (row * heads + head) * D + feature
    matrix = (row * heads + head) * (HALVES * D * V) + feature[:, None] * V + col[None, :]
    size = rows * heads * D
    own = tl.load(max_ptr + (segment * heads + head) * D + feature, mask=inside, other=float("-inf"))
    mass = tl.zeros((BD,), tl.float32)
    cosine, sine = tl.zeros((BD, VP), tl.float32), tl.zeros((BD, VP), tl.float32)
    tokens = tl.zeros((), tl.int64)
    if TURN:
        theta = tl.load(theta_ptr + head * D + feature, mask=inside, other=0.0).to(tl.float64)
    alive = row >= 0
    for q in range(position + 1, ranks):
        here = grads_ptr + tl.cast(rank_at(q, ranks, BACKWARDS), tl.int64) * grads_stride
        alive = alive & (tl.load(continues_ptr + (q - 1) * rows + row, mask=alive, other=0) != 0)
        reached = inside & alive
        scale = tl.where(reached, scale_to(own, tl.load(here + at, mask=reached, other=0.0)), 0.0)
        mass += scale * tl.load(here + size + at, mask=reached, other=0.0)
        real = tl.load(here + 2 * size + matrix, mask=there & alive, other=0.0)
        if HALVES == 2:
            imag = tl.load(here + 2 * size + D * V + matrix, mask=there & alive, other=0.0)
            if TURN:
                cos, sin = turning(theta, tokens)
                wide, other = real.to(tl.float64), imag.to(tl.float64)
                real = (cos[:, None] * wide - sin[:, None] * other).to(tl.float32)
                imag = (cos[:, None] * other + sin[:, None] * wide).to(tl.float32)
            sine += scale[:, None] * imag
        cosine += scale[:, None] * real
        lengths = (gathered_ptr + tl.cast(rank_at(q, ranks, BACKWARDS), tl.int64) * stride).to(
            tl.pointer_type(tl.int64)
        )
        tokens += tl.load(lengths + row, mask=alive, other=0)
        alive = alive & (tl.load(single_ptr + q * rows + row, mask=alive, other=0) != 0)
    target = (segment * heads + head) * D + feature
    tl.store(sum_out + target, mass, mask=inside)
    target = (segment * heads + head) * (HALVES * D * V) + feature[:, None] * V + col[None, :]
    tl.store(kv_out + target, cosine, mask=there)
    if HALVES == 2:
        tl.store(kv_out + D * V + target, sine, mask=there)


@triton.jit
def turn_grads(
    gathered_ptr, continues_ptr, single_ptr, target_ptr, theta_ptr, max_ptr, grad_ptr, out_ptr,
    stride, ranks, position, rows, heads,
    D: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BD: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """theta's gradient [H, D] from what arrived here: `max` and `grad` [segments, ..] of the received states."""
    head = tl.program_id(0)
    feature = tl.program_id(1) * BD + tl.arange(0, BD)
    col = tl.arange(0, VP)
    inside = feature < D
    there = inside[:, None] & (col < V)[None, :]
    size = rows * heads * D
    theta = tl.load(theta_ptr + head * D + feature, mask=inside, other=0.0).to(tl.float64)
    total = tl.zeros((BD,), tl.float64)
    for number in range(rows):
        row = tl.cast(number, tl.int64)
        segment = tl.load(target_ptr + row).to(tl.int64)
        at = (row * heads + head) * D + feature
        matrix = (row * heads + head) * (2 * D * V) + feature[:, None] * V + col[None, :]
        top = tl.load(max_ptr + (segment * heads + head) * D + feature, mask=inside, other=0.0)
        given = grad_ptr + (segment * heads + head) * (2 * D * V) + feature[:, None] * V + col[None, :]
        grad_real = tl.load(given, mask=there, other=0.0)
        grad_imag = tl.load(given + D * V, mask=there, other=0.0)
        tokens = tl.zeros((), tl.int64)
        alive = row >= 0
        for step in range(position):
            r = position - 1 - step
            here = gathered_ptr + tl.cast(rank_at(r, ranks, BACKWARDS), tl.int64) * stride
            alive = alive & (tl.load(continues_ptr + r * rows + row, mask=alive, other=0) != 0)
            scale = scale_to(tl.load(here + 2 * rows + at, mask=inside & alive, other=float("-inf")), top)
            real = tl.load(here + 2 * rows + 2 * size + matrix, mask=there & alive, other=0.0)
            imag = tl.load(here + 2 * rows + 2 * size + D * V + matrix, mask=there & alive, other=0.0)
            along = tl.sum(grad_real * real + grad_imag * imag, 1).to(tl.float64)
            across = tl.sum(grad_real * imag - grad_imag * real, 1).to(tl.float64)
            cos, sin = turning(theta, tokens)
            total += tokens.to(tl.float64) * scale.to(tl.float64) * (cos * across - sin * along)
            tokens += tl.load(here.to(tl.pointer_type(tl.int64)) + row, mask=alive, other=0)
            alive = alive & (tl.load(single_ptr + r * rows + row, mask=alive, other=0) != 0)
    tl.store(out_ptr + head * D + feature, total.to(tl.float32), mask=inside)


def _shape(kv: Tensor, width: int) -> tuple[int, int, dict[str, int]]:
    heads, rows, values = kv.shape[1:]
    blocks = -(-width // ROWS)
    sizes = {
        "D": width,
        "V": values,
        "VP": max(16, triton.next_power_of_2(values)),
        "HALVES": rows // width,
        "BD": ROWS,
    }
    return heads, blocks, sizes


def packed(state: ScanState, index: Tensor, lengths: bool) -> Tensor:
    """float32 [bytes / 4] of the segments `index` [B] of a state [segments, ..] (or of its gradients, whose `max` are the
    units); with `lengths` as states travel."""
    found: Tensor = _packed(state.max, state.sum, state.kv, state.length, index, lengths)
    return found


@replayed
def _packed(top: Tensor, total: Tensor, kv: Tensor, length: Tensor, index: Tensor, lengths: bool) -> Tensor:
    rows, width = index.shape[0], top.shape[2]
    heads, blocks, sizes = _shape(kv, width)
    floats = rows * heads * (2 * width + kv.shape[2] * kv.shape[3]) + (2 * rows if lengths else 0)
    payload = torch.empty(floats + floats % 2, device=kv.device)  # int64 lengths follow
    launch(pack, (rows, heads, blocks))(
        top, total, kv, length, index, payload, rows, heads, **sizes, LENGTH=lengths, num_warps=4
    )
    return payload


def arrived(
    gathered: Tensor, like: ScanState, line: tuple[Tensor, Tensor, Tensor], place: tuple[int, int, int],
    theta: Tensor | None, backwards: bool,
) -> ScanState:  # fmt: skip
    """What each segment receives.

    Args:
        gathered: [ranks, ..] payloads, in order of rank.
        like: this rank's own state, for shapes.
        line: continues, single, bool [ranks, B] in order of travel; row of each segment, -1 where none receives.
        place: ranks, this rank's position in order of travel, B.
        theta: [H, D] or None, see `state.merge_states`.
    """
    return ScanState(*_arrived(gathered, *like, *line, theta, *place, backwards))


@replayed
def _arrived(
    gathered: Tensor, top: Tensor, total: Tensor, kv: Tensor, length: Tensor, continues: Tensor, single: Tensor,
    row: Tensor, theta: Tensor | None, ranks: int, position: int, rows: int, backwards: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads, blocks, sizes = _shape(kv, top.shape[2])
    result = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (top, total, kv, length)]
    launch(arrive, (top.shape[0], heads, blocks))(
        gathered, continues, single, row, theta, *result, gathered.stride(0), ranks, position, rows, heads, **sizes,
        TURN=theta is not None, BACKWARDS=backwards, num_warps=4,
    )  # fmt: skip
    return tuple(result)


def given(
    grads: Tensor, gathered: Tensor, top: Tensor, kv: Tensor, line: tuple[Tensor, Tensor, Tensor],
    place: tuple[int, int, int], theta: Tensor | None, backwards: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's sum and kv.

    Args:
        grads, gathered: [ranks, ..] payloads of gradients, and of the states.
        top: [segments, H, D] this rank's maxima.
        kv: this rank's, for its shape.
        line: as for `arrived`, with the row that each segment gave to.
    """
    of_sum, of_kv = _given(grads, gathered, top, kv, *line, theta, *place, backwards)
    return of_sum, of_kv


@replayed
def _given(
    grads: Tensor, gathered: Tensor, top: Tensor, kv: Tensor, continues: Tensor, single: Tensor, row: Tensor,
    theta: Tensor | None, ranks: int, position: int, rows: int, backwards: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, blocks, sizes = _shape(kv, top.shape[2])
    of_sum, of_kv = torch.empty_like(top), torch.empty(kv.shape, device=kv.device)
    launch(give, (top.shape[0], heads, blocks))(
        grads, gathered, continues, single, row, theta, top, of_sum, of_kv, grads.stride(0), gathered.stride(0),
        ranks, position, rows, heads, **sizes, TURN=theta is not None, BACKWARDS=backwards, num_warps=4,
    )  # fmt: skip
    return of_sum, of_kv


def theta_grad(
    gathered: Tensor, received: Tensor, grad: Tensor, line: tuple[Tensor, Tensor], target: Tensor,
    place: tuple[int, int, int], theta: Tensor, backwards: bool,
) -> Tensor:  # fmt: skip
    """float32 [H, D]: this rank's share.

    Args:
        received: [segments, H, D] maxima of what arrived.
        grad: gradient of the kv that arrived.
        target: [B], the segment of each row that received.
    """
    found: Tensor = _theta_grad(gathered, received, grad, *line, target, theta, *place, backwards)
    return found


@replayed
def _theta_grad(
    gathered: Tensor, received: Tensor, grad: Tensor, continues: Tensor, single: Tensor, target: Tensor,
    theta: Tensor, ranks: int, position: int, rows: int, backwards: bool,
) -> Tensor:  # fmt: skip
    heads, blocks, sizes = _shape(grad, received.shape[2])
    del sizes["HALVES"]
    found = torch.empty(theta.shape, device=theta.device)
    launch(turn_grads, (heads, blocks))(
        gathered, continues, single, target, theta, received, grad, found, gathered.stride(0), ranks, position, rows,
        heads, **sizes, BACKWARDS=backwards, num_warps=4,
    )  # fmt: skip
    return found
