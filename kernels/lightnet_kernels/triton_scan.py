"""Backend "triton": the causal additive scan on a GPU (or under TRITON_INTERPRET=1 on a CPU, for tests).

Forward: chains of blocks leave the state that every block finds (`chain_states`), then all blocks give their outputs at
once. Backward: queries, all blocks at once; chains from the end with gradients; then keys, then values, all blocks at
once. Where sequences are long and heads few a sequence is cut into spans, whose chains do not wait for one another: what a
span finds is added to its blocks' states after; backward its chains run twice. Nothing waits for the device; a new cut
into blocks is sent to it once. For the backward pass the inputs and the blocks' states are kept: one state for every BLOCK
tokens, in the operands' dtype.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_backward as backward_kernels
from . import triton_forward as forward_kernels
from .state import ScanState
from .triton_launch import launch
from .triton_parts import BLOCK
from .triton_tables import WINDOW, Tables, tables

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLICE = 64  # DH
LANES = 32  # features that one program of a scan over blocks looks at
ADDERS = 2048  # programs that move what spans find to their blocks
EXACT = 32  # (block, head) that one program of the exact form looks at


class Shape(NamedTuple):
    """Compile-time arguments that all kernels share, from one call's tensors."""

    heads: int
    D: int
    V: int
    double: bool
    silu: bool
    wide: bool  # float32 operands

    @property
    def slices(self) -> int:
        return parts(self.D, SLICE)

    @property
    def rows(self) -> int:
        return (2 if self.double else 1) * self.D

    @property
    def value_width(self) -> int:
        return max(64, triton.next_power_of_2(self.V))

    @property
    def value_slice(self) -> int:
        """Value features of one chain: with both halves of a doubled state no more than its registers hold."""
        return 64 if self.double or self.wide else self.value_width

    @property
    def chains(self) -> int:
        """Programs that share a span of one head."""
        return self.slices * parts(self.V, self.value_slice)

    @property
    def operand(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.bfloat16  # float16 tensors want bfloat16's range

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a tuple of numbers)
    def of(self, name: str) -> dict[str, Any]:
        """Arguments of a kernel of blocks: widths, operands, and how it is launched, by rule: nothing is tuned."""
        rule = LAUNCH[name][1 if self.double else 0]
        values = {"VB": self.value_slice} if name.startswith("chain") else {"VP": self.value_width}
        return {
            "D": self.D, "V": self.V, "DH": SLICE, "NH": self.slices, "BT": BLOCK, **values, "LRPE": self.double,
            "OP": tl.float32 if self.wide else tl.bfloat16, "PREC": "tf32x3" if self.wide else "ieee",
            "STAGES": 1 if self.wide else rule.stages, "num_warps": rule.warps,
        }  # fmt: skip

    def grids(self, table: Tables) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Grids of a kernel of blocks and its COUNT: the fast form, then the exact form where blocks need it."""
        blocks = table.blocks.shape[0]
        return ((blocks, self.heads), 0), ((parts(blocks * self.heads, EXACT), 1), EXACT)

    def rows_at_once(self, table: Tables) -> dict[str, int]:
        """Blocks that a scan over a sequence's blocks takes at once, and its warps."""
        long = table.blocks.shape[0] > 64 * table.lengths.shape[0]
        return {"ROWS": 64, "num_warps": 4} if long else {"ROWS": 16, "num_warps": 1}

    def of_states(self) -> dict[str, Any]:
        """Arguments of a scan over spans."""
        rows = min(16, triton.next_power_of_2(self.D))
        return {"D": self.D, "V": self.V, "BD": rows, "VP": self.value_width, "LRPE": self.double, "num_warps": 4}


class Rule(NamedTuple):
    """How a kernel of blocks is launched."""

    stages: int  # of its pipeline
    warps: int = 4


# Without and with LRPE, as measured (benchmarks/LOG.md).
LAUNCH = {
    "chain_states": (Rule(3), Rule(2)),
    "outputs": (Rule(2), Rule(2)),
    "query_grads": (Rule(2), Rule(1)),
    "chain_grads": (Rule(3), Rule(2)),
    "key_grads": (Rule(2), Rule(1)),
    "value_grads": (Rule(3), Rule(2)),
}


def parts(whole: int, part: int) -> int:
    """How many parts make the whole (triton.cdiv costs two microseconds a call)."""
    return -(-whole // part)


def shape_of(query: Tensor, value: Tensor, theta: Tensor | None, silu: bool) -> Shape:
    heads, width = query.shape[2:]
    return Shape(heads, width, value.shape[3], theta is not None, silu, query.dtype == torch.float32)


def tables_of(query: Tensor, shape: Shape, bounds: tuple[int, ...] | None) -> Tables:
    """How the tokens of a call are cut."""
    return tables(query.shape[0], query.shape[1], bounds, BLOCK, shape.heads * shape.chains, query.device)


def rows_of(x: Tensor) -> Tensor:
    """The tensor with features side by side, and rows and heads near enough for 32-bit offsets within a block's tokens."""
    near = max(x.stride(1) * BLOCK, x.stride(2) * x.shape[2]) < 2**31
    return x if x.stride(3) == 1 and near else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


@functools.lru_cache(maxsize=8)
def triangle(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(BLOCK, BLOCK, dtype=dtype, device=device).tril()


class Angles(NamedTuple):
    """Tables of cos and sin, see `triton_forward.fill_angles`; None without LRPE."""

    cos: Tensor | None
    sin: Tensor | None
    turn: Tensor | None


def empty_angles(shape: Shape, device: torch.device) -> Angles:
    if not shape.double:
        return Angles(None, None, None)
    kind = torch.float32 if shape.wide else torch.float16
    cos, sin = (torch.empty(shape.heads, BLOCK, shape.D, dtype=kind, device=device) for _ in range(2))
    return Angles(cos, sin, torch.empty(shape.heads, BLOCK + 1, 2, shape.D, dtype=torch.float32, device=device))


def span_moves(theta: Tensor | None, table: Tables) -> Tensor | None:
    """cos and sin [2 + 2 sequences, H, D] of moves by a full span and by each sequence's last one."""
    if theta is None:
        return None
    sequences, (heads, width) = table.lengths.shape[0], theta.shape
    moves = torch.empty(2 + 2 * sequences, heads, width, device=theta.device)
    launch(forward_kernels.fill_moves, (1 + sequences, heads))(
        theta, table.lengths, moves, table.span * BLOCK, sequences, heads,
        D=width, DP=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return moves


class Blocks(NamedTuple):
    """What every block finds, see `triton_forward`; kept for the backward pass."""

    kv: Tensor
    enter: Tensor
    leave: Tensor
    mass: Tensor
    flag: Tensor
    cos: Tensor | None
    sin: Tensor | None
    turn: Tensor | None

    @property
    def angles(self) -> Angles:
        return Angles(self.cos, self.sin, self.turn)


def empty_blocks(shape: Shape, blocks: int, device: torch.device) -> Blocks:
    heads = shape.heads
    kv = torch.empty(blocks, heads, shape.rows, shape.V, dtype=shape.operand, device=device)
    enter, leave, mass = (torch.empty(blocks, heads, shape.D, device=device) for _ in range(3))
    flag = torch.zeros(blocks, heads, dtype=torch.int32, device=device)
    return Blocks(kv, enter, leave, mass, flag, *empty_angles(shape, device))


def block_states(
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    shape: Shape,
    table: Tables,
    initial: tuple[Tensor, ...] | None,
    final: tuple[Tensor, ...] | None,
) -> Blocks:
    """Units and states. `initial` and `final`: max, sum and kv, float32; `final` is written where tokens are."""
    blocks, heads, device, kernels = table.blocks.shape[0], shape.heads, key.device, forward_kernels
    found = empty_blocks(shape, blocks, device)
    kv, enter, leave, mass = found[:4]
    if not blocks or not heads:
        return found
    spans, sequences = table.spans.shape[0], table.lengths.shape[0]
    if theta is not None:
        launch(kernels.fill_angles, (parts(BLOCK + 1, 2), heads))(
            theta, *found.angles, D=shape.D, DP=triton.next_power_of_2(shape.D), BT=BLOCK, ROWS=2, num_warps=4
        )
    launch(kernels.block_peaks, (blocks, heads))(
        key, table.blocks, enter, leave, mass, *strides(key), heads,
        D=shape.D, DP=triton.next_power_of_2(shape.D), BT=BLOCK, num_warps=2,
    )  # fmt: skip
    max0, sum0, kv0 = initial or (None,) * 3
    top, total, last = final or (None,) * 3
    launch(kernels.scan_units, (sequences, heads, parts(shape.D, LANES)))(
        table.block_ranges, enter, leave, mass, found.flag, max0, sum0, top, total, heads,
        D=shape.D, DP=LANES, INITIAL=initial is not None, FINAL=final is not None, **shape.rows_at_once(table),
    )  # fmt: skip

    def run(before: Tensor | None, after: Tensor | None, **which: int) -> None:
        launch(kernels.chain_states, (spans, heads, shape.chains))(
            key, value, table.spans, *found.angles, kv, enter, leave, max0, top, before, after, *strides(key, value), heads,
            **which, **shape.of("chain_states"),
        )  # fmt: skip

    to = 0 if final is None else 2
    if not table.chained:
        run(kv0, last, FROM=0 if initial is None else 2, BLOCKS=1, TO=to)
        return found
    held = torch.empty(spans, heads, shape.rows, shape.V, device=device)
    once = final is None  # else the last chains have more to do
    run(None, held, FROM=0, BLOCKS=int(once), TO=1)
    arguments = shape.of_states()
    launch(kernels.scan_spans, (sequences, heads, parts(shape.D, arguments["BD"])))(
        table.span_ranges, table.spans, enter, leave, held, span_moves(theta, table), max0, kv0, heads,
        BT=BLOCK, INITIAL=initial is not None, **arguments,
    )  # fmt: skip
    if not once:
        run(held, last, FROM=1, BLOCKS=1, TO=to)
        return found
    slices = parts(shape.D, arguments["BD"])
    cuts = max(1, min(table.span, ADDERS // (spans * heads * slices)))
    launch(kernels.add_spans, (spans, heads, slices * cuts))(
        kv, held, table.spans, enter, leave, theta, found.turn, max0, cuts, heads,
        BT=BLOCK, INITIAL=initial is not None, **arguments,
    )  # fmt: skip
    return found


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    initial: tuple[Tensor, ...] | None,
    bounds: tuple[int, ...] | None,
    silu: bool,
    return_state: bool,
) -> tuple[Tensor, tuple[Tensor, ...] | None, Blocks]:
    """Output [B, N, H, Dv], contiguous; if asked for, the state's max, sum and kv; and what the backward pass needs."""
    shape = shape_of(query, value, theta, silu)
    table = tables_of(query, shape, bounds)
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    final = None
    if return_state and initial is not None:
        final = tuple(x.clone() for x in initial)
    elif return_state:
        final = empty_states(shape, table.lengths.shape[0], query.device)
    found = block_states(key, value, theta, shape, table, initial, final)
    if table.blocks.shape[0] and shape.heads:
        for grid, count in shape.grids(table):
            launch(forward_kernels.outputs, grid)(
                query, key, value, output, table.blocks, triangle(shape.operand, query.device), found.cos, found.sin,
                found.kv, found.enter, found.mass, found.flag, table.blocks.shape[0] * shape.heads,
                *strides(query, key, value, output), shape.heads, SILU=silu, COUNT=count, **shape.of("outputs"),
            )  # fmt: skip
    return output, final, found


def empty_states(shape: Shape, sequences: int, device: torch.device) -> tuple[Tensor, ...]:
    """States after no token: what sequences without tokens end with."""
    vectors = (sequences, shape.heads, shape.D)
    return (
        torch.full(vectors, float("-inf"), device=device),
        torch.zeros(vectors, device=device),
        torch.zeros(*vectors[:2], shape.rows, shape.V, device=device),
    )


class StateGrads(NamedTuple):
    """Gradients of the final state, and the state itself."""

    max: Tensor
    kv: Tensor
    grad_sum: Tensor
    grad_kv: Tensor


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    initial: tuple[Tensor, ...] | None,
    bounds: tuple[int, ...] | None,
    silu: bool,
    found: Blocks,
    final: StateGrads | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, theta, and of the initial state's sum and kv."""
    shape = shape_of(query, value, theta, silu)
    table = tables_of(query, shape, bounds)
    query, key, value, grad = rows_of(query), rows_of(key), rows_of(value), rows_of(grad)
    heads, device, kernels = shape.heads, query.device, backward_kernels
    blocks, spans, sequences = table.blocks.shape[0], table.spans.shape[0], table.lengths.shape[0]
    plain = {"memory_format": torch.contiguous_format}
    grads = [torch.empty_like(x, **plain) for x in (query, key)]
    first = torch.zeros(sequences, heads, shape.rows, shape.V, device=device) if initial is not None else None
    pushed = torch.zeros(sequences, heads, shape.D, device=device) if initial is not None else None
    grad_theta = None if theta is None else torch.zeros_like(theta)
    if not blocks or not heads:
        if final is not None and first is not None:
            first, pushed = final.grad_kv.clone(), -final.grad_sum
        return (*grads, torch.empty_like(value, **plain), grad_theta, None if pushed is None else -pushed, first)
    asked = torch.empty_like(found.kv)
    own, pressure = torch.empty_like(found.mass), torch.empty_like(found.mass)
    torque = moved = None
    if theta is not None:
        chained = spans * (shape.chains // shape.slices)
        torque = torch.empty(2 * blocks + chained, heads, shape.D, device=device)  # of queries, keys and states
        moved = torque[2 * blocks :]
    last_kv, last_pressure = (None, None) if final is None else _asked_at_the_end(final, found, table)
    x = torch.empty(query.shape, dtype=shape.operand, device=device)
    later = torch.empty_like(x) if query.dtype == torch.float16 else grads[1]  # float16 has not the range
    for grid, count in shape.grids(table):
        launch(kernels.query_grads, grid)(
            query, key, value, grad, grads[0], x, later, table.blocks, triangle(shape.operand, device), found.cos,
            found.sin, found.kv, found.enter, found.mass, found.flag, own, torque,
            blocks * heads, *strides(query, key, value, grad, x), heads, SILU=silu, COUNT=count,
            **shape.of("query_grads"),
        )  # fmt: skip

    def run(before: Tensor | None, after: Tensor | None, **which: int) -> None:
        launch(kernels.chain_grads, (spans, heads, shape.chains))(
            x, grad, table.spans, *found.angles, found.kv, asked, found.enter, found.leave, moved, before, after,
            *strides(x, grad), heads, **which, **shape.of("chain_grads"),
        )  # fmt: skip

    to = 0 if first is None else 2
    if not table.chained:
        run(last_kv, first, FROM=0 if last_kv is None else 2, BLOCKS=1, TO=to)
    else:
        held = torch.empty(spans, heads, shape.rows, shape.V, device=device)
        run(None, held, FROM=0, BLOCKS=0, TO=1)
        arguments = shape.of_states()
        launch(kernels.scan_span_grads, (sequences, heads, parts(shape.D, arguments["BD"])))(
            table.span_ranges, table.spans, held, found.enter, found.leave, span_moves(theta, table), last_kv, heads,
            BT=BLOCK, FINAL=last_kv is not None, **arguments,
        )  # fmt: skip
        run(held, first, FROM=1, BLOCKS=1, TO=to)
        del held
    launch(kernels.scan_pressure, (sequences, heads, parts(shape.D, LANES)))(
        table.block_ranges, found.enter, found.leave, own, pressure, last_pressure, pushed, heads,
        D=shape.D, DP=LANES, FINAL=final is not None, INITIAL=pushed is not None, **shape.rows_at_once(table),
    )  # fmt: skip
    del own
    grads.append(torch.empty_like(value, **plain))  # no sooner: spans held states meanwhile
    for grid, count in shape.grids(table):
        launch(kernels.key_grads, grid)(
            query, key, value, grad, grads[1], x, later, table.blocks, found.cos, found.sin, asked, found.enter,
            found.leave, found.mass, found.flag, pressure, None if torque is None else torque[blocks:], blocks * heads,
            *strides(query, key, value, grad, x), heads, SILU=silu, COUNT=count, **shape.of("key_grads"),
        )  # fmt: skip
        launch(kernels.value_grads, grid)(
            query, key, grad, grads[2], x, table.blocks, found.cos, found.sin, asked, found.enter, found.leave,
            found.mass, found.flag, blocks * heads, *strides(query, key, grad, x, grads[2]), heads, SILU=silu,
            COUNT=count, **shape.of("value_grads"),
        )  # fmt: skip
    if torque is not None:
        columns = heads * shape.D
        grad_theta = torch.empty(heads, shape.D, device=device)
        launch(kernels.sum_rows, (parts(columns, LANES),))(
            torque, grad_theta, torque.shape[0], columns, ROWS=128, COLUMNS=LANES, num_warps=8
        )
        if final is not None:
            grad_theta = grad_theta + _last_move(final, table)
    if first is not None and pushed is not None and initial is not None:
        first, pushed = _asked_at_the_start(first, pushed, initial[0], found, table, final)
    return (*grads, grad_theta, None if pushed is None else -pushed, first)


def _rows(scale: Tensor, kv: Tensor) -> Tensor:
    """A factor of each feature [sequences, H, D] for kv's rows, both halves where they are doubled."""
    return scale.repeat(1, 1, kv.shape[2] // scale.shape[2])[..., None]


def _asked_at_the_end(final: StateGrads, found: Blocks, table: Tables) -> tuple[Tensor, Tensor]:
    """What the last state's gradients ask of the last block: kv's and the pressure, in units of exp(-leave)."""
    last = table.block_ranges[:, 0] + (table.block_ranges[:, 1] - 1).clamp_min(0)
    scale = torch.exp(found.leave[last.clamp_max(found.leave.shape[0] - 1)] - final.max)  # no tokens: not used
    return final.grad_kv * _rows(scale, final.grad_kv), -final.grad_sum * scale


def _asked_at_the_start(
    grad_kv: Tensor, pressure: Tensor, top: Tensor, found: Blocks, table: Tables, final: StateGrads | None
) -> tuple[Tensor, Tensor]:
    """From what the first blocks ask, in units of exp(-enter), to what is asked of the initial states, in units of
    exp(-top). A sequence without tokens hands its state on."""
    enter = found.enter[table.block_ranges[:, 0].clamp_max(found.enter.shape[0] - 1)]
    scale = torch.where(top == float("-inf"), 0.0, torch.exp(top - enter))
    some = table.lengths[:, None, None] > 0
    other_kv, other = (0.0, 0.0) if final is None else (final.grad_kv, -final.grad_sum)
    return torch.where(some[..., None], grad_kv * _rows(scale, grad_kv), other_kv), torch.where(
        some, pressure * scale, other
    )


def _last_move(final: StateGrads, table: Tables) -> Tensor:
    """theta's gradient of the last states' own move: their origin, the token after, counted from the last window."""
    (cos, sin), (grad_cos, grad_sin) = final.kv.float().chunk(2, 2), final.grad_kv.chunk(2, 2)
    start = (table.block_ranges[:, 1] - 1).clamp_min(0) // WINDOW * (WINDOW * BLOCK)
    tokens = torch.where(table.lengths > 0, table.lengths - start, 0)
    return (tokens[:, None, None] * (sin * grad_cos - cos * grad_sin).sum(3)).sum(0)


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@torch.compiler.assume_constant_result
def _card(device: torch.device) -> tuple[int, str]:
    return torch.cuda.get_device_capability(device)[0], torch.cuda.get_device_name(device)


def unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    theta: Tensor | None,
    causal: bool,
    options: dict[str, Any],
    initial_state: ScanState | None,
    return_state: bool,
) -> str | None:
    """What of these arguments the kernels do not do, or None. `options`: arguments that must be None."""
    if not causal:
        return "causal=False"
    for name, option in options.items():
        if option is not None:
            return name
    if not query.dtype == key.dtype == value.dtype:
        return f"different dtypes ({query.dtype}, {key.dtype}, {value.dtype})"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}"
    if query.device.type == "cpu":
        if not _interpreted():
            return "tensors on a CPU (except under TRITON_INTERPRET=1)"
    elif query.device.type != "cuda" or torch.version.hip is not None:
        return f"tensors on {query.device}"
    elif _card(query.device)[0] < 8:
        return f"the card {_card(query.device)[1]}, older than sm_80"
    if initial_state is not None and initial_state.kv.dtype == torch.float64:
        return "a float64 initial_state"
    return None
