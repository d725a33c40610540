"""Clocks, ceilings, memory, and the comparisons a row is judged by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TIMING = (
    "medians of CUDA events around one call; 256 MiB are written before each repetition so that the L2 cache holds no "
    "input. 'ms': the host starts the call while that write runs (what bars are held against). 'device_ms': the device "
    "is kept busy until the host has queued the call, as in a training step whose host runs ahead. The cost "
    "of a token is timed when the card has worked for 2 s."
)
FLUSH_BYTES = 2**28
BUSY_CYCLES = 4_000_000  # about 2 ms


class Clock:
    """Times calls on one device. On a CPU (smoke runs) by the wall."""

    def __init__(self, device: torch.device, repeats: int = 30) -> None:
        self.device, self.repeats = device, repeats
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], Any]) -> float:
        """Wall milliseconds of one call, to its end on the device."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return 1e3 * (time.perf_counter() - start)

    def time(self, call: Callable[[], Any], repeats: int | None = None, warm_up: float = 0.0) -> dict[str, Any]:
        """{"ms", "device_ms", "spread", "repeats"}: medians, and (p90 - p10) / median of "ms". `warm_up`: seconds of calls
        before, for calls so long that the card comes to its power limit: its clocks fall for a second, then rise again."""
        count = repeats or self.repeats
        for _ in range(3):
            call()
        end = time.perf_counter() + (warm_up if self.on_gpu else 0.0)
        while time.perf_counter() < end:
            self._samples(call, 10, busy=False)
        times = self._samples(call, count, busy=False)
        median = statistics.median(times)
        ordered = sorted(times)
        spread = (ordered[int(0.9 * (count - 1))] - ordered[int(0.1 * (count - 1))]) / median
        ahead = statistics.median(self._samples(call, count, busy=True)) if self.on_gpu else None
        return {"ms": median, "device_ms": ahead, "spread": spread, "repeats": count}

    def _samples(self, call: Callable[[], Any], count: int, busy: bool) -> list[float]:
        if not self.on_gpu:
            return [self.once(call) for _ in range(count)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        self.synchronize()
        for start, end in events:
            if busy:
                torch.cuda._sleep(BUSY_CYCLES)
            self.flush.zero_()
            start.record()
            call()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def mean_times(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several results of `Clock.time`: means, the largest spread and all repeats."""
    ahead = [one["device_ms"] for one in rounds]
    return {
        "ms": statistics.fmean(one["ms"] for one in rounds),
        "device_ms": None if None in ahead else statistics.fmean(ahead),
        "spread": max(one["spread"] for one in rounds),
        "repeats": sum(one["repeats"] for one in rounds),
    }


def ceilings(clock: Clock) -> dict[str, float]:
    """{"copy_tb_s", bytes read plus written; "matmul_tflop_s", bf16 8192^3}, measured now."""
    size, side = (2**30, 8192) if clock.on_gpu else (2**22, 128)
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    one, two = (torch.randn(side, side, device=clock.device).bfloat16() for _ in range(2))

    def best(call: Callable[[], Any]) -> float:
        result = clock.time(call)
        return float(result["device_ms"] or result["ms"])

    return {
        "copy_tb_s": 2 * size / best(lambda: target.copy_(source)) / 1e9,
        "matmul_tflop_s": 2 * side**3 / best(lambda: torch.mm(one, two)) / 1e9,
    }


def peak_extra(clock: Clock, call: Callable[[], Any]) -> int | None:
    """Bytes that a call holds at its peak beyond what was held before it."""
    if not clock.on_gpu:
        return None
    clock.synchronize()
    torch.cuda.reset_peak_memory_stats(clock.device)
    held = torch.cuda.memory_allocated(clock.device)
    call()
    clock.synchronize()
    return torch.cuda.max_memory_allocated(clock.device) - held


def saved_tensors(call: Callable[[], Tensor], known: list[Tensor]) -> list[Tensor]:
    """What a forward call keeps for its backward pass, without the output and the storages of `known`."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = call()
    seen = {x.untyped_storage().data_ptr() for x in [*known, output]}
    fresh = {}
    for x in kept:
        pointer = (x.untyped_storage().data_ptr(), x.storage_offset())
        if pointer[0] not in seen and x.numel():
            fresh[pointer] = x.detach()
    return list(fresh.values())


def memory_bar(inputs: list[Tensor], output: Tensor, state_elements: int) -> dict[str, int]:
    """Bytes allowed at the peak of forward and backward: inputs, output, a gradient of each, chunk states, 10 %.

    Chunk states are counted once in float32; in bfloat16 that is room for the states and for their gradients.
    """
    tensors = sum(2 * x.numel() * x.element_size() for x in [*inputs, output])
    states = 4 * state_elements
    return {"allowed_bytes": int(1.1 * (tensors + states)), "tensor_bytes": tensors, "state_bytes": states}


def check(
    what: str, value: float | None, bar: float | None, *, aim: float | None = None, unit: str = "", wrong: bool = False
) -> dict[str, Any]:
    """One comparison, value against the most it may be. `wrong`: a miss is a wrong result, not a slow one."""
    met = bar is None or (value is not None and value <= bar)  # nan is a miss
    return {"what": what, "value": value, "bar": bar, "aim": aim, "unit": unit, "wrong": wrong, "met": met}


def same_bits(call: Callable[[], list[Tensor]]) -> bool:
    """Whether two runs give the same bits (also in NaNs)."""
    first = [x.clone() for x in call()]
    return all(
        torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
        for one, two in zip(first, call(), strict=True)
    )


def rates(milliseconds: float, number_bytes: int, flops: int, top: dict[str, float]) -> dict[str, float]:
    """GB/s and TFLOP/s of a floor's work done in this time, the floor in ms, and time over floor."""
    floor = max(number_bytes / top["copy_tb_s"] / 1e9, flops / top["matmul_tflop_s"] / 1e9)
    return {
        "gb_s": number_bytes / milliseconds / 1e6,
        "tflop_s": flops / milliseconds / 1e9,
        "floor_ms": floor,
        "times_floor": milliseconds / floor,
    }
