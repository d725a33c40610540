"""Steps of the training engine on bytes of the standard library, timed without waiting between them, and what they consist of."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from sequence_parallel import text

PROFILED = 3
KERNELS = 50  # named with a breakdown
BETWEEN = 5.0  # microseconds: a longer pause between kernels is one that the device waits for something, not for the next launch
PAUSES = 12  # named with a breakdown
DOCUMENT = 700  # tokens, in the mean
# Parts of kernels' names, the first that fits; names of this package's kernels come before.
NAMES = {
    "products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "matmul"),
    "communication": ("nccl",),
    "optimiser": ("multi_tensor", "adam", "lamb"),
    "attention of peers": ("flash", "fmha", "attention"),
    "copies": ("memcpy", "memset", "copy", "cat", "fill"),
}
# Modules of ``lightnet_kernels`` whose Triton kernels are of a kind; those of others are "norms and gates".
MODULES = {
    "scan": (
        "triton_forward",
        "triton_backward",
        "triton_scan",
        "triton_units",
        "triton_span_sums",
        "triton_bidirectional",
        "triton_exchange",
        "triton_exact",
    ),
    "TPE": ("triton_toeplitz",),
    "loss": ("triton_cross_entropy",),
}


def bounds(rows: int, length: int, packed: bool, number: int) -> Any:
    """int32 [segments + 1]: of rows alone, or ``packed``: of documents too, others with each ``number``."""
    import numpy as np
    import torch

    ends = {*range(0, rows * length + 1, length)}
    if packed:
        random = np.random.default_rng(number)
        ends |= {int(end) for end in random.exponential(DOCUMENT, 3 * rows * length // DOCUMENT).cumsum()}
    return torch.tensor(sorted(end for end in ends if end <= rows * length), dtype=torch.int32)


def micro_batches(config: Any, place: int, ranks: int, packed: bool) -> Iterator[dict[str, Any]]:
    """Of one data-parallel rank, without end."""
    import torch

    rows, length = config.train.micro_batch, config.data.sequence_length
    tokens, number = text(length * 64 + 1) % config.model.vocab_size, place
    while True:
        starts = [(number * rows + row) * length % (63 * length) for row in range(rows)]
        number += ranks
        batch = {
            "input_ids": torch.stack([tokens[start : start + length] for start in starts]),
            "labels": torch.stack([tokens[start + 1 : start + length + 1] for start in starts]),
            "cu_seqlens": bounds(rows, length, packed, number),
            "sample_ids": torch.arange(rows) + number * rows,
        }
        # As a run's loader gives them: from other memory a copy of more than 64 KiB waits for all that the card has to do.
        yield {name: x.pin_memory() for name, x in batch.items()} if torch.cuda.is_available() else batch


class Marks:
    """Moments of a device, or of this process where there is none, that nothing waits for until they are read."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between one and the next."""
        import torch

        pairs = zip(self.marks, self.marks[1:], strict=False)
        if not self.cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def timed(step: Callable[[int], object], warm: int, steps: int, profile: bool, cuda: bool) -> dict[str, Any]:
    """Call ``step(number)``: ``warm`` times, then ``steps`` times between marks, then, if asked, under a profiler.

    Returns:
        step_seconds (median), seconds (each), first_step_seconds; on a GPU allocated_bytes and reserved_bytes, peaks;
        what :func:`breakdown` finds.
    """
    import torch

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    began = time.perf_counter()
    step(0)
    wait()
    first = time.perf_counter() - began
    for number in range(1, warm):
        step(number)
    wait()
    marks = Marks(cuda)
    for number in range(steps):
        marks.mark()
        step(warm + number)
    marks.mark()
    seconds = marks.seconds()
    gc.collect()
    found = {"step_seconds": statistics.median(seconds), "seconds": seconds, "first_step_seconds": first}
    if cuda:
        peaks = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        found |= peaks
    if profile and cuda:
        found |= breakdown(lambda number: step(warm + steps + number), wait, found["step_seconds"])
    return found


def run_engine(request: dict[str, Any]) -> dict[str, Any]:
    """One rank of one job: ``request`` has preset, overrides, warm, steps and, if they are wanted, packed and profile."""
    began = time.perf_counter()
    import torch
    import torch.distributed as dist

    from lightnet_llm.config import load_config
    from lightnet_llm.models import count_parameters
    from lightnet_llm.parallel.layout import Groups, prepare_backend
    from lightnet_llm.parallel.legality import legal_layout
    from lightnet_llm.training.engine import build_engine
    from lightnet_llm.training.metrics import flops_per_token

    config, device = load_config(request["preset"], request["overrides"]), prepare_backend()
    cuda, world = device.type == "cuda", int(os.environ["WORLD_SIZE"])
    groups = Groups(legal_layout(config, world))
    engine = build_engine(config, groups, device)
    built = time.perf_counter() - began
    source = micro_batches(config, groups.place["data"], groups.layout.data, request.get("packed", False))
    engine.set_rate(1.0)
    losses: list[Any] = []

    def step(number: int) -> None:
        losses.append(engine.train_step(source, number, config.train.global_batch))

    found = timed(step, request["warm"], request["steps"], request.get("profile", False), cuda)
    traffic = None if engine.clock.place is None else engine.clock.place.traffic
    held: list[Any] = [None] * world
    dist.all_gather_object(held, (found.pop("allocated_bytes", 0), found.pop("reserved_bytes", 0)))
    parameters = count_parameters(engine.module) if world == 1 else None
    return {
        **found,
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "allocated_bytes": [one for one, _ in held] if cuda else None,
        "reserved_bytes": [two for _, two in held] if cuda else None,
        "engine_seconds": built,
        "bytes_sent_per_step": 0 if traffic is None else traffic.bytes // len(losses),  # of this rank, along sequences
        "parameters": parameters,
        "flops_per_token": parameters and flops_per_token(config.model, parameters),
        "losses": [float(losses[0]), float(losses[-1])],
    }


def breakdown(step: Callable[[int], object], wait: Callable[[], None], seconds: float) -> dict[str, Any]:
    """What a step consists of on the device.

    Returns:
        breakdown: milliseconds of a step by kind of kernel, "busy" (any of them runs) and "idle" (the rest of ``seconds``, a step
            without the profiler, which makes the host slower);
        kernels: those that take most of it: name, milliseconds and calls a step;
        pauses: of the device, see :func:`pauses`.
    """
    from torch.profiler import ProfilerActivity, profile

    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(PROFILED):
            step(number)
        wait()
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiler.events():
        start, end = event.time_range.start, event.time_range.end
        if str(event.device_type).endswith("CUDA") and end > start:
            kinds[kind(event.name)] += (end - start) / 1e3 / PROFILED
            kernels[event.name[:120]].append((end - start) / 1e3 / PROFILED)
            spans.append((start, end, event.name[:60]))
    busy, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    busy /= 1e3 * PROFILED
    rows = {name: round(value, 3) for name, value in sorted(kinds.items(), key=lambda one: -one[1])}
    most = sorted(kernels.items(), key=lambda one: -sum(one[1]))[:KERNELS]
    table = [
        {"name": name, "milliseconds": round(sum(times), 3), "calls": round(len(times) / PROFILED, 2)}
        for name, times in most
    ]
    whole = {**rows, "busy": round(busy, 3), "idle": round(max(0.0, 1e3 * seconds - busy), 3)}
    return {"breakdown": whole, "kernels": table, "pauses": pauses(spans, PROFILED)}


def pauses(spans: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Of a device that ran so many steps under a profiler: where nothing ran.

    Args:
        spans: start and end in microseconds and name of each kernel and copy, in any order, on any stream.

    Returns:
        kernels: a step; between_ms: a step's milliseconds in pauses of at most ``BETWEEN``, one launch after the other;
        long: the others by what ran before and after, the most milliseconds first: after, before, milliseconds and count a step.
    """
    between, reached, last = 0.0, float("inf"), ""
    long: dict[tuple[str, str], list[float]] = defaultdict(list)
    for start, end, name in sorted(spans):
        pause = start - reached
        if 0 < pause <= BETWEEN:
            between += pause
        elif pause > BETWEEN:
            long[last, name].append(pause)
        if end > reached or not last:
            reached, last = end, name
    most = sorted(long.items(), key=lambda one: -sum(one[1]))[:PAUSES]
    return {
        "kernels": round(len(spans) / steps, 1),
        "between_ms": round(between / 1e3 / steps, 3),
        "long": [
            {
                "after": after,
                "before": before,
                "milliseconds": round(sum(one) / 1e3 / steps, 3),
                "count": round(len(one) / steps, 2),
            }
            for (after, before), one in most
        ],
    }


@functools.cache
def own_kernels() -> dict[str, str]:
    """Kind of each Triton kernel of ``lightnet_kernels``."""
    import importlib
    import pkgutil

    import lightnet_kernels

    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(lightnet_kernels.__path__):
        try:
            kernels = vars(importlib.import_module(f"lightnet_kernels.{module.name}"))
        except ImportError:  # no Triton
            continue
        which = next((kind for kind, starts in MODULES.items() if module.name.startswith(starts)), "norms and gates")
        for name, value in kernels.items():
            if type(value).__name__ in ("JITFunction", "InterpretedFunction") and value.__module__.endswith(
                module.name
            ):
                found[name] = which
    return found


def kind(name: str) -> str:
    """Of a kernel."""
    own = own_kernels().get(name)
    if own:
        return own
    if name.startswith(("causal_", "short_", "norm_rows_")):  # CUDA kernels
        return "norms and gates" if name.startswith("norm_rows_") else "scan"
    lower = name.lower()
    return next((one for one, parts in NAMES.items() if any(part in lower for part in parts)), "other elementwise")
