"""One row of the scan's table: right first, then how fast and with how much memory."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor

from ..scan import additive_scan, backends
from ..segments import CHUNK
from .cases import GRADIENT_ERROR, OUTPUT_ERROR, Inputs, ScanCase, digest, make_inputs
from .measure import Clock, check, memory_bar, peak_extra, rates, same_bits, saved_tensors
from .truth import relative, scan_truth


@dataclasses.dataclass
class Context:
    """What every measurement needs."""

    clock: Clock
    top: dict[str, float]  # measured ceilings
    quick: bool = False

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def fit(self, case: ScanCase) -> ScanCase:
        """The case, or on a CPU its tiny form."""
        return case if self.clock.on_gpu else case.tiny()


class Call:
    """`additive_scan` on one case's inputs."""

    def __init__(self, case: ScanCase, inputs: Inputs, backend: str) -> None:
        self.case, self.inputs, self.backend = case, inputs, backend

    def run(self) -> Tensor:
        output = additive_scan(**self.inputs.leaves, causal=self.case.causal, backend=self.backend)
        assert isinstance(output, Tensor)
        return output

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run()

    def both(self) -> list[Tensor]:
        """[output, gradients in the order of the leaves]."""
        output = self.run()
        return [output.detach(), *torch.autograd.grad(output, list(self.inputs.leaves.values()), self.inputs.grad)]


def usable_backend(case: ScanCase, device: torch.device) -> tuple[str, str | None]:
    """("triton", None), or ("torch", why not triton)."""
    if device.type != "cuda":
        return "torch", "not on a GPU"
    if "triton" not in backends():
        return "torch", "this machine has no triton that the kernels know"
    try:
        Call(case, make_inputs(case, device), "triton").both()
    except ValueError as refusal:
        return "torch", str(refusal)
    return "triton", None


def run_scan(context: Context, case: ScanCase) -> dict[str, Any]:
    """The row of one case; `row["checks"]` is its verdict."""
    device, clock = context.device, context.clock
    case = context.fit(case)
    small = case.small() if clock.on_gpu else case
    backend, reason = usable_backend(small, device)
    errors, checks = _against_truth(small, backend, device)
    inputs = make_inputs(case, device)
    call = Call(case, inputs, backend)
    at_size, more = _last_row(call)
    checks += more
    checks.append(check("two runs differ in bits", float(not same_bits(call.both)), 0.0, wrong=True))

    forward, both = clock.time(call.forward), clock.time(call.both)
    for what, time, bar, aim in (
        ("forward", forward, case.bar.forward, case.aim.forward),
        ("forward+backward", both, case.bar.both, case.aim.both),
    ):
        if bar is not None:
            checks.append(check(what, time["ms"], bar, aim=aim, unit="ms"))

    memory = _memory(clock, call)
    if memory["peak_bytes"] is not None:
        mib = [round(memory[name] / 2**20, 1) for name in ("peak_bytes", "allowed_bytes")]
        checks.append(check("peak memory", mib[0], mib[1], unit="MiB"))
    return {
        "shape": [case.batch, case.tokens, case.heads, case.width],
        "lrpe": case.lrpe,
        "causal": case.causal,
        "backend": backend,
        "backend_reason": reason,
        "errors": errors,
        "errors_at_size": at_size,
        "forward": forward | rates(forward["ms"], case.floor_bytes(False), case.floor_flops(False), context.top),
        "forward_backward": both | rates(both["ms"], case.floor_bytes(True), case.floor_flops(True), context.top),
        "memory": memory,
        "inputs_sha256": digest({**inputs.detached(), "grad": inputs.grad}),
        "checks": checks,
    }


def _against_truth(case: ScanCase, backend: str, device: torch.device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    inputs = make_inputs(case, device, seed=1)
    output, *grads = Call(case, inputs, backend).both()
    wanted = scan_truth(inputs.leaves, inputs.grad, case.causal)
    errors = {"output": relative(output, wanted.output)}
    for name, grad in zip(inputs.leaves, grads, strict=True):
        errors[name] = relative(grad, wanted.grads[name], wanted.sizes[name])
    return errors, [_error_check(name, error) for name, error in errors.items()]


def _error_check(name: str, error: float, where: str = "") -> dict[str, Any]:
    limit = OUTPUT_ERROR if name == "output" else GRADIENT_ERROR
    what = "output" if name == "output" else f"gradient of {name}"
    return check(f"error of the {what}{where}", error, limit, wrong=True)


def _last_row(call: Call) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The last sequence at the timed size, against the chunked PyTorch scan in float64. The key's error, here over the
    gradient's own norm (its parts are not known), is reported and not judged."""
    output, *grads = call.both()
    row = {name: x.detach() if name == "theta" else x.detach()[-1:] for name, x in call.inputs.leaves.items()}
    double = {name: x.double().requires_grad_() for name, x in row.items()}
    wanted = additive_scan(**double, causal=call.case.causal, backend="torch")
    assert isinstance(wanted, Tensor)
    upstream = call.inputs.grad[-1:].double()
    tensors = [name for name in double if name != "theta"]
    expected = torch.autograd.grad(wanted, [double[name] for name in tensors], upstream)
    errors = {"output": relative(output[-1:], wanted.detach())}
    for name, one, two in zip(tensors, grads, expected, strict=False):
        errors[name] = relative(one[-1:], two)
    return errors, [_error_check(name, errors[name], " at size") for name in ("output", "query", "value")]


def state_elements(case: ScanCase, backend: str) -> int:
    """Elements of all chunk states: causal, one state (kv and two vectors) for each block of the backend's scan, or of
    the PyTorch scan's chunks; bidirectional, one a sequence."""
    block: int = CHUNK
    if backend == "triton":
        block = getattr(importlib.import_module("lightnet_kernels.triton_parts"), "BLOCK", CHUNK)
    count = case.batch * case.heads * (-(-case.tokens // block) if case.causal else 1)
    return count * case.width * ((2 if case.lrpe else 1) * case.width + 2)


def _memory(clock: Clock, call: Call) -> dict[str, Any]:
    inputs = list(call.inputs.leaves.values())
    kept = saved_tensors(call.run, inputs)
    memory: dict[str, Any] = dict(memory_bar(inputs, call.forward(), state_elements(call.case, call.backend)))
    memory["kept_for_backward"] = [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in kept]
    memory["kept_for_backward_bytes"] = sum(x.numel() * x.element_size() for x in kept)
    del kept
    given = sum(x.numel() * x.element_size() for x in [*inputs, call.inputs.grad])
    extra = peak_extra(clock, call.both)
    return {**memory, "extra_bytes": extra, "peak_bytes": None if extra is None else given + extra}


def run_training_pair(context: Context, case: ScanCase, backend: str) -> dict[str, Any]:
    """Only the two times, for the series."""
    call = Call(case, make_inputs(case, context.device), backend)
    count = min(20, context.clock.repeats)  # calls of tens of milliseconds
    return {
        "forward": context.clock.time(call.forward, count, warm_up=2.0),
        "forward_backward": context.clock.time(call.both, count, warm_up=0.5),
    }
