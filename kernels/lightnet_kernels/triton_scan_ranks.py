"""The Triton causal scan of a rank that shares its sequences with others: its own state first, its outputs after.

A rank's state must leave before anything of other ranks is known, and what they ask of it comes back after its queries are
done. So each pass has two halves, and between them states travel; kernels are those of a scan of several spans:

    forward   `_own`: what pieces of the rank's spans add, and the state after all of them
              `_outputs`: with what came before, what its spans and blocks find; outputs
    backward  `_ask`: gradients of queries, and what they ask of all that came before
              `_answer`: with what later ranks ask of the rank's own state, gradients of keys, values and theta

Both halves of the forward pass are autograd nodes, of which the first waits, backward, for what the second found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from .state import ScanState
from .triton_launch import compiled_together
from .triton_replay import replayed
from .triton_scan import (
    Angles,
    Blocks,
    chain_states,
    empty_angles,
    empty_blocks,
    empty_spans,
    empty_states,
    empty_units,
    fill_angles,
    fill_outputs,
    fill_units,
    move_spans,
    rows_of,
    sum_spans,
    tables_of,
)
from .triton_scan_grads import (
    Asked,
    StateGrads,
    answer,
    ask,
    asked_at_the_end,
    asked_at_the_start,
    chain_grads,
    move_span_grads,
    scan_pressure,
    theta_grad,
)
from .triton_shape import Shape, shape_of
from .triton_tables import Tables


def causal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    bounds: list[int] | None,
    lengths: Tensor,
    prefix: Any,
) -> Tensor:
    """See `scan.additive_scan`; inputs keep their dtype. `prefix`: from this rank's own state, [segments, ..] with
    `lengths` tokens, to that of earlier ranks."""
    theta = None if theta is None else theta.float().contiguous()
    pass_ = _Pass(None if bounds is None else tuple(bounds), activation)
    top, total, kv = _Own.apply(pass_, key, value, theta)
    before = prefix(ScanState(top, total, kv, lengths))
    start = (before.max.detach().float(), before.sum.float(), before.kv.float())
    output: Tensor = _Outputs.apply(pass_, query, key.detach(), value.detach(), theta, *start, total)
    return output


class _Pass:
    """What the halves of one call share."""

    def __init__(self, bounds: tuple[int, ...] | None, silu: bool):
        self.bounds, self.silu = bounds, silu
        self.own: tuple[Any, ...] | None = None  # forward, what `_own` left
        self.asked: tuple[Any, ...] | None = None  # backward, what `_ask` left, until the pass ends

    def forget(self) -> None:
        """A pass may end without gradients of keys: the next one must not take what this one asked."""
        self.asked = None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pass_: _Pass, key: Tensor, value: Tensor, theta: Tensor | None) -> tuple[Tensor, ...]:
        top, total, kv, *pass_.own = _replay_own(key, value, theta, pass_.bounds)
        ctx.pass_ = pass_
        ctx.save_for_backward(key, value, theta, top, kv if ctx.needs_input_grad[3] else None)
        ctx.mark_non_differentiable(top)
        return top, total, kv

    @staticmethod
    def backward(ctx: Any, _: Any, grad_sum: Tensor, grad_kv: Tensor) -> tuple[Any, ...]:
        asked, ctx.pass_.asked = ctx.pass_.asked, None
        key, value, theta, *final = ctx.saved_tensors
        grads = (grad_sum.contiguous(), grad_kv.contiguous())
        if asked is None:  # the loss depends on other ranks' outputs alone
            return None, *_of_the_state(key, value, theta, ctx.pass_.bounds, grads)
        grad_key, *arguments = asked
        grad_value, grad_theta = _replay_answer(*arguments, grad_key, *final, *grads, ctx.pass_.bounds, ctx.pass_.silu)
        return None, grad_key, grad_value, grad_theta


def _of_the_state(
    key: Tensor, value: Tensor, theta: Tensor | None, bounds: tuple[int, ...] | None, grads: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of key, value and theta from those of the rank's own state alone."""
    from .triton_ops import causal_state

    key, value = (x.detach().requires_grad_() for x in (key, value))
    theta = None if theta is None else theta.detach().requires_grad_()
    with torch.enable_grad():
        state = causal_state(key, value, theta, None if bounds is None else list(bounds))
    leaves = [key, value, *(() if theta is None else (theta,))]
    found = torch.autograd.grad((state.sum, state.kv), leaves, grads)
    return (*found, None) if theta is None else found


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pass_: _Pass, query: Tensor, key: Tensor, value: Tensor, theta: Any, top: Tensor, total: Tensor,
        kv: Tensor, _own: Tensor,
    ) -> Tensor:  # fmt: skip
        own, pass_.own = pass_.own, None
        assert own is not None
        start = tuple(x.contiguous() for x in (top, total, kv))
        output, *found = _replay_outputs(query, key, value, theta, *start, *own, pass_.bounds, pass_.silu)
        ctx.pass_ = pass_
        moved = start[2] if ctx.needs_input_grad[4] else None  # theta's gradient alone reads it
        ctx.save_for_backward(query, key, value, theta, start[0], moved, *found, *own[2:])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError(
                "additive_scan with an exchange has no second derivative; use backend='torch', which has"
            )
        # Detached: what waits in the pass for its other half must not hold the graph that holds the pass.
        query, key, value, theta, top, kv, *found = (None if x is None else x.detach() for x in ctx.saved_tensors)
        pass_ = ctx.pass_
        of_query, of_sum, of_kv, grad_key, *asked = _replay_ask(
            grad, query, key, value, theta, top, *found, pass_.bounds, pass_.silu
        )
        if ctx.needs_input_grad[8]:
            pass_.asked = (grad_key, grad, query, key, value, theta, top, kv, *found, *asked)
            Variable._execution_engine.queue_callback(pass_.forget)
        return None, of_query, None, None, None, None, of_sum, of_kv, None


def _sizes(query: Tensor, value: Tensor, theta: Tensor | None, bounds: Any, silu: bool) -> tuple[Shape, Tables]:
    shape = shape_of(query, value, theta, silu)
    return shape, tables_of(query, shape, bounds, shared=True)


def _sizes_of_keys(key: Tensor, value: Tensor, theta: Tensor | None, bounds: Any) -> None:
    _sizes(key, value, theta, bounds, False)


def _sizes_of_scan(query: Tensor, _key: Tensor, value: Tensor, theta: Tensor | None, *others: Any) -> None:
    _sizes(query, value, theta, *others[-2:])


def _sizes_of_grads(_grad: Tensor, *arguments: Any) -> None:
    _sizes_of_scan(*arguments)


def _together(name: str, run: Any, arguments: tuple[Any, ...], query: Tensor, value: Tensor, theta: Any) -> Any:
    """Run, after compiling all kernels of a new case at once."""
    case = shape_of(query, value, theta, arguments[-1] is True), query.dtype, query.device
    compiled_together((name, *case), query.device, lambda: run(*arguments))
    return run(*arguments)


def _own(key: Tensor, value: Tensor, theta: Tensor | None, bounds: Any) -> tuple[Tensor | None, ...]:
    """The state after all tokens: max, sum, kv; what pieces of spans add, the blocks' leave that it is in units of, angles."""
    shape, table = _sizes(key, value, theta, bounds, False)
    key, value = rows_of(key), rows_of(value)
    top, total, kv = empty_states(shape, table.lengths.shape[0], key.device)
    angles = empty_angles(shape, key.device)
    held = empty_spans(shape, table, key.device)
    units = empty_units(shape, table.blocks.shape[0], key.device)
    if table.blocks.shape[0] and shape.heads:
        found = Blocks(None, *units, *angles)
        fill_angles(theta, shape, angles)
        fill_units(key, shape, table, found, (None, None), (top, total))
        sum_spans(key, value, shape, table, found, held, KEYS=True, ALL=True)
        move_spans(held, theta, shape, table, found, (None, None), total=(top, kv))
    return top, total, kv, held, units[1], *angles


def _run_own(*arguments: Any) -> Any:
    return _together("own", _own, arguments, *arguments[:3])


_replay_own = replayed(_run_own, _sizes_of_keys, shared=True)


def _outputs(
    query: Tensor, key: Tensor, value: Tensor, theta: Tensor | None, top: Tensor, total: Tensor, start: Tensor,
    held: Tensor, leave: Tensor, cos: Any, sin: Any, turn: Any, bounds: Any, silu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The output; kv, enter, leave, mass and flag of blocks. Writes `held`."""
    shape, table = _sizes(query, value, theta, bounds, silu)
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    blocks = table.blocks.shape[0]
    found = empty_blocks(shape, blocks, key.device, Angles(cos, sin, turn))
    if blocks and shape.heads:
        fill_units(key, shape, table, found, (top, total), (None, None))
        move_spans(held, theta, shape, table, found, (top, start), leave)
        chain_states(key, value, shape, table, found, (top, None), (None, None), held, None, FROM=1)
        fill_outputs(query, key, value, output, shape, table, found, silu)
    return output, *found[:5]


def _run_outputs(*arguments: Any) -> Any:
    return _together("outputs", _outputs, arguments, arguments[0], *arguments[2:4])


_replay_outputs = replayed(_run_outputs, _sizes_of_scan, shared=True)


def _ask(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, theta: Tensor | None, top: Tensor, kv: Tensor,
    enter: Tensor, leave: Tensor, mass: Tensor, flag: Tensor, cos: Any, sin: Any, turn: Any, bounds: Any, silu: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of query and of the initial state's sum and kv; a buffer for key's; what the queries of each piece of a span
    ask of what it finds; and `Asked`, None for `later` where it is that buffer."""
    shape, table = _sizes(query, value, theta, bounds, silu)
    found = Blocks(kv, enter, leave, mass, flag, cos, sin, turn)
    query, key, value, grad = rows_of(query), rows_of(key), rows_of(value), rows_of(grad)
    sequences, heads, device = table.lengths.shape[0], shape.heads, query.device
    some = bool(table.blocks.shape[0] and heads)
    new = torch.empty if some else torch.zeros
    first = new(sequences, heads, shape.rows, shape.V, device=device)
    pushed = new(sequences, heads, shape.D, device=device)
    grad_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    held = empty_spans(shape, table, device)
    if not some:
        return torch.zeros_like(query), pushed, first, grad_key, held, torch.empty_like(grad), None, mass, None
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    asked = ask(grad, query, key, value, grad_query, grad_key, shape, table, found, silu, moves=True)
    sum_spans(asked.x, grad, shape, table, found, held, KEYS=False, ALL=True)
    move_span_grads(held, theta, shape, table, found, None, first)
    scan_pressure(asked, shape, table, found, None, pushed)
    asked_at_the_start(first, pushed, top, shape, table, found, None)
    later = None if asked.later is grad_key else asked.later
    return grad_query, pushed, first, grad_key, held, asked.x, later, asked.own, asked.torque


def _run_ask(*arguments: Any) -> Any:
    return _together("ask", _ask, arguments, arguments[1], *arguments[3:5])


_replay_ask = replayed(_run_ask, _sizes_of_grads, shared=True)


def _answer(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, theta: Tensor | None, top0: Tensor, kv0: Tensor | None,
    kv: Tensor, enter: Tensor, leave: Tensor, mass: Tensor, flag: Tensor, cos: Any, sin: Any, turn: Any,
    held: Tensor, x: Tensor, later: Tensor | None, own: Tensor, torque: Tensor | None, grad_key: Tensor,
    top: Tensor, last: Tensor | None, grad_sum: Tensor, grad_kv: Tensor, bounds: Any, silu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of value and theta, and into `grad_key` of key. `top`, `last`: max and kv of the rank's own state, and
    `kv0` of the initial one: None where theta's gradient is not asked for."""
    shape, table = _sizes(query, value, theta, bounds, silu)
    found, final = Blocks(kv, enter, leave, mass, flag, cos, sin, turn), StateGrads(top, last, grad_sum, grad_kv)
    query, key, value, grad = rows_of(query), rows_of(key), rows_of(value), rows_of(grad)
    grad_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    if not table.blocks.shape[0] or not shape.heads:
        return grad_value, None if theta is None or kv0 is None else torch.zeros_like(theta)
    asked = Asked(x, grad_key if later is None else later, own, torque)
    last_kv, last_pressure = asked_at_the_end(final, shape, table, found)
    move_span_grads(held, theta, shape, table, found, last_kv)
    block_grads = torch.empty_like(kv)
    chain_grads(asked, grad, shape, table, found, block_grads, held, None, FROM=1)
    pressure = scan_pressure(asked, shape, table, found, last_pressure, None)
    answer(asked, pressure, block_grads, grad, query, key, value, grad_key, grad_value, shape, table, found, silu)
    if kv0 is None:
        return grad_value, None
    return grad_value, theta_grad(theta, asked, shape, table, final, (top0, kv0))


def _run_answer(*arguments: Any) -> Any:
    return _together("answer", _answer, arguments, arguments[1], *arguments[3:5])


_replay_answer = replayed(_run_answer, _sizes_of_grads, shared=True)
