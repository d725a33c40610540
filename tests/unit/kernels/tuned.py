"""What a tuner finds compiled when it times its first candidate, counted where there is no card.

python -m tests.unit.kernels.tuned [plain]      three lines of JSON: kernels ready at each timing; what was chosen
The third call gives its arguments by name, as flash-linear-attention's do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from lightnet_kernels.bench.tuned import compile_candidates_together
from triton.runtime import Autotuner, driver

from .compiled import HOPPER, Card


@triton.autotune([triton.Config({"SIZE": size}) for size in (32, 64, 128, 256)], key=["count"])
@triton.heuristics({"EVEN": lambda given: given["count"] % 2 == 0})
@triton.jit
def doubled(x, count, SIZE: tl.constexpr, EVEN: tl.constexpr, BROKEN: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if BROKEN and SIZE == 64:
        tl.static_assert(False, "a candidate that does not compile")
    tl.store(x + place, tl.load(x + place, place < count) * (2 if EVEN else 3), place < count)


def main() -> int:
    driver.set_active(Card(HOPPER))  # type: ignore[arg-type]
    if sys.argv[1:] != ["plain"]:
        compile_candidates_together()
        compile_candidates_together()  # a second time changes nothing
    kernel = doubled.fn.fn
    ready: list[int] = []

    def timed(self: Any, *arguments: Any, config: Any, **given: Any) -> list[float]:
        ready.append(len(kernel.device_caches[0][0]))
        return [1.0 / config.kwargs["SIZE"]] * 3

    Autotuner._bench = timed
    doubled.fn.run, run = (
        lambda *arguments, **given: None if not given["warmup"] else run(*arguments, **given),
        doubled.fn.run,
    )
    calls: list[Callable[[], Any]] = [
        lambda: doubled[(1,)](torch.zeros(100), 100, BROKEN=False),
        lambda: doubled[(1,)](torch.zeros(100), 101, BROKEN=True),
        lambda: doubled[(1,)](x=torch.zeros(100, dtype=torch.float64), count=102, BROKEN=False),
    ]
    for call in calls:
        call()
        print(json.dumps([ready, doubled.best_config.kwargs["SIZE"]]))
        ready.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main())
