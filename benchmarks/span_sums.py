"""How `span_sums` of the causal scan is best launched on this card: what spans of one long sequence add, and ask.

    python benchmarks/span_sums.py [--tokens N]      one GPU; about a minute, most of it Triton's compiler

A row a rule (`triton_shape.Sums`; the first is the shipped one, of `LAUNCH`): milliseconds forward (keys) and backward (queries),
and the largest error against the shipped rule, relative Frobenius. Exit 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
from lightnet_kernels import additive_scan, cuda_chains, triton_launch, triton_scan, triton_shape
from lightnet_kernels.bench.measure import Clock
from torch import Tensor

HEADS, WIDTH = 16, 128
# Stages, warps, tile, values, features, registers, stacked: see triton_shape.Sums.
RULES = [
    triton_shape.Sums(*rule)
    for rule in [
        *itertools.product((2, 3, 4), (4,), (32,), (128,), (64,), (0,), (False, True)),
        *itertools.product((3, 5), (4,), (16,), (128,), (64,), (0,), (False, True)),
        *itertools.product((3, 4), (4,), (32,), (64,), (64,), (0, 168), (True,)),
        *itertools.product((3,), (8,), (32,), (128,), (64,), (0, 128), (True,)),
        *itertools.product((2, 3), (8,), (64,), (128,), (64,), (0,), (True,)),
        *itertools.product((2, 4), (16,), (16, 32, 64), (128,), (128,), (0,), (True,)),
        *itertools.product((3,), (8,), (32,), (64,), (128,), (0,), (True,)),
    ]
]
CLOSE = 5e-3


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**19)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("span_sums: needs a GPU; there is none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    cuda_chains.DEVICE = "none"  # where they do it, Triton's kernel sums ranks' spans alone
    clock, found = Clock(device, 10), dict[Any, dict[str, tuple[float, float]]]()
    (without, shipped), sums_of = triton_shape.LAUNCH["span_sums"], triton_scan.sum_spans

    def use(rule: Any) -> None:
        triton_shape.LAUNCH["span_sums"] = without, rule
        triton_shape.Shape.of.cache_clear()

    def every(x: Tensor, y: Tensor, shape: Any, table: Any, blocks: Any, sums: Tensor, **which: bool) -> None:
        """In place of `sum_spans`: every rule on the same tensors, and what it should have done."""
        if triton_launch.only_compiled():  # they are compiled together, and do not run
            return sums_of(x, y, shape, table, blocks, sums, **which)
        name = "keys" if which["KEYS"] else "queries"
        if all(name in row for row in found.values()) and found:
            return sums_of(x, y, shape, table, blocks, sums, **which)
        wanted = torch.zeros_like(sums)
        sums_of(x, y, shape, table, blocks, wanted, **which)
        for rule in [shipped, *RULES]:
            use(rule)
            try:
                got = torch.zeros_like(sums)
                sums_of(x, y, shape, table, blocks, got, **which)
                error = float((got - wanted).norm() / wanted.norm())
                run = clock.time(lambda: sums_of(x, y, shape, table, blocks, sums, **which))
                found.setdefault(rule, {})[name] = float(run["device_ms"] or run["ms"]), error
            except Exception as error:  # one that a card has no room for
                print(f"{rule}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        use(shipped)
        return sums_of(x, y, shape, table, blocks, sums, **which)

    for module in [*sys.modules.values()]:
        if getattr(module, "sum_spans", None) is sums_of:
            module.sum_spans = every  # type: ignore[attr-defined]
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, given.tokens, HEADS, WIDTH)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    theta = torch.rand(HEADS, WIDTH, generator=generator, device=device)
    output = additive_scan(query, key, value, theta=theta)
    assert isinstance(output, Tensor)
    output.backward(value.detach())
    print(f"{torch.cuda.get_device_name()}, {given.tokens:,} tokens, {HEADS} heads of {WIDTH}")
    print(f"| {' | '.join(triton_shape.Sums._fields)} | keys, ms | queries, ms | error |")
    print("|---" * (len(triton_shape.Sums._fields) + 3) + "|")
    wrong = 0
    for rule, row in found.items():
        if len(row) < 2:
            continue
        error = max(x[1] for x in row.values())
        wrong += not error < CLOSE
        cells = " | ".join(map(str, rule))
        print(f"| {cells} | {row['keys'][0]:.3f} | {row['queries'][0]:.3f} | {error:.1e} |", flush=True)
    return int(wrong > 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
