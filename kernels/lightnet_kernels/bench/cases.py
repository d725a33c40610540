"""What is measured: shapes, bars and aims of one H100 80 GB, floors, and inputs that a seed fixes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """Milliseconds, of the forward pass and of forward and backward together; None: not set."""

    forward: float | None = None
    both: float | None = None


UNSET = Pair()


@dataclasses.dataclass(frozen=True)
class ScanCase:
    """One call of `additive_scan` in bfloat16, query, key and value [batch, tokens, heads, width]."""

    name: str
    batch: int
    tokens: int
    heads: int = 16
    width: int = 128
    lrpe: bool = False
    causal: bool = True
    bar: Pair = UNSET
    aim: Pair = UNSET

    @property
    def elements(self) -> int:
        """Of one tensor."""
        return self.batch * self.tokens * self.heads * self.width

    def floor_bytes(self, backward: bool) -> int:
        """Each tensor once. Forward: q, k, v in, o out; backward: q, k, v, do in, dq, dk, dv out."""
        return 2 * self.elements * (11 if backward else 4)

    def floor_flops(self, backward: bool) -> int:
        """The recurrence's products: per token and head, the state's update and its reading, 2 rows x width each, rows
        doubled by LRPE; backward the gradients of query, key, value and state. Chunked forms do more."""
        rows = self.width * (2 if self.lrpe else 1)
        return self.batch * self.tokens * self.heads * rows * self.width * (12 if backward else 4)

    def sized(self, batch: int, tokens: int, heads: int | None = None) -> ScanCase:
        """The same call at another size, without bars."""
        return dataclasses.replace(self, batch=batch, tokens=tokens, heads=heads or self.heads, bar=UNSET, aim=UNSET)

    def small(self) -> ScanCase:
        """The size at which the float64 sums are affordable: two whole chunks of the largest cut and a broken one."""
        return self.sized(2, 600, 2)

    def tiny(self) -> ScanCase:
        """For a smoke run on a CPU."""
        return dataclasses.replace(self.sized(2, 40, 2), width=min(self.width, 24))


SCANS = [
    ScanCase("causal-lrpe", 8, 2048, lrpe=True, bar=Pair(0.45, 1.7), aim=Pair(0.25, 0.9)),
    ScanCase("causal", 8, 2048, bar=Pair(0.30, 1.1), aim=Pair(0.17, 0.6)),
    ScanCase("causal-lrpe-long", 1, 16384, lrpe=True, bar=Pair(None, 1.9), aim=Pair(None, 1.0)),
    ScanCase("causal-long", 1, 16384),
    ScanCase("bidirectional", 128, 256, width=72, causal=False, bar=Pair(0.17, 0.60), aim=Pair(0.12, 0.40)),
    ScanCase("bidirectional-lrpe", 128, 256, width=72, causal=False, lrpe=True),
    ScanCase("bidirectional-long", 8, 4096, width=72, causal=False, bar=Pair(None, 0.9), aim=Pair(None, 0.5)),
]

# Cost per token: this many tokens a call at every length. One tensor is 2 GiB.
COST_CASE = ScanCase("cost", 256, 2048, lrpe=True)
COST_TOKENS = 2**19
COST_LENGTHS = [2**n for n in range(11, 20)]
COST_SPREAD = Pair(0.15, 0.15)
COST_SPREAD_AIM = 0.05

# One scan against two causal passes (the paper's Figure 1).
FIGURE_CASES = [
    ScanCase("figure1", 256, 256, width=72, causal=False),
    ScanCase("figure1-lrpe", 256, 256, width=72, causal=False, lrpe=True),
    ScanCase("figure1-128", 256, 256, width=128, causal=False),  # whose causal passes are by CUDA C++, too
]
FIGURE_TOKENS = 2**16
FIGURE_LENGTHS = [2**n for n in range(8, 17)]

# Decode: one token for each of the sequences, all layers. Bar and aim: times the state's bytes at the copy rate.
DECODE = {"batch": 64, "layers": 18, "heads": 16, "width": 128, "toeplitz_rank": 64}
DECODE_BAR, DECODE_AIM = 1.5, 1.2

FIRST_CALL_BAR, FIRST_CALL_AIM = 20.0, 8.0  # seconds

OUTPUT_ERROR, GRADIENT_ERROR = 5e-3, 1e-2  # relative Frobenius, bfloat16 against float64


class Inputs(NamedTuple):
    """Leaves by name (query, key, value and, with LRPE, theta) and an upstream gradient."""

    leaves: dict[str, Tensor]
    grad: Tensor

    def detached(self) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in self.leaves.items()}


def make_inputs(case: ScanCase, device: torch.device, seed: int = 0) -> Inputs:
    """Normal bf16 inputs, keys of standard deviation 2, LRPE's ladder of angles in float32."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.tokens, case.heads, case.width)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    leaves = {"query": draw(), "key": draw().mul_(2), "value": draw()}
    if case.lrpe:
        steps = torch.arange(case.heads * case.width, device=device) / (case.heads * case.width)
        leaves["theta"] = (10000.0**-steps).reshape(case.heads, case.width)
    return Inputs({name: x.requires_grad_() for name, x in leaves.items()}, draw())


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names, shapes, dtypes, the sum of each tensor's bits, and its first and last 4,096 elements."""
    summary = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        flat = x.detach().reshape(-1)
        bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(2**28))
        ends = torch.cat([bits[:4096], bits[-4096:]]).cpu().numpy().tobytes()
        summary.update(f"{name} {tuple(x.shape)} {x.dtype} {total} ".encode() + ends)
    return summary.hexdigest()
