"""python -m lightnet_kernels.bench: the causal scan on this GPU, correctness first, then times, with PyTorch's
attention beside it. Writes one JSON file and exits with 1 on a wrong result or a missed bar.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .scan import additive_scan, choose_backend

# name: batch, tokens, LRPE, bars in ms (forward, forward + backward) on one H100 80 GB
CASES = {
    "causal B8 T2048": (8, 2048, False, 0.30, 1.1),
    "causal LRPE B8 T2048": (8, 2048, True, 0.45, 1.7),
    "causal B1 T16384": (1, 16384, False, None, None),
    "causal LRPE B1 T16384": (1, 16384, True, None, 1.9),
}
HEADS, WIDTH = 16, 128


def make(batch: int, tokens: int, lrpe: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random bf16 inputs (keys of standard deviation 2) and an upstream gradient."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(batch, tokens, HEADS, WIDTH, generator=generator, device="cuda").bfloat16()

    leaves = {"query": draw(), "key": 2 * draw(), "value": draw()}
    if lrpe:
        steps = torch.arange(HEADS * WIDTH, device="cuda") / (HEADS * WIDTH)
        leaves["theta"] = (10000.0**-steps).reshape(HEADS, WIDTH)
    return {name: x.requires_grad_() for name, x in leaves.items()}, draw()


def median_ms(call: Any, repeats: int = 30) -> float:
    for _ in range(5):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[repeats // 2]


def scan_errors(leaves: dict[str, torch.Tensor], grad: torch.Tensor) -> dict[str, float]:
    """Relative errors of the first sequence's first tokens against the PyTorch scan in float64."""
    tokens = min(2048, grad.shape[1])
    part = {n: x.detach() if n == "theta" else x.detach()[:1, :tokens] for n, x in leaves.items()}
    results = []
    for dtype in (None, torch.float64):
        inputs = {n: (x if dtype is None else x.to(dtype)).clone().requires_grad_() for n, x in part.items()}
        output = additive_scan(**inputs, backend="auto" if dtype is None else "torch")
        assert isinstance(output, torch.Tensor)
        grads = torch.autograd.grad(output, list(inputs.values()), grad[:1, :tokens].to(output.dtype))
        results.append([output.detach(), *grads])
    names = ["output", *leaves]
    return {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(names, results[0], results[1], strict=True)}


def measure(name: str) -> dict[str, Any]:
    batch, tokens, lrpe, bar_forward, bar_both = CASES[name]
    leaves, grad = make(batch, tokens, lrpe)
    digest = hashlib.sha256(b"".join(x.detach().float().cpu().numpy().tobytes() for x in leaves.values())).hexdigest()
    request = {"key": leaves["key"], "value": leaves["value"], "theta": leaves.get("theta"), "causal": True}
    backend = choose_backend("auto", leaves["query"], **request, options={}, initial_state=None, return_state=False)
    errors = scan_errors(leaves, grad)
    right = all(error < (5e-3 if n == "output" else 1e-2) for n, error in errors.items())

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return additive_scan(**leaves)

    def both() -> None:
        torch.autograd.grad(additive_scan(**leaves), list(leaves.values()), grad)

    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    both()
    extra = torch.cuda.max_memory_allocated() - held
    heads = [x.detach().transpose(1, 2).contiguous().requires_grad_() for n, x in leaves.items() if n != "theta"]
    upstream = grad.transpose(1, 2).contiguous()

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)

    def attention_forward() -> torch.Tensor:
        with torch.no_grad():
            return attention()

    result = {
        "case": name,
        "backend": backend,
        "errors": errors,
        "right": right,
        "forward_ms": median_ms(forward),
        "forward_backward_ms": median_ms(both),
        "sdpa_forward_ms": median_ms(attention_forward),
        "sdpa_forward_backward_ms": median_ms(lambda: torch.autograd.grad(attention(), heads, upstream)),
        "bar_forward_ms": bar_forward,
        "bar_forward_backward_ms": bar_both,
        "extra_memory_mib": extra / 2**20,
        "inputs_sha256": digest,
    }
    result["within_bars"] = all(
        bar is None or result[key] <= bar
        for key, bar in (("forward_ms", bar_forward), ("forward_backward_ms", bar_both))
    )
    return result


def copy_rate() -> float:
    """TB/s of a device copy, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lightnet_kernels.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder of the JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; the benchmark needs one")
        return 1
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "copy_tb_s": copy_rate(),
        "heads": HEADS,
        "width": WIDTH,
        "results": [],
    }
    print(f"{report['card']}, {versions}, copy {report['copy_tb_s']:.2f} TB/s")
    for name in CASES:
        row = measure(name)
        report["results"].append(row)
        worst = max(row["errors"].values())
        print(
            f"{name:24s} {row['backend']:7s} error {worst:.1e} {'right' if row['right'] else 'WRONG'}  forward "
            f"{row['forward_ms']:.3f} (bar {row['bar_forward_ms']})  both {row['forward_backward_ms']:.3f} (bar "
            f"{row['bar_forward_backward_ms']})  SDPA {row['sdpa_forward_ms']:.3f} / "
            f"{row['sdpa_forward_backward_ms']:.3f} ms  extra {row['extra_memory_mib']:.0f} MiB",
            flush=True,
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    card = "".join(c if c.isalnum() else "-" for c in report["card"].lower())
    path = arguments.output / f"scan-{card}-{report['date'][:10]}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if all(row["right"] and row["within_bars"] for row in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
