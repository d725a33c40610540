"""Many lengths at a fixed number of tokens: cost per token, and one scan against two causal passes."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import cases
from .cases import ScanCase, digest, make_inputs
from .measure import check, mean_times
from .scans import Call, Context, run_training_pair, usable_backend


def _lengths(context: Context, lengths: list[int], tokens: int) -> tuple[list[int], int]:
    if not context.clock.on_gpu:
        return [16, 32], 64
    return (lengths[::2], tokens) if context.quick else (lengths, tokens)


def run_cost(context: Context, case: ScanCase) -> dict[str, Any]:
    """Causal, with LRPE: nanoseconds per token from 2k to 512k tokens in a sequence, the mean of two rounds."""
    lengths, tokens = _lengths(context, cases.COST_LENGTHS, cases.COST_TOKENS)
    case = context.fit(case)
    backend, reason = usable_backend(case.small() if context.clock.on_gpu else case, context.device)
    rounds: dict[int, list[dict[str, Any]]] = {length: [] for length in lengths}
    for length in [*lengths, *reversed(lengths)]:  # there and back: a card is cooler, and faster, at first
        times = run_training_pair(context, case.sized(tokens // length, length), backend)
        rounds[length].append(times)
        print(
            f"    T {length:7,d} B {tokens // length:4d}  forward {times['forward']['ms']:8.3f} ms  forward+backward "
            f"{times['forward_backward']['ms']:8.3f} ms",
            flush=True,
        )
    points = []
    for length in lengths:
        times = {name: mean_times([one[name] for one in rounds[length]]) for name in ("forward", "forward_backward")}
        per_token = {name: 1e6 * time["ms"] / tokens for name, time in times.items()}
        points.append({"tokens": length, "batch": tokens // length, **times, "ns_per_token": per_token})
    checks = []
    for name, bar in zip(("forward", "forward_backward"), cases.COST_SPREAD, strict=True):
        costs = [point["ns_per_token"][name] for point in points]
        spread = max(costs) / min(costs) - 1
        what = f"cost per token, {name.replace('_', '+')}, largest over smallest - 1"
        checks.append(check(what, spread, bar if context.clock.on_gpu else None, aim=cases.COST_SPREAD_AIM))
    return {
        "tokens_a_call": tokens,
        "lrpe": case.lrpe,
        "causal": case.causal,
        "width": case.width,
        "heads": case.heads,
        "backend": backend,
        "backend_reason": reason,
        "points": points,
        "inputs_sha256": _digest(context, case.sized(tokens // lengths[0], lengths[0])),
        "checks": checks,
    }


def run_figure(context: Context, case: ScanCase) -> dict[str, Any]:
    """One bidirectional scan against two causal passes of the same backend. The two passes are only the two scans, on
    inputs that lie in the right order already: flipping and adding, which a model would pay too, are left out."""
    lengths, tokens = _lengths(context, cases.FIGURE_LENGTHS, cases.FIGURE_TOKENS)
    case = context.fit(case)
    small = case.small() if context.clock.on_gpu else case
    causal = dataclasses.replace(case, causal=True)
    backend, reason = usable_backend(small, context.device)
    two_backend, two_reason = usable_backend(dataclasses.replace(small, causal=True), context.device)
    points, checks = [], []
    for length in lengths:
        inputs = make_inputs(case.sized(tokens // length, length), context.device)
        one, two = Call(case, inputs, backend), Call(causal, inputs, two_backend)

        def forward(two: Call = two) -> None:
            two.forward()
            two.forward()

        def both(two: Call = two) -> None:
            two.both()
            two.both()

        point: dict[str, Any] = {"tokens": length, "batch": tokens // length}
        point["one_scan"] = {
            "forward": context.clock.time(one.forward),
            "forward_backward": context.clock.time(one.both),
        }
        point["two_passes"] = {
            "forward": context.clock.time(forward),
            "forward_backward": context.clock.time(both),
        }
        point["factor"] = {
            name: point["two_passes"][name]["ms"] / point["one_scan"][name]["ms"] for name in point["one_scan"]
        }
        points.append(point)
        for name, factor in point["factor"].items():
            aim = 1 / 3 if length == 2**14 else None
            what = f"one scan over two passes, N {length}, {name.replace('_', '+')}"
            checks.append(check(what, 1 / factor, 1.0 if context.clock.on_gpu else None, aim=aim))
        print(
            f"    N {length:6,d} B {tokens // length:4d}  one scan {point['one_scan']['forward']['ms']:7.3f} / "
            f"{point['one_scan']['forward_backward']['ms']:7.3f} ms  two passes "
            f"{point['two_passes']['forward']['ms']:7.3f} / {point['two_passes']['forward_backward']['ms']:7.3f} ms  "
            f"factor {point['factor']['forward']:.2f} / {point['factor']['forward_backward']:.2f}",
            flush=True,
        )
    return {
        "tokens_a_call": tokens,
        "lrpe": case.lrpe,
        "width": case.width,
        "heads": case.heads,
        "backend": backend,
        "backend_reason": reason,
        "two_passes_backend": two_backend,
        "two_passes_reason": two_reason,
        "points": points,
        "inputs_sha256": _digest(context, case.sized(tokens // lengths[0], lengths[0])),
        "checks": checks,
    }


def _digest(context: Context, case: ScanCase) -> str:
    """Of the first length's inputs; the others are the same numbers in another shape."""
    inputs = make_inputs(case, context.device)
    return digest({**inputs.detached(), "grad": inputs.grad})
