"""Backend "triton": the causal additive scan on a GPU (or under TRITON_INTERPRET=1 on a CPU, for tests).

Three passes forward (what each chunk adds, the scan over chunks, outputs) and three back, see `triton_forward` and
`triton_backward`. Nothing of the size of [B, N, H, D] is held but the tensors themselves and, for every CHUNK tokens,
one state in the operands' dtype.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import triton_backward as backward_kernels
from . import triton_forward as forward_kernels
from .state import ScanState
from .triton_parts import BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = 4  # NB, blocks in a chunk


class ChunkTable(NamedTuple):
    """int32 tables on the device. Chunks of a sequence are consecutive, and all but its last are full."""

    chunks: Tensor  # [chunks, 4]: batch row, first token, tokens, bit 0 first of its sequence + bit 1 last
    sequences: Tensor  # [sequences, 3]: first block, chunks, blocks that hold tokens
    last: Tensor  # [sequences], tokens in the last chunk
    lengths: Tensor  # [sequences] int64


@functools.lru_cache(maxsize=16)
def chunk_table(
    batch: int, tokens: int, bounds: tuple[int, ...] | None, chunk: int, device: torch.device
) -> ChunkTable:
    """Every sequence, a batch row or a segment, starts at a chunk boundary. Made on the host, one copy to the device."""
    if bounds is None:
        begin = torch.zeros(batch, dtype=torch.int64)
        lengths = torch.full((batch,), tokens, dtype=torch.int64)
        rows = torch.arange(batch)
    else:
        edges = torch.tensor(bounds, dtype=torch.int64)
        begin, lengths = edges[:-1], edges.diff()
        rows = torch.zeros_like(begin)
    counts = (lengths + chunk - 1) // chunk
    starts = counts.cumsum(0) - counts
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(owner)) - starts[owner]
    size = (lengths[owner] - place * chunk).clamp_max(chunk)
    ends = (place == 0).long() + 2 * (place == counts[owner] - 1).long()
    chunks = torch.stack([rows[owner], begin[owner] + place * chunk, size, ends], 1)
    last = torch.where(lengths > 0, (lengths - 1) % chunk + 1, 0)
    sequences = torch.stack([starts * (chunk // BLOCK), counts, (lengths + BLOCK - 1) // BLOCK], 1)
    return ChunkTable(chunks.int().to(device), sequences.int().to(device), last.int().to(device), lengths.to(device))


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
        if not triton.knobs.runtime.interpret:
            return "tensors on a CPU (except under TRITON_INTERPRET=1)"
    elif query.device.type != "cuda" or torch.version.hip is not None:
        return f"tensors on {query.device}"
    elif torch.cuda.get_device_capability(query.device)[0] < 8:
        return f"the card {torch.cuda.get_device_name(query.device)}, older than sm_80"
    if initial_state is not None and initial_state.kv.dtype == torch.float64:
        return "a float64 initial_state"
    if initial_state is not None or return_state:
        # The one gap of the backward pass: gradients to and from states go through the "torch" backend.
        inputs = [query, key, value, theta]
        if initial_state is not None:
            inputs += [initial_state.sum, initial_state.kv]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            return "gradients through states (initial_state or return_state)"
    return None


def causal_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    activation: bool,
    theta: Tensor | None,
    cu_seqlens: list[int] | None,
    initial: ScanState | None,
    return_state: bool,
) -> tuple[Tensor, ScanState | None]:
    """See `scan.additive_scan`; inputs keep their dtype."""
    bounds = None if cu_seqlens is None else tuple(cu_seqlens)
    table = chunk_table(query.shape[0], query.shape[1], bounds, BLOCKS * BLOCK, query.device)
    if theta is not None:
        theta = theta.float()
    guard = torch.cuda.device(query.device) if query.device.type == "cuda" else contextlib.nullcontext()
    with guard:
        if initial is None and not return_state:
            return _CausalScan.apply(query, key, value, theta, table, activation), None
        output, _, state, _ = _forward(query, key, value, theta, table, activation, initial, return_state)
    return output, state


class _Saved(NamedTuple):
    """What the forward pass leaves for the backward pass beside its inputs."""

    kv: Tensor
    peak: Tensor
    mass: Tensor
    before: Tensor
    flag: Tensor  # int32 [blocks, H], what needs the exact form
    cos: Tensor | None
    sin: Tensor | None


class _CausalScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, theta: Tensor | None, table: ChunkTable, activation: bool
    ) -> Tensor:
        output, saved, _, ctx.exact_needed = _forward(query, key, value, theta, table, activation, None, False)
        ctx.table, ctx.activation = table, activation
        ctx.save_for_backward(query, key, value, theta, *saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, theta, *saved = ctx.saved_tensors
        guard = torch.cuda.device(query.device) if query.device.type == "cuda" else contextlib.nullcontext()
        with guard:
            results = _backward(
                grads[0], query, key, value, theta, _Saved(*saved), ctx.table, ctx.activation,
                ctx.exact_needed,
            )  # fmt: skip
        return (*results, None, None)


class _Shape(NamedTuple):
    """Compile-time arguments that all kernels share, from one call's tensors."""

    heads: int
    D: int
    V: int
    VP: int
    double: bool
    wide: bool  # float32 operands

    @property
    def rows(self) -> int:
        return (2 if self.double else 1) * self.D

    @property
    def widths(self) -> dict[str, int]:
        return {"D": self.D, "V": self.V, "VP": self.VP}

    @property
    def padded(self) -> int:
        return max(16, triton.next_power_of_2(self.D))

    @property
    def products(self) -> dict[str, Any]:
        """Operands of the matrix products; float16 tensors want bfloat16's range."""
        operand, precision = (tl.float32, "tf32x3") if self.wide else (tl.bfloat16, "ieee")
        return {"BT": BLOCK, "NB": BLOCKS, "LRPE": self.double, "OP": operand, "PREC": precision}

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.bfloat16


def _shape(query: Tensor, value: Tensor, theta: Tensor | None) -> _Shape:
    heads, width = query.shape[2:]
    padded = max(64, triton.next_power_of_2(value.shape[3]))
    wide = query.dtype == torch.float32
    return _Shape(heads, width, value.shape[3], padded, theta is not None, wide)


def _launch(name: str, shape: _Shape, exact: bool = False) -> dict[str, int]:
    """Tiles, warps and pipeline stages, by rule: nothing is tuned at run time."""
    if name in ("scan_states", "scan_state_grads"):
        return {"num_warps": 4, "num_stages": 1}
    if name in ("scan_mass", "scan_pressure"):
        return {"num_warps": 1, "num_stages": 1}
    # Tiles of 32 raise illegal memory accesses with Triton 3.6 on an H100: narrower heads are padded to 64.
    if exact:  # rarely run, and half as long to compile
        return {"DH": 64, "num_warps": 8, "num_stages": 1}
    pipelined = not shape.wide and not (shape.double and name in ("outputs", "value_grads"))
    return {"DH": 64, "num_warps": 4, "num_stages": 2 if pipelined else 1}


def _exact_needed(flag: Tensor) -> bool:
    """Whether any block grows too fast for the fast form. The one place that waits for the device, once a call and
    forward only: launched on the chance, the exact kernels would cost more, in time and in the first compilation. While
    a CUDA graph is captured nothing may wait, so there they are launched, and skip every block that has no flag."""
    if flag.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return bool(flag.any())


def _rows(x: Tensor) -> Tensor:
    """The tensor with features side by side and rows near enough for 32-bit offsets within a chunk."""
    return x if x.stride(3) == 1 and x.stride(1) * BLOCKS * BLOCK < 2**31 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _move(theta: Tensor, tokens: Tensor) -> Tensor:
    """cos and sin of a move by `tokens` [n], float32 [2, n, H, D] from float64."""
    angle = tokens.double()[:, None, None] * theta.double()
    return torch.stack([angle.cos(), angle.sin()]).float()


def _moves(theta: Tensor | None, last: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin tables of `scan_states`: a move by a chunk, then, for a final state, by each last chunk."""
    if theta is None:
        return None, None
    chunk = torch.full((1,), BLOCKS * BLOCK, dtype=torch.int32, device=theta.device)
    cos, sin = _move(theta, chunk if last is None else torch.cat([chunk, last])).unbind(0)
    return cos, sin


def _feature_block(shape: _Shape) -> int:
    """State rows of one program in the scans over chunks."""
    return min(16, shape.padded)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    table: ChunkTable,
    activation: bool,
    initial: ScanState | None,
    return_state: bool,
) -> tuple[Tensor, _Saved, ScanState | None, bool]:
    shape = _shape(query, value, theta)
    query, key, value = _rows(query), _rows(key), _rows(value)
    heads, device, kernels = shape.heads, query.device, forward_kernels
    chunks, sequences = table.chunks.shape[0], table.sequences.shape[0]
    output = torch.empty_like(value, memory_format=torch.contiguous_format)
    kv = torch.empty(chunks, heads, shape.rows, shape.V, dtype=shape.state_dtype, device=device)
    peak, mass, before = torch.empty(3, chunks * BLOCKS, heads, shape.D, device=device).unbind(0)
    flag = torch.zeros(chunks * BLOCKS, heads, dtype=torch.int32, device=device)
    cos = sin = None
    if theta is not None:
        theta = theta.contiguous()
        angles = torch.float32 if shape.wide else torch.float16
        cos, sin = torch.empty(2, heads, BLOCKS * BLOCK + 1, shape.D, dtype=angles, device=device).unbind(0)
    final = None
    if return_state:
        final = ScanState(
            torch.empty(sequences, heads, shape.D, device=device),
            torch.empty(sequences, heads, shape.D, device=device),
            torch.empty(sequences, heads, shape.rows, shape.V, device=device),
            table.lengths if initial is None else initial.length + table.lengths,
        )
    saved = _Saved(kv, peak, mass, before, flag, cos, sin)
    start = None if initial is None else [x.float().contiguous() for x in initial[:3]]
    move_cos, move_sin = _moves(theta, table.last if return_state else None)
    per_sequence = {"INITIAL": initial is not None, "FINAL": return_state}
    exact_needed = False
    if sequences and heads:
        if chunks:
            if theta is not None:
                grid = (triton.cdiv(BLOCKS * BLOCK + 1, 16), heads)
                kernels.fill_angles[grid](
                    theta, cos, sin, LENGTH=BLOCKS * BLOCK, D=shape.D, DP=shape.padded, ROWS=16, num_warps=4
                )
            launch = _launch("chunk_states", shape)
            kernels.chunk_states[(chunks, heads, triton.cdiv(shape.D, launch["DH"]))](
                key, value, table.chunks, cos, sin, kv, peak, mass, *_strides(key, value), heads,
                **shape.widths, KEEP_LAST=return_state, **shape.products, **launch,
            )  # fmt: skip
        kernels.scan_mass[(sequences, heads)](
            table.sequences, peak, mass, before, start and start[0], start and start[1], final and final.max,
            final and final.sum, heads, D=shape.D, DP=shape.padded, ROWS=16, **per_sequence,
            **_launch("scan_mass", shape),
        )  # fmt: skip
        size = _feature_block(shape)
        kernels.scan_states[(sequences, heads, triton.cdiv(shape.D, size))](
            table.sequences, table.last, kv, peak, before, move_cos, move_sin, start and start[2], final and final.kv,
            heads, D=shape.D, V=shape.V, BD=size, VP=shape.VP, NB=BLOCKS, LRPE=shape.double, **per_sequence,
            **_launch("scan_states", shape),
        )  # fmt: skip
        for exact in (False, True) if chunks else ():
            if exact:
                exact_needed = _exact_needed(flag)
                if not exact_needed:
                    break
            launch = _launch("outputs", shape, exact)
            launch["NH"] = triton.cdiv(shape.D, launch["DH"])
            kernels.outputs[(chunks * BLOCKS, heads)](
                query, key, value, output, table.chunks, cos, sin, kv, peak, mass, before, flag,
                *_strides(query, key, value, output), heads, **shape.widths, SILU=activation,
                INITIAL=initial is not None, EXACT=exact, **shape.products, **launch,
            )  # fmt: skip
    return output, saved, final, exact_needed


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    theta: Tensor | None,
    saved: _Saved,
    table: ChunkTable,
    activation: bool,
    exact_needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    shape = _shape(query, value, theta)
    query, key, value, grad = _rows(query), _rows(key), _rows(value), _rows(grad)
    heads, device, kernels = shape.heads, query.device, backward_kernels
    chunks, sequences = table.chunks.shape[0], table.sequences.shape[0]
    contiguous = {"memory_format": torch.contiguous_format}
    grad_query, grad_key = torch.empty_like(query, **contiguous), torch.empty_like(key, **contiguous)
    grad_value = torch.empty_like(value, **contiguous)
    if not chunks or not heads:
        return grad_query, grad_key, grad_value, None if theta is None else torch.zeros_like(theta)
    kv, peak, mass, before, flag, cos, sin = saved
    grad_kv = torch.empty_like(kv)
    pressure = torch.empty_like(peak)
    read = torch.empty(query.shape, dtype=shape.state_dtype, device=device)
    torque = moved = None
    if theta is not None:
        torque = torch.zeros(2, *peak.shape, device=device)  # blocks without tokens are never written
        moved = torch.empty(sequences, heads, shape.D, device=device)
    common = {**shape.widths, **shape.products, "SILU": activation}
    tail = (peak, mass, before, flag)
    for exact in (False, True) if exact_needed else (False,):
        launch = _launch("state_grads", shape, exact)
        features = triton.cdiv(shape.D, launch["DH"])
        kernels.state_grads[(chunks, heads, features)](
            query, key, grad, read, table.chunks, cos, sin, grad_kv, *tail, *_strides(query, key, grad, read), heads,
            EXACT=exact, **common, **launch,
        )  # fmt: skip
    size = _feature_block(shape)
    move_cos, move_sin = _moves(theta, None)
    kernels.scan_state_grads[(sequences, heads, triton.cdiv(shape.D, size))](
        table.sequences, kv, grad_kv, peak, before, move_cos, move_sin, moved, heads,
        D=shape.D, V=shape.V, BD=size, VP=shape.VP, BT=BLOCK, NB=BLOCKS, LRPE=shape.double,
        **_launch("scan_state_grads", shape),
    )  # fmt: skip
    for exact in (False, True) if exact_needed else (False,):
        launch = _launch("query_grads", shape, exact)
        features = triton.cdiv(shape.D, launch["DH"])
        kernels.query_grads[(chunks * BLOCKS, heads, features)](
            query, key, value, grad, grad_query, grad_key, table.chunks, cos, sin, kv, *tail, pressure,
            None if torque is None else torque[0], *_strides(query, key, value, grad, grad_query), heads,
            EXACT=exact, **common, **launch,
        )  # fmt: skip
    kernels.scan_pressure[(sequences, heads)](
        table.sequences, peak, before, pressure, heads, D=shape.D, DP=shape.padded, ROWS=16,
        **_launch("scan_pressure", shape),
    )  # fmt: skip
    for exact in (False, True) if exact_needed else (False,):
        launch = _launch("key_grads", shape, exact)
        features = triton.cdiv(shape.D, launch["DH"])
        kernels.key_grads[(chunks * BLOCKS, heads, features)](
            query, key, value, grad, read, grad_key, table.chunks, cos, sin, grad_kv, *tail, pressure,
            None if torque is None else torque[1], *_strides(query, key, value, grad, read, grad_key), heads,
            EXACT=exact, **common, **launch,
        )  # fmt: skip
    for exact in (False, True) if exact_needed else (False,):
        launch = _launch("value_grads", shape, exact)
        launch["NH"] = triton.cdiv(shape.D, launch["DH"])
        kernels.value_grads[(chunks * BLOCKS, heads)](
            query, key, grad, read, grad_value, table.chunks, cos, sin, grad_kv, *tail,
            *_strides(query, key, grad, read, grad_value), heads, EXACT=exact, **common,
            **launch,
        )  # fmt: skip
    grad_theta = None
    if theta is not None and torque is not None and moved is not None:
        grad_theta = torque.sum((0, 1)) + moved.sum(0)
    return grad_query, grad_key, grad_value, grad_theta
