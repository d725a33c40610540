"""Backend "triton": the causal additive scan on a GPU (or under TRITON_INTERPRET=1 on a CPU, for tests).

Forward: chains of blocks leave the state that every block finds (`chain_states`), then all blocks give their outputs at
once. Backward (`triton_scan_grads`): queries, all blocks at once; chains from the end with gradients; then keys, then
values, all blocks at once. Where sequences are long and heads few a sequence is cut into spans, whose chains do not wait
for one another: what each adds, backward what it asks, is summed before, by pieces (`triton_span_sums`). Chains and sums
are CUDA kernels where those fit (`cuda_chains`), which find the units of blocks on their way, and on sm_90 so is what all
blocks do at once (`cuda_blocks`). Nothing waits for the device;
a new cut into blocks is sent to it once. For the backward pass the inputs and the blocks' states are kept: one
state for every BLOCK tokens, in the operands' dtype. Ranks that share a sequence: `triton_scan_ranks`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import cuda_blocks, cuda_chains
from . import triton_forward as forward_kernels
from . import triton_span_sums as span_kernels
from . import triton_units as unit_kernels
from .compiling import constant_result
from .state import ScanState
from .triton_launch import launch, only_compiled, staged
from .triton_parts import BLOCK
from .triton_shape import STRETCHES, UNITS, Shape, parts, shape_of
from .triton_tables import Tables, tables

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE, BUSY = (
    32 * BLOCK,
    64,
)  # tokens of a sequence that is not cut if there are so many chains (benchmarks/LOG.md, version 44)


def tables_of(
    query: Tensor, shape: Shape, bounds: tuple[int, ...] | None, forward: bool = False, compiled_for: bool | None = None,
    shared: bool = False,
) -> Tables:  # fmt: skip
    """How the tokens of a call are cut. Where CUDA kernels do it, short sequences are not, if they keep half a card busy.

    Args:
        forward: for a forward pass that no rank shares, which is another cut where CUDA kernels do it: spans into pieces, and
            with LRPE into as many chains as the card has multiprocessors, not twice as many.
        compiled_for: where nothing is launched, whether as if sequences had several spans. They count as one, of one
            piece, so that this takes no memory which the call itself would not.
        shared: whether ranks share the call: they sum every span in any case.
    """
    chains, sums = shape.heads * shape.chains, shape.heads * shape.sums
    if shape.cuda and not forward:
        sums = 0
    elif shape.alone:
        chains *= 2
    batch, tokens = query.shape[:2]
    lengths = (tokens,) * batch if bounds is None else tuple(end - begin for begin, end in itertools.pairwise(bounds))
    longest = max(lengths, default=0)
    busy = sum(lengths) // max(1, longest) * shape.heads * shape.chains >= BUSY  # as many of the longest
    whole = shape.cuda and not shared and longest <= WHOLE and busy
    table = tables(batch, tokens, bounds, BLOCK, chains, sums, query.device, shape.cuda, whole)
    if compiled_for is None:
        return table
    return table._replace(chained=compiled_for, pieces=table.pieces[:1], lengths=table.lengths[:1])


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
    """cos and sin [2 + 2 sequences, H, D] of moves by a full piece of a span and by each sequence's last one."""
    if theta is None:
        return None
    sequences, (heads, width) = table.lengths.shape[0], theta.shape
    moves = torch.empty(2 + 2 * sequences, heads, width, device=theta.device)
    launch(forward_kernels.fill_moves, (1 + sequences, heads))(
        theta, table.lengths, moves, table.piece * BLOCK, sequences, heads,
        D=width, DP=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return moves


class Blocks(NamedTuple):
    """What every block finds, see `triton_forward`; kept for the backward pass."""

    kv: Any  # a tensor, or None before states are
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


def empty_units(shape: Shape, blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """enter, leave and mass; flag, 0."""
    enter, leave, mass = (torch.empty(blocks, shape.heads, shape.D, device=device) for _ in range(3))
    return enter, leave, mass, torch.zeros(blocks, shape.heads, dtype=torch.int32, device=device)


def empty_blocks(shape: Shape, blocks: int, device: torch.device, angles: Angles | None = None) -> Blocks:
    """angles: those that are already there."""
    kv = torch.empty(blocks, shape.heads, shape.rows, shape.V, dtype=shape.operand, device=device)
    return Blocks(kv, *empty_units(shape, blocks, device), *(angles or empty_angles(shape, device)))


def empty_spans(shape: Shape, table: Tables, device: torch.device) -> Tensor:
    """A state for every piece of a span, float32."""
    return torch.empty(table.pieces.shape[0], shape.heads, shape.rows, shape.V, device=device)


def fill_units(
    key: Tensor,
    shape: Shape,
    table: Tables,
    found: Blocks,
    initial: tuple[Tensor | None, ...],
    final: tuple[Tensor | None, ...],
) -> None:
    """enter, leave, mass and flag of all blocks, from the initial maxima and sums and to the final ones, each if given."""
    kernels, (enter, leave, mass, flag) = unit_kernels, found[1:5]
    launch(kernels.block_peaks, (table.blocks.shape[0], shape.heads))(
        key, table.blocks, enter, leave, mass, *strides(key), shape.heads,
        D=shape.D, DP=triton.next_power_of_2(shape.D), BT=BLOCK, num_warps=2,
    )  # fmt: skip
    sequences, slices = table.lengths.shape[0], parts(shape.D, UNITS["DP"])
    stretch = shape.stretch(table, slices)
    stretches = parts(table.longest, stretch)
    tops = totals = None
    if stretches > 1 or only_compiled():
        rows = sequences if stretches > 1 else 1
        tops, totals = (torch.empty(rows, shape.heads, shape.D, STRETCHES, device=key.device) for _ in range(2))
        launch(kernels.stretch_totals, (sequences, shape.heads, slices * (stretches - 1)))(
            table.block_ranges, leave, mass, tops, totals, shape.heads, stretch, D=shape.D, SLICES=slices, MOST=STRETCHES,
            **UNITS,
        )  # fmt: skip
    for of_earlier in ((tops, totals), (None, None)) if only_compiled() else ((tops, totals),):
        launch(kernels.scan_units, (sequences, shape.heads, slices * stretches))(
            table.block_ranges, enter, leave, mass, flag, *initial, *final, *of_earlier, shape.heads, stretch, D=shape.D,
            SLICES=slices, MOST=STRETCHES, INITIAL=initial[0] is not None, FINAL=final[0] is not None, **UNITS,
        )  # fmt: skip


def fill_angles(theta: Tensor | None, shape: Shape, angles: Angles) -> None:
    if theta is not None:
        launch(forward_kernels.fill_angles, (parts(BLOCK + 1, 2), shape.heads))(
            theta, *angles, D=shape.D, DP=triton.next_power_of_2(shape.D), BT=BLOCK, ROWS=2, num_warps=4
        )


def move_spans(
    held: Tensor,
    theta: Tensor | None,
    shape: Shape,
    table: Tables,
    found: Blocks,
    initial: tuple[Tensor | None, Tensor | None],
    units: Tensor | None = None,
    total: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """`triton_forward.scan_spans`; initial and total: maxima and kv."""
    arguments = shape.of_states()
    launch(forward_kernels.scan_spans, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["BD"])))(
        table.piece_ranges, table.pieces, found.enter, found.leave, held, span_moves(theta, table), *initial, units, *total,
        shape.heads, BT=BLOCK, INITIAL=initial[0] is not None, TOTAL=total[0] is not None, **arguments,
    )  # fmt: skip


def sum_spans(x: Tensor, y: Tensor, shape: Shape, table: Tables, found: Blocks, sums: Tensor, **which: bool) -> None:
    """`triton_span_sums.span_sums`, into `sums`."""
    launch(span_kernels.span_sums, (table.pieces.shape[0], shape.heads, shape.sums))(
        x, y, table.pieces, *found.angles, found.enter, found.leave, sums, *strides(x, y), shape.heads, **which,
        **shape.of("span_sums"),
    )  # fmt: skip


def chain_states(
    key: Tensor,
    value: Tensor,
    shape: Shape,
    table: Tables,
    found: Blocks,
    initial: cuda_chains.Pair,
    final: cuda_chains.Pair,
    before: Tensor | None,
    after: Tensor | None,
    FROM: int,
    units: bool = False,
) -> None:
    """`triton_forward.chain_states`, between the initial and the final maxima and sums, as far as they are given.
    units: see `cuda_chains.chain`."""
    if shape.cuda:
        states = before, after, None, FROM
        cuda_chains.chain(key, value, table.spans, found, found.kv, initial, final, *states, units=units)
        return
    how = shape.of("chain_states")
    if shape.double:
        how = {**how, "STAGES": staged(how["STAGES"], key.device)}
    launch(forward_kernels.chain_states, (table.spans.shape[0], shape.heads, shape.chains))(
        key, value, table.spans, *found.angles, found.kv, found.enter, found.leave, initial[0], final[0], before, after,
        *strides(key, value), shape.heads, FROM=FROM, TO=after is not None, **how,
    )  # fmt: skip


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
    blocks, heads = table.blocks.shape[0], shape.heads
    found = empty_blocks(shape, blocks, key.device)
    if not blocks or not heads:
        return found
    fill_angles(theta, shape, found.angles)
    max0, sum0, kv0 = initial or (None,) * 3
    top, total, last = final or (None,) * 3
    begin, end, before, source = (max0, sum0), (top, total), kv0, 0 if initial is None else 2
    if not shape.cuda:  # whose chains find units on their way
        fill_units(key, shape, table, found, begin, end)
    if table.chained:
        before = held = empty_spans(shape, table, key.device)
        source = 1
        if shape.cuda:
            begin = joined_spans(key, value, theta, shape, table, found, held, initial)
        else:
            sum_spans(key, value, shape, table, found, held, KEYS=True, ALL=False)
            move_spans(held, theta, shape, table, found, (max0, kv0))
    chain_states(key, value, shape, table, found, begin, end, before, last, source, shape.cuda)
    return found


def joined_spans(
    key: Tensor, value: Tensor, theta: Tensor | None, shape: Shape, table: Tables, found: Blocks, held: Tensor,
    initial: tuple[Tensor, ...] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Into `held` the kv that each piece finds, in units of exp(maximum); the maxima and sums, [pieces, H, D]."""
    tops, totals, *begin = (torch.empty(*held.shape[:2], shape.D, device=held.device) for _ in range(4))
    states = (None, None), (tops, totals), None, held, None, 0
    cuda_chains.chain(key, value, table.pieces, found, None, *states, units=True, sums=True)
    arguments = shape.of_states()
    launch(span_kernels.join_spans, (table.lengths.shape[0], shape.heads, parts(shape.D, arguments["BD"])))(
        table.piece_ranges, tops, totals, *begin, held, span_moves(theta, table), *(initial or (None,) * 3), shape.heads,
        INITIAL=initial is not None, **arguments,
    )  # fmt: skip
    return begin[0], begin[1]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    initial: tuple[Tensor, ...] | None,
    bounds: tuple[int, ...] | None,
    silu: bool,
    return_state: bool,
    compiled_for: bool | None = None,
) -> tuple[Tensor, tuple[Tensor, ...] | None, Blocks]:
    """Output [B, N, H, Dv], contiguous; if asked for, the state's max, sum and kv; and what the backward pass needs.
    compiled_for: see `tables_of`."""
    shape = shape_of(query, value, theta, silu)
    table = tables_of(query, shape, bounds, forward=True, compiled_for=compiled_for)
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    final = None
    if return_state and initial is not None:
        final = tuple(x.clone() for x in initial)
    elif return_state:
        final = empty_states(shape, table.lengths.shape[0], query.device)
    found = block_states(key, value, theta, shape, table, initial, final)
    if table.blocks.shape[0] and shape.heads:
        fill_outputs(query, key, value, output, shape, table, found, silu)
    return output, final, found


def fill_outputs(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, shape: Shape, table: Tables, found: Blocks, silu: bool
) -> None:
    """Every block against itself and the state that it finds."""
    for grid, count in shape.grids(table):
        if shape.cuda and cuda_chains.grouped(query.device) and count == 0:
            cuda_blocks.outputs(query, key, value, output, table.blocks, found, silu)
            continue
        launch(forward_kernels.outputs, grid)(
            query, key, value, output, table.blocks, triangle(shape.operand, query.device), found.cos, found.sin,
            found.kv, found.enter, found.mass, found.flag, table.blocks.shape[0] * shape.heads,
            *strides(query, key, value, output), shape.heads, SILU=silu, COUNT=count, **shape.of("outputs"),
        )  # fmt: skip


def empty_states(shape: Shape, sequences: int, device: torch.device) -> tuple[Tensor, ...]:
    """States after no token: what sequences without tokens end with."""
    vectors = (sequences, shape.heads, shape.D)
    return (
        torch.full(vectors, float("-inf"), device=device),
        torch.zeros(vectors, device=device),
        torch.zeros(*vectors[:2], shape.rows, shape.V, device=device),
    )


@constant_result
def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@constant_result
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
