"""Compiles Triton kernels for a card where there is none: what the interpreter runs the compiler may refuse.

    python -m tests.unit.kernels.compiled [--card 80] CASE...   of CASES; prints how many kernels each compiled

Operators are called with CPU tensors as under the interpreter, and each kernel is compiled for an H100 in place of being
started: what they return means nothing. For another card kernels are compiled as far as shared memory is laid out. No kernel
may take more of it than the card has.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction, driver

BF16 = torch.bfloat16
HOPPER = 90
# Bytes of shared memory that a block of threads may have; sm_86 and sm_120 have what sm_89 has.
SHARED = {80: 166912, 89: 101376, HOPPER: 232448, 100: 232448}


class Card:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, card: int):
        self.card = card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class LaidOut(Exception):
    """Instead of a kernel's machine code, which takes as long again, and of a place in Triton's cache: its bytes of shared
    memory."""


def only_laid_out(_backend: Any, _module: Any, metadata: dict[str, Any], *_: Any) -> str:
    raise LaidOut(metadata["shared"])


def no_card_needed(card: int = HOPPER) -> list[str]:
    """Compile in place of starting; names of what was compiled, as it grows."""
    assert not knobs.runtime.interpret, "not with TRITON_INTERPRET=1"
    import lightnet_kernels

    for module in pkgutil.iter_modules(lightnet_kernels.__path__):  # before the switch: kernels that are compiled
        if module.name.startswith("triton_"):
            importlib.import_module(f"lightnet_kernels.{module.name}")
    from lightnet_kernels import triton_bidirectional_plan, triton_bidirectional_scan, triton_launch

    driver.set_active(Card(card))  # type: ignore[arg-type]
    if card != HOPPER:
        CUDABackend.make_ptx = only_laid_out  # type: ignore[method-assign]
    triton_bidirectional_plan.shared_memory = lambda _device: SHARED[card]  # type: ignore[assignment]
    triton_launch.architecture = lambda _device: card // 10  # type: ignore[assignment]
    knobs.runtime.interpret = True  # from here on operators take CPU tensors
    triton_bidirectional_scan.INTERPRETED = True
    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = self.fn.__name__
        names.append(name)
        kernel = None
        try:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
            shared = kernel.metadata.shared
        except LaidOut as done:
            shared = done.args[0]
        assert shared <= SHARED[card], f"{name} takes {shared} bytes of shared memory, of {SHARED[card]}"
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    # What is "launched" is compiled, too.
    triton_launch._local.together = triton_launch._Together(ThreadPoolExecutor(1), {}, {})
    return names


def only_counted() -> tuple[list[str], list[Any]]:
    """After `no_card_needed`: nothing is compiled. Returns names of what would be, Triton's and CUDA's, as they come, and what
    is known of CUDA's; both may be cleared."""
    from lightnet_kernels import cuda_launch

    made: list[str] = []
    known: list[Any] = []

    def by_triton(self: Any, key: Any, _signature: Any, device: Any, *_: Any) -> Any:
        made.append(self.fn.__name__)
        kernel = self.device_caches[device][0][key] = SimpleNamespace(metadata=SimpleNamespace(shared=0))
        return kernel

    def by_cuda(name: str, _files: Any, constants: dict[str, int], *_: Any) -> None:
        if (name, constants) not in known:
            known.append((name, constants))
            made.append(name)

    JITFunction._do_compile = by_triton  # type: ignore[method-assign]
    cuda_launch.launch = by_cuda  # type: ignore[assignment]
    return made, known


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def back(*outputs: Any) -> None:
    """Through all that has a gradient."""
    found = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward(found, [torch.ones_like(x) for x in found])


def scan(dtype: torch.dtype = BF16, width: int = 128, tokens: int = 200, **options: Any) -> None:
    from lightnet_kernels import additive_scan

    widths = width, width, options.pop("value_width", width)
    query, key, value = (drawn(1, tokens, 2, each, dtype=dtype) for each in widths)
    theta = torch.rand(2, width).requires_grad_() if options.pop("lrpe", True) else None
    found = additive_scan(query, key, value, theta=theta, activation="silu", backend="triton", **options)
    output, state = found if isinstance(found, tuple) else (found, ())
    back(output, *state)


def spans(**options: Any) -> None:
    """A long sequence, whose units are found by stretches; states before and after."""
    from lightnet_kernels import additive_scan, triton_shape, triton_tables

    triton_tables.PROGRAMS, triton_shape.WHOLE = 10**6, 1
    parts = [drawn(1, 2048, 1, 128) for _ in range(3)]
    theta = torch.rand(1, 128).requires_grad_() if options.pop("lrpe", True) else None
    given: dict[str, Any] = {"theta": theta, "activation": "silu", "backend": "triton", "return_state": True}
    output, state = additive_scan(*parts, **given)
    later, end = additive_scan(*parts, **given, initial_state=state)
    back(output, later, end.sum, end.kv)


def cuda_spans() -> None:
    """What is left to Triton where CUDA kernels do chains and sums."""
    from lightnet_kernels import cuda_chains, cuda_launch

    before = cuda_chains.runs, cuda_launch.launch
    cuda_chains.runs, cuda_launch.launch = lambda *_: True, lambda *_: None  # type: ignore[assignment]
    try:
        spans()
    finally:
        cuda_chains.runs, cuda_launch.launch = before  # type: ignore[assignment]


def ranks() -> None:
    """The two halves of each pass where ranks share a sequence; what another one would send is this one's own."""
    from lightnet_kernels import triton_scan_ranks

    parts, theta = [drawn(1, 2048, 1, 128) for _ in range(3)], torch.rand(1, 128).requires_grad_()
    lengths = torch.tensor([2048])
    options: dict[str, Any] = {"activation": True, "bounds": None, "lengths": lengths, "prefix": lambda state: state}
    back(triton_scan_ranks.causal_scan(*parts, theta=theta, **options))


def decoding() -> None:
    from lightnet_kernels import additive_scan, decode_state, decode_step

    parts, theta = [drawn(2, 3, 2, 128).detach() for _ in range(3)], torch.rand(2, 128)
    _, state = additive_scan(*parts, theta=theta, return_state=True, backend="torch")
    decode_step(decode_state(state, theta, BF16), *(x[:, 0] for x in parts), activation="silu", backend="triton")


def companions() -> None:
    from lightnet_kernels import add_norm, gated_norm, norm, swiglu

    x, other, weight = drawn(40, 256), drawn(40, 256), drawn(256, dtype=torch.float32)
    options: dict[str, Any] = {"kind": "rms", "eps": 1e-5, "backend": "triton"}
    back(norm(x, weight, **options), *add_norm(x, other, weight, **options))
    heads, gate, scale = drawn(40, 2, 128), drawn(40, 2, 128), drawn(2, 128, dtype=torch.float32)
    back(gated_norm(heads, gate, scale, **options), swiglu(x, other, backend="triton"))


def toeplitz() -> None:
    from lightnet_kernels import toeplitz_scan

    decay, gain = (torch.rand(64, 16).requires_grad_() for _ in range(2))
    for bidirectional in (False, True):
        back(toeplitz_scan(drawn(1, 300, 64), decay, gain, bidirectional=bidirectional, backend="triton"))


@triton.jit
def changes_type(x_ptr, COUNT: tl.constexpr):
    """What the interpreter takes, and the compiler does not: a value of a loop changes its shape."""
    at = tl.arange(0, 16)
    for _ in range(0, COUNT):
        at = tl.arange(0, 32)
    tl.store(x_ptr + at, 1.0)


@triton.jit
def holds_much(x_ptr, y_ptr, K: tl.constexpr):
    """Operands of one product that shared memory does not hold."""
    row, step = tl.arange(0, 64), tl.arange(0, K)
    x = tl.load(x_ptr + row[:, None] * K + step[None, :])
    tl.store(y_ptr + row[:, None] * 64 + row[None, :], tl.dot(x, tl.load(x_ptr + step[:, None] * 64 + row[None, :])))


REFUSED: dict[str, Callable[[], None]] = {
    "changes type": lambda: changes_type[(1,)](torch.zeros(32), COUNT=4),
    "too large": lambda: holds_much[(1,)](torch.zeros(2**16, dtype=BF16), torch.zeros(64, 64), K=1024),
}
CASES: dict[str, Callable[[], None]] = {
    "causal": scan,
    "causal, 96": lambda: scan(width=96),
    "causal, float32": lambda: scan(torch.float32, 64),
    "causal, float32, 128": lambda: scan(torch.float32),
    "causal, without LRPE": lambda: scan(lrpe=False),
    "spans": spans,
    "spans by CUDA": cuda_spans,
    "spans, without LRPE": lambda: spans(lrpe=False),
    "ranks": ranks,
    "decoding": decoding,
    "bidirectional": lambda: scan(width=72, causal=False),
    "bidirectional, 128": lambda: scan(causal=False),
    "bidirectional, 64": lambda: scan(width=64, tokens=100, causal=False),  # in one pass
    "bidirectional, 64 by 128": lambda: scan(width=64, value_width=128, causal=False),
    "bidirectional, 128 by 64": lambda: scan(value_width=64, causal=False),
    "bidirectional, coordinates": lambda: scan(causal=False, coordinates=torch.zeros(200, 2, dtype=torch.int64)),
    "bidirectional, mask": lambda: scan(causal=False, key_mask=torch.arange(200)[None] != 3),
    "bidirectional, segments": lambda: scan(causal=False, cu_seqlens=torch.tensor([0, 80, 200])),
    "bidirectional, states": lambda: scan(causal=False, return_state=True),
    "bidirectional, float32": lambda: scan(torch.float32, causal=False),
    "bidirectional, without LRPE": lambda: scan(causal=False, lrpe=False),
    "companions": companions,
    "toeplitz": toeplitz,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--card", type=int, choices=SHARED, default=HOPPER, help="its architecture")
    given = parser.parse_args()
    names = no_card_needed(given.card)
    for case in given.cases or CASES:
        before, began = len(names), time.monotonic()
        {**CASES, **REFUSED}[case]()
        print(f"{case}: {len(names) - before} kernels, {time.monotonic() - began:.0f} s", flush=True)
        assert len(names) > before, f"{case}: no kernel"
    return 0


if __name__ == "__main__":
    os._exit(main())
