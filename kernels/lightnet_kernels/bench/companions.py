"""The ops beside the scan in a training step, at the sizes of pile_1b: right, how fast, how far from their bytes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import GRADIENT_ERROR, OUTPUT_ERROR, digest
from .measure import check, peak_extra, rates, same_bits
from .scans import Context
from .truth import relative


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of pile_1b and a batch of 16,384 tokens; errors are taken on fewer tokens."""

    batch: int = 8
    tokens: int = 2048
    heads: int = 16
    width: int = 128
    glu: int = 5376
    vocabulary: int = 50304
    rank: int = 64

    @property
    def hidden(self) -> int:
        return self.heads * self.width

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


SMALL = Sizes(batch=2, tokens=600, vocabulary=5030)
TINY = Sizes(2, 20, 2, 16, 48, 101, 8)


@dataclasses.dataclass(frozen=True)
class Companion:
    """`make(sizes, draw)` gives the tensor arguments, floating ones differentiated, and the others. `draw(*shape)` is
    normal, bf16. `flops`: of the forward pass; backward twice as many. `memory`: bytes that forward and backward must
    stay below beyond their inputs."""

    module: str
    function: str
    make: Callable[[Sizes, Callable[..., Tensor]], tuple[dict[str, Tensor], dict[str, Any]]]
    flops: Callable[[Sizes], int] = lambda sizes: 0
    memory: Callable[[Sizes], int] | None = None


def _gated_norm(sizes: Sizes, draw: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    shape = (sizes.batch, sizes.tokens, sizes.heads, sizes.width)
    return {"x": draw(*shape), "gate": draw(*shape)}, {"kind": "srms", "eps": 1e-5}


def _add_norm(sizes: Sizes, draw: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    shape = (sizes.batch, sizes.tokens, sizes.hidden)
    return {"x": draw(*shape), "residual": draw(*shape)}, {"kind": "srms", "eps": 1e-5}


def _swiglu(sizes: Sizes, draw: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    shape = (sizes.batch, sizes.tokens, sizes.glu)
    return {"gate": draw(*shape), "up": draw(*shape)}, {}


def _toeplitz(sizes: Sizes, draw: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """lambda = exp(-1 / tau), tau log-uniform from 1 to N (model-spec 3)."""
    x = draw(sizes.batch, sizes.tokens, sizes.hidden)
    uniform = torch.rand(sizes.hidden, sizes.rank, device=x.device, generator=torch.Generator(x.device).manual_seed(2))
    decay = torch.exp(-(float(sizes.tokens) ** -uniform))
    gain = 0.1 * draw(sizes.hidden, sizes.rank).float() / sizes.rank**0.5 * (1 - decay)
    return {"x": x, "decay": decay, "gain": gain}, {}


def _cross_entropy(sizes: Sizes, draw: Callable[..., Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    hidden, weight = draw(sizes.rows, sizes.hidden), draw(sizes.vocabulary, sizes.hidden).mul_(0.02)
    generator = torch.Generator(hidden.device).manual_seed(2)
    labels = torch.randint(sizes.vocabulary, (sizes.rows,), device=hidden.device, generator=generator)
    return {"hidden": hidden, "weight": weight, "labels": labels}, {"reduction": "sum"}


COMPANIONS = {
    "gated-norm": Companion("norms", "gated_norm", _gated_norm),
    "add-norm": Companion("norms", "add_norm", _add_norm),
    "swiglu": Companion("swiglu", "swiglu", _swiglu),
    "toeplitz": Companion(
        "toeplitz", "toeplitz_scan", _toeplitz, lambda sizes: 4 * sizes.rows * sizes.hidden * sizes.rank
    ),
    "linear-cross-entropy": Companion(
        "linear_cross_entropy",
        "linear_cross_entropy",
        _cross_entropy,
        lambda sizes: 2 * sizes.rows * sizes.vocabulary * sizes.hidden,
        lambda sizes: 2 * sizes.rows * sizes.vocabulary,  # all logits, which it must never hold
    ),
}


def find(module: str, function: str) -> Callable[..., Any] | None:
    """A public function of this package, where it exists."""
    try:
        found = getattr(importlib.import_module(f"lightnet_kernels.{module}"), function, None)
    except ImportError:
        return None
    return found if callable(found) else None


def names() -> list[str]:
    return [name for name, one in COMPANIONS.items() if find(one.module, one.function) is not None]


def _outputs(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]


class _Call:
    def __init__(self, one: Companion, sizes: Sizes, device: torch.device, backend: str) -> None:
        function = find(one.module, one.function)
        assert function is not None
        self.function, self.backend = function, backend
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        tensors, self.options = one.make(sizes, draw)
        self.tensors = {name: x.requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
        self.leaves = [x for x in self.tensors.values() if x.requires_grad]
        self.upstream = [torch.randn_like(x) for x in self.forward()]

    def run(self) -> list[Tensor]:
        return _outputs(self.function(**self.tensors, **self.options, backend=self.backend))

    def forward(self) -> list[Tensor]:
        with torch.no_grad():
            return self.run()

    def both(self) -> list[Tensor]:
        outputs = self.run()
        return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, self.leaves, self.upstream)]

    def errors(self) -> dict[str, float]:
        """Against the PyTorch form in float64 on the same rounded inputs."""
        double = {n: x.detach().double().requires_grad_() if x.requires_grad else x for n, x in self.tensors.items()}
        outputs = _outputs(self.function(**double, **self.options, backend="torch"))
        leaves = [x for x in double.values() if x.requires_grad]
        grads = torch.autograd.grad(outputs, leaves, [x.double() for x in self.upstream])
        labels = [f"output {i}" if len(outputs) > 1 else "output" for i in range(len(outputs))]
        labels += [f"gradient of {name}" for name, x in self.tensors.items() if x.requires_grad]
        wanted = [*(x.detach() for x in outputs), *grads]
        return {n: relative(one, two) for n, one, two in zip(labels, self.both(), wanted, strict=True)}

    def floor_bytes(self, backward: bool) -> int:
        """Each tensor once: inputs and outputs; backward inputs, gradients of the outputs and of the inputs."""
        inputs = sum(x.numel() * x.element_size() for x in self.tensors.values())
        grads = sum(x.numel() * x.element_size() for x in self.leaves)
        outputs = sum(x.numel() * x.element_size() for x in self.upstream)
        return inputs + outputs + (inputs + outputs + grads if backward else 0)


def run_companion(context: Context, name: str) -> dict[str, Any]:
    """One op's row: errors, two runs' bits, times beside those of its PyTorch form."""
    one, clock = COMPANIONS[name], context.clock
    sizes, small = (Sizes(), SMALL) if clock.on_gpu else (TINY, TINY)
    backend, reason = "torch", "not on a GPU"
    if clock.on_gpu:
        try:
            backend, reason = "triton", ""
            _Call(one, small, context.device, backend)
        except ValueError as refusal:
            backend, reason = "torch", str(refusal)
    errors = _Call(one, small, context.device, backend).errors()
    checks = [
        check(f"error of the {what}", error, OUTPUT_ERROR if "output" in what else GRADIENT_ERROR, wrong=True)
        for what, error in errors.items()
    ]
    call = _Call(one, sizes, context.device, backend)
    checks.append(check("two runs differ in bits", float(not same_bits(call.both)), 0.0, wrong=True))
    row: dict[str, Any] = {
        "sizes": dataclasses.asdict(sizes),
        "function": f"lightnet_kernels.{one.module}.{one.function}",
        "backend": backend,
        "backend_reason": reason or None,
        "errors": errors,
        "checks": checks,
        "inputs_sha256": digest(call.tensors),
    }
    for kind, work in (("forward", call.forward), ("forward_backward", call.both)):
        times = clock.time(work)
        backward = kind != "forward"
        flops = one.flops(sizes) * (3 if backward else 1)
        row[kind] = times | rates(times["ms"], call.floor_bytes(backward), flops, context.top)
    row["extra_bytes"] = extra = peak_extra(clock, call.both)
    if one.memory is not None and extra is not None:
        checks.append(check("peak memory beyond inputs", extra / 2**20, one.memory(sizes) / 2**20, unit="MiB"))
    call.backend = "torch"
    count = min(20, clock.repeats)
    row["pytorch"] = {"forward": clock.time(call.forward, count), "forward_backward": clock.time(call.both, count)}
    return row
