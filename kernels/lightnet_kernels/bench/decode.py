"""Decode: one token for each of 64 sequences through the scans of 18 layers and MD-TPE, the states in float32."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from ..decode import DecodeState, decode_state, decode_step, toeplitz_step
from ..scan import additive_scan
from ..state import ScanState, ToeplitzState, identity_state
from ..toeplitz import toeplitz_scan
from .cases import DECODE, DECODE_AIM, DECODE_BAR, OUTPUT_ERROR, ScanCase, digest, make_inputs
from .measure import check, rates
from .scans import Context
from .truth import relative, scan_truth

STEPS = 64  # measured steps: one whole block of the decoder's state, so its entry into the state is counted
TINY = {"batch": 2, "layers": 2, "heads": 2, "width": 16, "toeplitz_rank": 8}


def run_decode(context: Context) -> dict[str, Any]:
    """Milliseconds a step: the mean over a block of steps, and the worst of them."""
    sizes = DECODE if context.clock.on_gpu else TINY
    device = context.device
    errors = _errors(sizes["heads"], sizes["width"], sizes["toeplitz_rank"], device)
    checks = [check(f"error of {name}", error, OUTPUT_ERROR, wrong=True) for name, error in errors.items()]
    step = _Step(sizes, device)
    number_bytes = step.state_bytes()
    # The same states twice: decoding changes them in place.
    checks.append(check("two runs differ in bits", float(not _same_bits(sizes, device)), 0.0, wrong=True))
    steps = STEPS if context.clock.on_gpu else 3
    for _ in range(steps):
        step()
    rounds = [_times(context, step, steps) for _ in range(2 if context.quick else 4)]
    times = [ms for one in rounds for ms in one]
    mean = statistics.mean(times)
    wanted = rates(mean, 2 * number_bytes, 0, context.top)
    bar = DECODE_BAR if context.clock.on_gpu else None
    checks.append(check("times state read and write at the copy rate", wanted["times_floor"], bar, aim=DECODE_AIM))
    print(
        f"    {mean:.3f} ms a step (median {statistics.median(times):.3f}, worst {max(times):.3f}), state read and write "
        f"{wanted['floor_ms']:.3f} ms: {wanted['times_floor']:.2f} times",
        flush=True,
    )
    return {
        "sizes": sizes,
        "state_bytes": number_bytes,
        "errors": errors,
        "step": {
            "mean_ms": mean, "median_ms": statistics.median(times), "worst_ms": max(times), "steps": len(times), **wanted
        },
        "inputs_sha256": digest({"token": step.tokens, "x": step.x, "kv": step.layers[0].kv}),
        "checks": checks,
    }  # fmt: skip


class _Step:
    """All layers' scans and MD-TPE once, on random states."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        batch, heads, width = sizes["batch"], sizes["heads"], sizes["width"]
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        theta = (10000.0 ** -(torch.arange(heads * width, device=device) / (heads * width))).reshape(heads, width)
        self.tokens = draw(3, batch, heads, width).bfloat16()
        self.layers: list[DecodeState] = []
        for _ in range(sizes["layers"]):
            state = identity_state(batch, heads, width, width, lrpe=True, device=device)
            length = torch.full_like(state.length, 1000)
            start = ScanState(draw(*state.max.shape), 1000 + draw(*state.sum.shape), draw(*state.kv.shape), length)
            self.layers.append(decode_state(start, theta, torch.bfloat16))
        channels, rank = heads * width, sizes["toeplitz_rank"]
        self.x = draw(batch, channels).bfloat16()
        self.decay, self.gain = draw(channels, rank).sigmoid(), 0.01 * draw(channels, rank)
        lengths = torch.full((batch,), 1000, dtype=torch.int64, device=device)
        self.positions = ToeplitzState(draw(batch, channels, rank), lengths)

    def __call__(self) -> list[Tensor]:
        query, key, value = self.tokens.unbind(0)
        outputs = [toeplitz_step(self.positions, self.x, self.decay, self.gain)]
        return outputs + [decode_step(layer, query, key, value) for layer in self.layers]

    def state_bytes(self) -> int:
        """Of the float32 states, without the blocks of recent tokens that the decoder keeps beside them."""
        tensors = [x for layer in self.layers for x in (layer.max, layer.sum, layer.kv)] + [self.positions.hidden]
        return sum(x.numel() * x.element_size() for x in tensors)


def _times(context: Context, step: _Step, count: int) -> list[float]:
    """Milliseconds of each of `count` consecutive steps, the host ahead of the device."""
    if not context.clock.on_gpu:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 50 ms: the host queues the steps meanwhile
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(two) for one, two in itertools.pairwise(marks)]


def _same_bits(sizes: dict[str, int], device: torch.device) -> bool:
    sizes = {**sizes, "layers": 1}
    runs = []
    for _ in range(2):
        step = _Step(sizes, device)
        runs.append([x for _ in range(STEPS + 2) for x in step()])
    return all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


def _errors(heads: int, width: int, rank: int, device: torch.device) -> dict[str, float]:
    """A prompt of 100 tokens, then 150 steps, more than two blocks, against the float64 sums over all 250."""
    prompt, tokens = 100, 250
    inputs = make_inputs(ScanCase("decode", 2, tokens, min(heads, 2), width, lrpe=True), device, seed=1)
    wanted = scan_truth(inputs.leaves, inputs.grad, causal=True).output[:, prompt:]
    leaves = inputs.detached()
    theta = leaves.pop("theta")
    part = {name: x[:, :prompt].float() for name, x in leaves.items()}
    result = additive_scan(**part, theta=theta, return_state=True)
    assert isinstance(result, tuple)
    state = decode_state(result[1], theta, torch.bfloat16)
    outputs = [decode_step(state, *(x[:, t].contiguous() for x in leaves.values())) for t in range(prompt, tokens)]

    x = leaves["value"].flatten(2)
    generator = torch.Generator(device).manual_seed(2)
    uniform = torch.rand(x.shape[2], rank, device=device, generator=generator)
    decay = torch.exp(-(float(tokens) ** -uniform))
    gain = (1 - decay) * torch.randn(x.shape[2], rank, device=device, generator=generator)
    y = toeplitz_scan(x.double(), decay.double(), gain.double(), backend="torch")
    assert isinstance(y, Tensor)
    start = toeplitz_scan(x[:, :prompt].float(), decay, gain, return_state=True, backend="torch")
    assert isinstance(start, tuple)
    steps = [toeplitz_step(start[1], x[:, t].contiguous(), decay, gain) for t in range(prompt, tokens)]
    return {
        "the scan's output": relative(torch.stack(outputs, 1), wanted),
        "MD-TPE's output": relative(torch.stack(steps, 1), y[:, prompt:]),
    }
