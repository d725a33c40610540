"""What the causal scan's kernels are compiled for and how they are launched: rules of a call's shapes; nothing is tuned."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cuda_chains
from .triton_launch import only_compiled
from .triton_parts import BLOCK
from .triton_tables import Tables

SLICE = 64  # DH
EXACT = 32  # (block, head) that one program of the exact form looks at


class Shape(NamedTuple):
    """Compile-time arguments that all kernels share, from one call's tensors."""

    heads: int
    D: int
    V: int
    double: bool
    silu: bool
    wide: bool  # float32 operands
    cuda: bool = False  # chains by CUDA C++ (`cuda_chains`)

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
    def shares(self) -> int:
        """Programs that share a span and slice of features of one head."""
        return 1 if self.cuda else parts(self.V, self.value_slice)

    @property
    def alone(self) -> bool:
        """Whether forward chains are fastest with a multiprocessor each."""
        return self.cuda and self.double

    @property
    def chains(self) -> int:
        """Programs that share a span of one head."""
        return self.slices * self.shares

    @property
    def sums(self) -> int:
        """Programs that share a piece of a span of one head."""
        how = self.of("span_sums")
        return int(how["NH"]) * parts(self.V, how["VB"])

    @property
    def operand(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.bfloat16  # float16 tensors want bfloat16's range

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a tuple of numbers)
    def of(self, name: str) -> dict[str, Any]:
        """Arguments of a kernel of blocks: widths, operands, and how it is launched, by rule: nothing is tuned."""
        rule = LAUNCH[name][self.double]
        values = {"VP": self.value_width}
        if name in ("chain_states", "chain_grads"):
            values = {"VB": self.value_slice}
        elif isinstance(rule, Sums):
            rule = Sums(1, 8 if self.double else 4, values=64) if self.wide else rule  # by 4 both halves would spill
            values = {
                "VB": min(rule.values, self.value_width), "TB": rule.tile, "STACKED": rule.stacked,
                "DH": rule.features, "NH": parts(self.D, rule.features),
            }  # fmt: skip
            if rule.registers:
                values["maxnreg"] = rule.registers
        return {
            "D": self.D, "V": self.V, "DH": SLICE, "NH": self.slices, "BT": BLOCK, "LRPE": self.double, **values,
            "OP": tl.float32 if self.wide else tl.bfloat16, "PREC": "tf32x3" if self.wide else "ieee",
            "STAGES": 1 if self.wide else rule.stages, "num_warps": rule.warps,
        }  # fmt: skip

    def grids(self, table: Tables) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Grids of a kernel of blocks and its COUNT: the fast form, then the exact form where blocks need it."""
        blocks = table.blocks.shape[0]
        return ((blocks, self.heads), 0), ((parts(blocks * self.heads, EXACT), 1), EXACT)

    def rows_at_once(self, table: Tables) -> list[dict[str, int]]:
        """Blocks and features that a program of a scan over a sequence's pressures takes at once, and its warps; where kernels
        are only compiled, those of any number of blocks."""
        blocks = table.blocks.shape[0] / max(1, table.lengths.shape[0])
        every = [*ROWS.values()] if only_compiled() else [next(value for most, value in ROWS.items() if blocks <= most)]
        return [{"ROWS": rows, "DP": lanes, "num_warps": warps} for rows, lanes, warps in every]

    def stretch(self, table: Tables, slices: int) -> int:
        """Blocks of a sequence that one program of units looks at: many sequences fill the card whole."""
        rows = UNITS["ROWS"]
        count = 1 if table.longest <= WHOLE else FULL // (table.lengths.shape[0] * self.heads * slices)
        return parts(parts(table.longest, rows), min(STRETCHES, max(1, count))) * rows

    def of_states(self) -> dict[str, Any]:
        """Arguments of a scan over pieces of spans."""
        rows = min(16, triton.next_power_of_2(self.D))
        return {"D": self.D, "V": self.V, "BD": rows, "VP": self.value_width, "LRPE": self.double, "num_warps": 4}


class Rule(NamedTuple):
    """How a kernel of blocks is launched."""

    stages: int  # of its pipeline
    warps: int = 4


class Sums(NamedTuple):
    """How `span_sums` is launched."""

    stages: int
    warps: int = 4
    tile: int = 64  # tokens at once
    values: int = 128  # value features of a program
    features: int = SLICE  # of keys or queries, of a program
    registers: int = 0  # of a thread at most; 0: as many as it takes
    stacked: bool = False  # both halves of a doubled state by one product; with LRPE


# Blocks and features that a program of units takes at once, and its warps; of pressures, by a sequence's blocks at most.
UNITS = {"ROWS": 16, "DP": 32, "num_warps": 1}
ROWS = {64: (16, 32, 1), 1024: (64, 32, 4), math.inf: (128, 8, 4)}
FULL = 8448  # programs of units: they fill a large card
STRETCHES, WHOLE = 64, 64  # of a sequence's blocks, at most; up to so many blocks there is one
# Without and with LRPE, as measured (benchmarks/LOG.md).
LAUNCH: dict[str, tuple[Rule | Sums, Rule | Sums]] = {
    "chain_states": (Rule(3), Rule(2)),
    "outputs": (Rule(3), Rule(2)),
    "query_grads": (Rule(2), Rule(1)),
    "chain_grads": (Rule(3), Rule(2)),
    "key_grads": (Rule(2), Rule(1)),
    "value_grads": (Rule(3), Rule(2)),
    "span_sums": (Sums(2), Sums(3, tile=32, stacked=True)),
}


def parts(whole: int, part: int) -> int:
    """How many parts make the whole (triton.cdiv costs two microseconds a call)."""
    return -(-whole // part)


def shape_of(query: Tensor, value: Tensor, theta: Tensor | None, silu: bool) -> Shape:
    heads, width = query.shape[2:]
    values, kind = value.shape[3], query.dtype
    cuda = cuda_chains.runs(query.device, kind, width, values)
    return Shape(heads, width, values, theta is not None, silu, kind == torch.float32, cuda)
