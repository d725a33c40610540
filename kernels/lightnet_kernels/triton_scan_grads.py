"""Backward pass of the Triton causal scan, in parts that a call's own gradients and those of ranks share. See `triton_scan`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import cuda_blocks, cuda_chains
from . import triton_backward as kernels
from . import triton_backward_states as state_kernels
from .packed import Gradients, apart
from .triton_launch import launch
from .triton_parts import BLOCK
from .triton_scan import (
    Blocks,
    empty_spans,
    rows_of,
    span_moves,
    strides,
    sum_spans,
    tables_of,
    triangle,
)
from .triton_shape import Shape, parts, shape_of
from .triton_tables import Tables

COLUMNS = 32  # that one program sums up


class StateGrads(NamedTuple):
    """Gradients of the final state, and the state itself (kv for theta's gradient alone)."""

    max: Tensor
    kv: Tensor | None
    grad_sum: Tensor
    grad_kv: Tensor


class Asked(NamedTuple):
    """What queries ask, see `triton_backward`: buffers between the kernels of one backward pass."""

    x: Tensor
    later: Tensor
    own: Tensor
    torque: Tensor | None  # of queries, keys, states and last moves: [2 blocks + chains + sequences, H, D]


def ask(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_query: Tensor, grad_key: Tensor, shape: Shape,
    table: Tables, found: Blocks, silu: bool, moves: bool,
) -> Asked:  # fmt: skip
    """Writes the gradient of queries; returns what they ask. `grad_key` is written meanwhile, where it can hold what is
    needed. moves: whether last states move, too."""
    blocks, heads = table.blocks.shape[0], shape.heads
    torque = None
    if shape.double:
        chained = table.spans.shape[0] * shape.shares
        rows = 2 * blocks + chained + (table.lengths.shape[0] if moves else 0)
        torque = torch.empty(rows, heads, shape.D, device=query.device)
    x = torch.empty(query.shape, dtype=shape.operand, device=query.device)
    later = torch.empty_like(x) if query.dtype == torch.float16 else grad_key  # float16 has not the range
    own = torch.empty_like(found.mass)
    for grid, count in shape.grids(table):
        if shape.cuda and cuda_chains.grouped(query.device) and count == 0:
            cuda_blocks.query_grads(
                query, key, value, grad, grad_query, x, later, table.blocks, found, own, torque, silu
            )
            continue
        launch(kernels.query_grads, grid)(
            query, key, value, grad, grad_query, x, later, table.blocks, triangle(shape.operand, query.device), found.cos,
            found.sin, found.kv, found.enter, found.mass, found.flag, own, torque,
            blocks * heads, *strides(query, key, value, grad, x, grad_query, later), heads, SILU=silu, COUNT=count,
            **shape.of("query_grads"),
        )  # fmt: skip
    return Asked(x, later, own, torque)


def chain_grads(
    asked: Asked, grad: Tensor, shape: Shape, table: Tables, found: Blocks, block_grads: Tensor,
    before: Tensor | None, after: Tensor | None, FROM: int,
) -> None:  # fmt: skip
    """`triton_backward.chain_grads`."""
    blocks, spans = table.blocks.shape[0], table.spans.shape[0]
    moved = None if asked.torque is None else asked.torque[2 * blocks :]
    if shape.cuda:
        none, states = (None, None), (before, after, moved, FROM)
        cuda_chains.chain(asked.x, grad, table.spans, found, block_grads, none, none, *states, backward=True)
        return
    launch(kernels.chain_grads, (spans, shape.heads, shape.chains))(
        asked.x, grad, table.spans, *found.angles, found.kv, block_grads, found.enter, found.leave, moved, before, after,
        *strides(asked.x, grad), shape.heads, FROM=FROM, TO=after is not None, **shape.of("chain_grads"),
    )  # fmt: skip


def sum_span_grads(asked: Asked, grad: Tensor, shape: Shape, table: Tables, found: Blocks, held: Tensor) -> None:
    """What the queries of each piece ask of what it finds, where somebody has to answer."""
    if shape.cuda:
        none, states = (None, None), (None, held, None, 0)
        cuda_chains.chain(asked.x, grad, table.pieces, found, None, none, none, *states, backward=True, sums=True)
    else:
        sum_spans(asked.x, grad, shape, table, found, held, KEYS=False, ALL=False)


def move_span_grads(
    held: Tensor, theta: Tensor | None, shape: Shape, table: Tables, found: Blocks, last: Tensor | None,
    first: Tensor | None = None,
) -> None:  # fmt: skip
    """`triton_backward_states.scan_span_grads`; `first` is asked for with TOTAL."""
    arguments = shape.of_states()
    launch(state_kernels.scan_span_grads, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["BD"])))(
        table.piece_ranges, table.pieces, held, found.enter, found.leave, span_moves(theta, table), last, first,
        shape.heads, BT=BLOCK, FINAL=last is not None, TOTAL=first is not None, **arguments,
    )  # fmt: skip


def scan_pressure(
    asked: Asked, shape: Shape, table: Tables, found: Blocks, last: Tensor | None, pushed: Tensor | None
) -> Tensor:
    """`triton_backward_states.scan_pressure`: what comes after each block; `pushed` is written where given."""
    pressure = torch.empty_like(found.mass)
    for arguments in shape.rows_at_once(table):
        launch(state_kernels.scan_pressure, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["DP"])))(
            table.block_ranges, found.enter, found.leave, asked.own, pressure, last, pushed, shape.heads, D=shape.D,
            FINAL=last is not None, INITIAL=pushed is not None, **arguments,
        )  # fmt: skip
    return pressure


def answer(
    asked: Asked, pressure: Tensor, block_grads: Tensor, grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    grad_key: Tensor, grad_value: Tensor, shape: Shape, table: Tables, found: Blocks, silu: bool,
) -> None:  # fmt: skip
    """The gradients of keys and values."""
    blocks, heads = table.blocks.shape[0], shape.heads
    for grid, count in shape.grids(table):
        if shape.cuda and cuda_chains.grouped(query.device) and count == 0:
            cuda_blocks.answers(
                key, value, grad, asked.x, asked.later, grad_key, grad_value, table.blocks, found, block_grads, pressure,
                None if asked.torque is None else asked.torque[blocks:],
            )  # fmt: skip
            continue
        launch(kernels.key_grads, grid)(
            query, key, value, grad, grad_key, asked.x, asked.later, table.blocks, found.cos, found.sin, block_grads,
            found.enter, found.leave, found.mass, found.flag, pressure,
            None if asked.torque is None else asked.torque[blocks:], blocks * heads,
            *strides(query, key, value, grad, asked.x, grad_key, asked.later), heads, SILU=silu, COUNT=count,
            **shape.of("key_grads"),
        )  # fmt: skip
        launch(kernels.value_grads, grid)(
            query, key, grad, grad_value, asked.x, table.blocks, found.cos, found.sin, block_grads, found.enter,
            found.leave, found.mass, found.flag, blocks * heads, *strides(query, key, grad, asked.x, grad_value), heads,
            SILU=silu, COUNT=count, **shape.of("value_grads"),
        )  # fmt: skip


def theta_grad(
    theta: Tensor | None, asked: Asked, shape: Shape, table: Tables, final: StateGrads | None,
    apart: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:  # fmt: skip
    """theta's gradient, summed in one order. `apart`: maxima and kv of initial states that the final ones do not hold."""
    if theta is None or asked.torque is None:
        return None
    sequences, rows, columns = table.lengths.shape[0], asked.torque.shape[0], shape.heads * shape.D
    if final is not None:
        arguments, moves = shape.of_states(), asked.torque[rows - sequences :]
        top0, kv0 = apart or (None, None)
        launch(state_kernels.last_moves, (sequences, shape.heads, parts(shape.D, arguments["BD"])))(
            table.block_ranges, table.lengths, final.kv, final.grad_kv, final.max, kv0, top0, theta, moves, shape.heads,
            BT=BLOCK, APART=apart is not None, **arguments,
        )  # fmt: skip
    total = torch.empty(shape.heads, shape.D, device=theta.device)
    launch(state_kernels.sum_rows, (parts(columns, COLUMNS),))(
        asked.torque, total, rows, columns, ROWS=128, COLUMNS=COLUMNS, num_warps=8
    )
    return total


def backward(
    grad: Tensor,
    given: tuple[Tensor, Tensor | None, Tensor | None],
    theta: Tensor | None,
    initial: tuple[Tensor, ...] | None,
    bounds: tuple[int, ...] | None,
    silu: bool,
    found: Blocks,
    final: StateGrads | None,
    compiled_for: bool | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value as they are given (see `packed`), of theta, and of the initial state's sum and kv.
    compiled_for: see `triton_scan.tables_of`."""
    query, key, value = apart(*given)
    shape = shape_of(query, value, theta, silu)
    table = tables_of(query, shape, bounds, compiled_for=compiled_for)
    query, key, value, grad = rows_of(query), rows_of(key), rows_of(value), rows_of(grad)
    heads, device, sequences = shape.heads, query.device, table.lengths.shape[0]
    new = torch.zeros if not table.blocks.shape[0] or not heads else torch.empty
    first = new(sequences, heads, shape.rows, shape.V, device=device) if initial is not None else None
    pushed = new(sequences, heads, shape.D, device=device) if initial is not None else None
    grads = Gradients(*given)
    if not table.blocks.shape[0] or not heads:
        if final is not None and initial is not None:
            counts = initial[0] > float("-inf")  # what is no state yet counts for nothing
            pushed = final.grad_sum * counts
            first = (final.grad_kv.unflatten(2, (-1, shape.D)) * counts[:, :, None, :, None]).flatten(2, 3)
        return *grads.all(), None if theta is None else torch.zeros_like(theta), pushed, first
    grad_query, grad_key = grads.next(), grads.next()
    block_grads = torch.empty_like(found.kv)
    last_kv, last_pressure = (None, None) if final is None else asked_at_the_end(final, shape, table, found)
    asked = ask(grad, query, key, value, grad_query, grad_key, shape, table, found, silu, final is not None)
    if not table.chained:
        source = 0 if last_kv is None else 2
        chain_grads(asked, grad, shape, table, found, block_grads, last_kv, first, source)
    else:
        held = empty_spans(shape, table, device)
        sum_span_grads(asked, grad, shape, table, found, held)
        move_span_grads(held, theta, shape, table, found, last_kv)
        chain_grads(asked, grad, shape, table, found, block_grads, held, first, FROM=1)
        del held
    pressure = scan_pressure(asked, shape, table, found, last_pressure, pushed)
    grad_value = grads.next()  # no sooner: spans held states meanwhile
    answer(asked, pressure, block_grads, grad, query, key, value, grad_key, grad_value, shape, table, found, silu)
    grad_theta = theta_grad(theta, asked, shape, table, final)
    if first is not None and pushed is not None and initial is not None:
        asked_at_the_start(first, pushed, initial[0], shape, table, found, final)
    return *grads.all(), grad_theta, pushed, first


def asked_at_the_end(final: StateGrads, shape: Shape, table: Tables, found: Blocks) -> tuple[Tensor, Tensor]:
    """`triton_backward_states.asks_of_last`: kv's and the pressure."""
    arguments = shape.of_states()
    kv, pressure = torch.empty_like(final.grad_kv), torch.empty_like(final.grad_sum)
    launch(state_kernels.asks_of_last, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["BD"])))(
        table.block_ranges,
        found.leave,
        final.max,
        final.grad_sum,
        final.grad_kv,
        kv,
        pressure,
        shape.heads,
        **arguments,
    )
    return kv, pressure


def asked_at_the_start(
    kv: Tensor, pressure: Tensor, top: Tensor, shape: Shape, table: Tables, found: Blocks, final: StateGrads | None
) -> None:
    """`triton_backward_states.grads_of_first`: to the gradients of kv and sum, in place."""
    arguments = shape.of_states()
    last = (None, None) if final is None else (final.grad_kv, final.grad_sum)
    launch(state_kernels.grads_of_first, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["BD"])))(
        table.block_ranges, found.enter, top, kv, pressure, *last, shape.heads, **arguments
    )
