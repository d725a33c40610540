"""How a bidirectional scan is laid over a card: pieces of sequences, tiles of features, places in fixed point, strides.

What follows from shapes and bounds alone; `triton_bidirectional_scan` runs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import constant_result
from .triton_launch import launch, staged

INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = 64  # tokens of a block; half as many where sums of two rotations take the registers
SLOTS = 264  # programs that an H100 runs at once, two on each of 132 multiprocessors
NARROW = 64
REST = 64  # the least tile beside the first
HELD = 13000  # float32 values of a state that one program can hold beside its tiles
SHARED = 232448  # bytes of shared memory that a block of threads may have on sm_90, for which kernels are laid out
VECTORS = 2048  # bytes of it, at most, for maxima, angles and places
RADIANS = tl.constexpr(6.283185307179586)  # of a turn
Optional: TypeAlias = Tensor | None


def sequence_lengths(key: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
    """int64, of boundaries that are checked."""
    if cu_seqlens is None:
        if mask is None:
            return torch.full((key.shape[0],), key.shape[1], dtype=torch.int64, device=key.device)
        return mask.sum(1)
    edges = cu_seqlens.to(key.device, torch.int64)
    if mask is not None:
        edges = torch.nn.functional.pad(mask[0].cumsum(0), (1, 0))[edges]
    return edges.diff()


def token_places(
    key: Tensor, theta: Tensor | None, coordinates: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """int32 [1 or B, N, axes], or None where places simply count up from the sequence's first token.

    Boundaries need not be checked: no place is looked up outside of the tensors, whatever they are.
    """
    if theta is None or (coordinates is None and mask is None):
        return None
    if coordinates is not None:
        grid = coordinates if coordinates.ndim == 2 else coordinates.unsqueeze(1)
        return grid.to(key.device, torch.int32).unsqueeze(0).contiguous()
    assert mask is not None
    earlier = mask.cumsum(1) - mask.long()  # masked tokens are not counted
    if cu_seqlens is not None:
        edges = cu_seqlens.to(key.device, torch.int64)
        token = torch.arange(key.shape[1], device=key.device)
        first = edges[torch.searchsorted(edges, token, right=True) - 1].clamp(0, max(key.shape[1] - 1, 0))
        earlier = earlier - earlier[:, first]
    return earlier.int().unsqueeze(2).contiguous()


class Plan(NamedTuple):
    """How sequences are cut into pieces. Batch rows by arithmetic, segments by a table on the device."""

    sequences: int
    pieces: int
    splits: int  # pieces of a row
    length: int  # tokens of a piece
    fused: bool  # a piece is a sequence, and its state fits in registers
    table: Tensor | None  # int32 [pieces, 4], see `find_piece`
    ranges: Tensor | None  # int32 [sequences + 1], first piece of each sequence


def plan_of(shape: Shape, bounds: Sequence[int] | None, device: torch.device, fuse: bool) -> Plan:
    programs = 2 * SLOTS // max(shape.heads, 1)  # pieces that fill the card twice over
    if bounds is not None:
        return _segment_plan(tuple(bounds), shape.heads, programs, fuse, device)
    batch, tokens = shape.batch, shape.tokens
    if fuse and (batch * shape.heads >= SLOTS - 8 or tokens <= 2 * BLOCK):
        return Plan(batch, batch, 1, tokens, True, None, None)
    splits = max(1, min(programs // max(batch, 1), triton.cdiv(tokens, BLOCK)))
    length = BLOCK * bool(not tokens) or triton.cdiv(triton.cdiv(tokens, splits), BLOCK) * BLOCK
    splits = triton.cdiv(tokens, length)
    return Plan(batch, batch * splits, splits, length, False, None, None)


@functools.lru_cache(maxsize=16)
def _segment_plan(bounds: tuple[int, ...], heads: int, programs: int, fuse: bool, device: torch.device) -> Plan:
    """Made on the host, one copy to the device, remembered for the other layers of a model."""
    edges = torch.tensor(bounds, dtype=torch.int64)
    lengths = edges.diff()
    sequences, longest = len(lengths), int(lengths.max())
    even = sequences * heads >= SLOTS - 8 and longest * sequences <= 2 * bounds[-1]
    fused = fuse and (even or longest <= 2 * BLOCK)
    length = max(1, longest) if fused else triton.cdiv(triton.cdiv(bounds[-1], max(programs, 1)), BLOCK) * BLOCK
    counts = torch.ones_like(lengths) if fused else (lengths + length - 1) // length
    ranges = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(sequences), counts)
    offset = (torch.arange(len(owner)) - ranges[owner]) * length
    size = (lengths[owner] - offset).clamp_max(length)
    table = (
        torch.stack([edges[owner], edges[owner] + offset, size, owner], 1)
        .int()
        .contiguous()
        .to(device, non_blocking=True)
    )
    return Plan(sequences, len(owner), 1, length, fused, table, ranges.int().to(device, non_blocking=True))


def prepare(tensors: Sequence[Tensor], bounds: Sequence[int] | None, split: bool = False) -> None:
    """The plan of segments, which a recording must find made. `tensors`: query (or key), key, value."""
    if bounds is not None:
        first, key, value = tensors
        shape = shape_of(first, key.shape[3], value.shape[3], None)
        for fits in {shape.fits, shape._replace(lrpe=True).fits}:
            plan_of(shape, bounds, first.device, fits and not split)


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    D: int
    V: int
    lrpe: bool
    wide: bool  # float32 operands

    @property
    def halves(self) -> int:
        return 2 if self.lrpe else 1

    @property
    def rows(self) -> int:
        return self.halves * self.D

    @property
    def fits(self) -> bool:
        return not self.wide and self.halves * sum(_tiles(self.D)) * sum(_tiles(self.V)) <= HELD

    @property
    def operand(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.bfloat16


def shape_of(x: Tensor, width: int, value_width: int, theta: Tensor | None) -> Shape:
    batch, tokens, heads = x.shape[:3]
    return Shape(batch, tokens, heads, width, value_width, theta is not None, x.dtype == torch.float32)


def _narrow(width: int) -> tuple[int, ...]:
    """The same in tiles of NARROW, for the loops that hold six of them at once."""
    return tuple(NARROW for _ in range(max(1, 64 // NARROW))) + (
        _tiles(width)[1:] if width <= 96 else (NARROW,) * (64 // NARROW)
    )


def _tiles(width: int) -> tuple[int, ...]:
    """Widths are cut into tiles of 64 or more. (72 as 64 + 16 would do two fifths less, but Triton 3.6 reads shared memory
    out of bounds in a product with a transposed tile of 16: compute-sanitizer, H100.)"""
    return (64,) if width <= 64 else (64, max(REST, triton.next_power_of_2(width - 64)))


@constant_result
@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have; under the interpreter as on sm_90."""
    if device.type != "cuda":
        return SHARED
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _at_once(shape: Shape, features: int, values: int, memory: int) -> tuple[int, bool]:
    """Tokens that `weight_grad_pieces` takes at once, and whether it loads dG for them each time, with so many bytes of shared
    memory. On all cards but sm_90, which has enough, bfloat16 dG lies there twice, as it is and transposed, beside the next
    tokens' keys and values and a tile of weights. (64 tokens without a pipeline would fit too, but spill registers.)"""
    if shape.wide:
        return BLOCK, True
    state = 2 * shape.halves * features * values  # bytes
    token = 2 * (features + values + NARROW)
    for tokens in (BLOCK, BLOCK // 2):
        if 2 * state + tokens * token + VECTORS <= memory:
            return tokens, False
    return BLOCK // 2, True


class Where(NamedTuple):
    """What all kernels are told of one call beside its tensors."""

    theta: Tensor | None  # int32 [H, D], in 2^-32 turns
    remainder: Tensor | None  # float32 [H, D], radians
    places: Tensor | None
    mask: Tensor | None
    plan: Plan
    shape: Shape

    @property
    def far(self) -> bool:
        """Whether places may reach beyond 2^20, where 2^-33 turns of theta are 10^-3 radians. Grids do not."""
        return self.shape.tokens > 2**20 or (self.places is not None and self.places.shape[2] == 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.theta, self.remainder, self.places, self.mask, self.plan.table

    @property
    def sizes(self) -> tuple[int, ...]:
        place_stride = 0 if self.places is None or self.places.shape[0] == 1 else self.places.stride(0)
        mask_stride = 0 if self.mask is None else self.mask.stride(0)
        return place_stride, mask_stride, self.shape.heads, self.shape.tokens, self.plan.splits, self.plan.length

    def constants(self, name: str, *tensors: Tensor) -> dict[str, Any]:
        """Tiles, warps and pipeline stages, by rule: nothing is tuned at run time."""
        shape = self.shape
        features, values = _tiles(shape.D), _tiles(shape.V)
        arguments: dict[str, Any] = {}
        if name in ("piece_states", "read_grad_pieces"):
            # Features are independent there: programs share them where a state is large.
            arguments["NF"] = 1
            if sum(features) > 80 or shape.wide:
                arguments["NF"], features = len(features), (64,)
        narrow = _narrow(shape.D) if arguments.get("NF", 1) == 1 else _narrow(64)
        if name in ("read_grad_pieces", "fused_backward"):
            arguments["FN"] = narrow
        tokens, reload = BLOCK, shape.wide
        if name == "weight_grad_pieces":
            features = narrow
            tokens, reload = _at_once(shape, sum(features), sum(values), shared_memory(tensors[0].device))
        if name != "piece_states" and not name.startswith("fused"):
            arguments["RELOAD"] = reload
        if name not in ("read_pieces", "weight_grad_pieces"):
            arguments["BS"] = 32 if shape.lrpe and not shape.wide else BLOCK
        operand, precision = (tl.float32, "tf32x3") if shape.wide else (tl.bfloat16, "ieee")
        stages = 1 if shape.wide else 3 if name == "read_pieces" and not shape.lrpe else 2
        if name in ("piece_states", "read_grad_pieces"):
            stages = staged(stages, tensors[0].device)
        return {
            **arguments, "D": shape.D, "V": shape.V, "FW": features, "VW": values, "BT": tokens,
            "LRPE": shape.lrpe, "AXES": 0 if self.places is None else self.places.shape[2],
            "REST": shape.lrpe and (shape.wide or self.far),
            "MASK": self.mask is not None, "TABLE": self.plan.table is not None, "OP": operand, "PREC": precision,
            "APPROX": not shape.wide and not INTERPRETED, "ALIGN": common_step(*tensors),
            "STAGES": stages, "num_warps": self._warps(name, sum(features)),
        }  # fmt: skip

    def _warps(self, name: str, features: int) -> int:
        """As measured (benchmarks/LOG.md)."""
        heavy = self.shape.lrpe or self.shape.wide
        if features > 80 and name == "weight_grad_pieces" and heavy:
            return 8
        return 2 if features > 80 and name == "piece_states" and not heavy else 4


@triton.jit
def fill_turns(theta_ptr, whole_ptr, remainder_ptr, count, SIZE: tl.constexpr):
    """Angles as whole 2^-32 turns, modulo a turn, and what is left of them in radians."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    turns = tl.load(theta_ptr + place, mask=place < count, other=0.0).to(tl.float64) / RADIANS
    scaled = (turns - tl.floor(turns + 0.5)) * 4294967296.0
    nearest = tl.floor(scaled + 0.5)
    left = (scaled - nearest) * (RADIANS / 4294967296.0)
    tl.store(remainder_ptr + place, left.to(tl.float32), mask=place < count)
    # Half a turn is the same either way, and only one of them is an int32.
    nearest = tl.where(nearest >= 2147483648.0, -nearest, nearest)
    tl.store(whole_ptr + place, nearest.to(tl.int32), mask=place < count)


def where_of(
    shape: Shape, theta: Optional, places: Optional, mask: Optional, bounds: Sequence[int] | None,
    device: torch.device, split: bool = False,
) -> Where:  # fmt: skip
    """`split`: without the fused kernels."""
    whole = remainder = None
    if theta is not None:
        theta = theta.contiguous()
        whole = torch.empty_like(theta, dtype=torch.int32)
        remainder = torch.empty_like(theta, dtype=torch.float32)
        launch(fill_turns, (triton.cdiv(theta.numel(), 256),))(theta, whole, remainder, theta.numel(), SIZE=256)
    plan = plan_of(shape, bounds, device, shape.fits and not split)
    return Where(whole, remainder, places, None if mask is None else mask.contiguous(), plan, shape)


def common_step(*tensors: Tensor) -> int:
    """Elements that divide every stride, at most 16 bytes."""
    unit = 16 // tensors[0].element_size()
    for x in tensors:
        unit = math.gcd(unit, *x.stride()[:3])
    return unit


def strides_of(unit: int, *tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride // unit for x in tensors for stride in x.stride()[:3])


def addressable(x: Tensor) -> Tensor:
    """The tensor with features side by side, and rows and heads near enough for 32-bit offsets within a block's tokens."""
    near = max(x.stride(1) * BLOCK, x.stride(2) * x.shape[2]) < 2**31
    return x if x.stride(3) == 1 and near else x.contiguous()
