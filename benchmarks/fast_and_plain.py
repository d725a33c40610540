"""The fast path against the plain one: the same run with this package's kernels and without any.

    python benchmarks/fast_and_plain.py --output FILE           one GPU or more, a job a card; some minutes
    python benchmarks/fast_and_plain.py --tiny                  the same path on a CPU, where both are the plain one

For each seed a model is trained from the same weights on the same bytes of Python's standard library by the training engine:
in bf16 as it is, in bf16 with LIGHTNET_KERNELS=torch, by which every operator is PyTorch's and no block is recorded, and so in
fp32, which tells how far bf16 alone takes a run. Before that the gradient of 20 steps is computed four ways, with and without
kernels in bf16 and in fp32, from the same weights, which the fast path's gradient in bf16 moves on: two runs that part by a
rounding have other norms after some steps, whatever computes them.
Exit 1 where one of these 20 norms differs between the fast path and the plain one by more than 1 %, in fp32 or in bf16, or the
mean over seeds of the held-out loss after all steps, in bf16, by more than 0.01 nats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import facts, run_job, side_by_side  # benchmarks/jobs.py, beside this file
from sequence_parallel import text

FIRST, NORM_BOUND, LOSS_BOUND = 20, 0.01, 0.01
WARM_UP, HELD_OUT = 40, 16  # steps; micro-batches
TINY = ("model.layers=2", "model.width=64", "model.heads=4", "model.glu_width=90", "model.vocab_size=300")
PATHS = {"fast": "auto", "plain": "torch", "plain fp32": "torch"}  # LIGHTNET_KERNELS
WAYS = {"fast": "auto", "plain": "torch", "fast fp32": "auto", "plain fp32": "torch"}


def pieces(rows: int, length: int, first: int, last: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Batches ``first`` to ``last`` - 1."""
    import torch

    tokens = text(last * rows * length + 1) % vocab_size
    for index in range(first, last):
        window = tokens[index * rows * length : (index + 1) * rows * length + 1]
        yield {
            "input_ids": window[:-1].view(rows, length),
            "labels": window[1:].view(rows, length),
            "cu_seqlens": torch.arange(0, rows * length + 1, length, dtype=torch.int32),
            "sample_ids": torch.arange(rows) + index * rows,
        }


@contextmanager
def kernels(path: str) -> Iterator[None]:
    """LIGHTNET_KERNELS for a while, in a process that has read it before."""
    from lightnet_kernels import checks

    before = os.environ.get("LIGHTNET_KERNELS", "auto")
    try:
        os.environ["LIGHTNET_KERNELS"] = path
        checks._only_torch.cache_clear()
        yield
    finally:
        os.environ["LIGHTNET_KERNELS"] = before
        checks._only_torch.cache_clear()


def norms_main(request: dict[str, Any]) -> dict[str, Any]:
    """Norms of both paths' gradients, from the same weights at every step."""
    import torch

    from lightnet_llm.config import load_config
    from lightnet_llm.models import CausalLM, ForwardContext, initialize
    from lightnet_llm.models.parameters import spec_of
    from lightnet_llm.parallel.layout import prepare_backend

    config, device = load_config(request["preset"], request["overrides"]), prepare_backend()
    rows, length = config.train.global_batch, config.data.sequence_length

    def made(dtype: torch.dtype) -> CausalLM:
        model = CausalLM(config.model)
        initialize(model, config.train.seed)
        for parameter in model.parameters():
            if not spec_of(parameter).keep_fp32:
                parameter.data = parameter.data.to(dtype)
        return model.to(device).train()

    def gradient(model: CausalLM, batch: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
        with kernels(path):
            model.zero_grad(set_to_none=True)
            context = ForwardContext(cu_seqlens=batch["cu_seqlens"].to(device))
            logits = model(batch["input_ids"].reshape(1, -1).to(device), context).logits[
                0, :, : config.model.vocab_size
            ]
            torch.nn.functional.cross_entropy(logits.float(), batch["labels"].flatten().to(device)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def norm(grads: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([grad.float().norm() for grad in grads.values()]).norm())

    model, exact = made(torch.bfloat16), made(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.learning_rate, betas=(0.9, 0.95))
    found: dict[str, Any] = {way: [] for way in WAYS}
    for step, batch in enumerate(pieces(rows, length, 0, FIRST, config.model.vocab_size)):
        exact.load_state_dict(model.state_dict())  # the same weights, rounded to bf16
        grads = {}
        for way in WAYS:
            grads[way] = gradient(exact if way.endswith("fp32") else model, batch, WAYS[way])
            found[way].append(norm(grads[way]))
        if step == 0:
            found["weights"] = {
                name: {"norm": float(x.norm())}
                | {way: float((grads[way][name].float() - x).norm() / x.norm()) for way in WAYS if way != "plain fp32"}
                for name, x in grads["plain fp32"].items()
            }
        for name, parameter in model.named_parameters():
            parameter.grad = grads["fast"][name]
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * min(1.0, (step + 1) / WARM_UP)
        optimizer.step()
    return {
        **found,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def rank_main(request: dict[str, Any]) -> dict[str, Any]:
    """One run of one seed."""
    import time

    import torch

    from lightnet_llm.config import load_config
    from lightnet_llm.parallel.layout import Groups, prepare_backend
    from lightnet_llm.parallel.legality import legal_layout
    from lightnet_llm.training.engine import build_engine

    config, device = load_config(request["preset"], request["overrides"]), prepare_backend()
    engine = build_engine(config, Groups(legal_layout(config, 1)), device)
    rows, length, steps = config.train.global_batch, config.data.sequence_length, request["steps"]
    size = config.model.vocab_size
    source, losses = pieces(rows, length, 0, steps, size), []
    began = time.perf_counter()
    for step in range(steps):
        engine.set_rate(min(1.0, (step + 1) / WARM_UP))
        losses.append(engine.train_step(source, step, rows))
    trained = [float(loss) for loss in losses]
    seconds = time.perf_counter() - began
    held = float(engine.evaluate(pieces(rows, length, steps, steps + HELD_OUT, size), HELD_OUT)[0])
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "card": card, "torch": torch.__version__, "losses": trained, "held_out": held, "seconds": seconds,
    }  # fmt: skip


def told(row: dict[str, Any]) -> str:
    """A line about a job."""
    if "failed" in row:
        return str(row["failed"])
    if "losses" in row:
        losses = row["losses"]
        return f"{losses[0]:.4f} -> {losses[-1]:.4f}, held out {row['held_out']:.4f}, {row['seconds']:.0f} s"
    first = ", ".join(f"{way} {row[way][0] / row['plain fp32'][0] - 1:+.2%}" for way in WAYS if way != "plain fp32")
    worst = max(row["weights"], key=lambda name: row["weights"][name]["norm"] * row["weights"][name]["fast"])
    errors = ", ".join(f"{way} {row['weights'][worst][way]:.1%}" for way in WAYS if way != "plain fp32")
    return (
        f"norms of fast and plain apart by {apart(row, ''):.2%}, in fp32 {apart(row, ' fp32'):.4%}; plain bf16 from fp32 "
        f"{max(abs(a / b - 1) for a, b in zip(row['plain'], row['plain fp32'], strict=True)):.2%}; the first step's from fp32: "
        f"{first}; most at {worst}, whose gradient is off by: {errors}"
    )


def apart(row: dict[str, Any], precision: str) -> float:
    """Largest relative difference of a step's norms of the two paths."""
    return max(abs(a / b - 1) for a, b in zip(row["fast" + precision], row["plain" + precision], strict=True))


def compare(found: dict[str, dict[str, Any]], seeds: list[int]) -> tuple[float, float, dict[str, float]]:
    """(largest relative difference of a norm in bf16, the same in fp32, each path's mean held-out loss in nats)."""
    rows = [found[f"norms {seed}"] for seed in seeds]
    means = {path: statistics.mean(found[f"{path} {seed}"]["held_out"] for seed in seeds) for path in PATHS}
    return max(apart(row, "") for row in rows), max(apart(row, " fp32") for row in rows), means


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext103")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=300, help="limit of one run")
    parser.add_argument("--tiny", action="store_true", help="two layers, in seconds")
    parser.add_argument("--override", nargs="*", default=[], help="further key=value")
    parser.add_argument("--output", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.rows, given.length, given.override = 24, 2, 64, [*TINY, *given.override]
    overrides = [
        f"data.sequence_length={given.length}", f"train.global_batch={given.rows}", f"train.micro_batch={given.rows}",
        "train.tokens=null", f"train.steps={given.steps}", "model.dropout=0",
        "optimizer.learning_rate=1e-3", *given.override,
    ]  # fmt: skip
    found: dict[str, dict[str, Any]] = {}

    def one(name: str, cards: list[int]) -> None:
        kind, seed = name.rsplit(" ", 1)
        job, path = (norms_main, "auto") if kind == "norms" else (rank_main, PATHS[kind])
        precision = "fp32" if kind.endswith("fp32") else "bf16"
        request = {
            "preset": given.preset, "steps": given.steps,
            "overrides": [*overrides, f"train.seed={seed}", f"train.precision={precision}"],
        }  # fmt: skip
        found[name] = run_job(job, request, cards, given.seconds, LIGHTNET_KERNELS=path)
        print(f"{name}: {told(found[name])}", flush=True)
        if given.output:
            given.output.write_text(json.dumps({**facts(), "runs": found}, indent=1) + "\n")

    side_by_side(
        {f"{kind} {seed}": 1 for kind in ("norms", "plain", "fast", "plain fp32") for seed in given.seeds}, one
    )
    if any("failed" in row for row in found.values()):
        return 1
    norms, exact, means = compare(found, given.seeds)
    loss = means["fast"] - means["plain"]
    print(f"norms of {FIRST} steps within {norms:.2%} in bf16 and {exact:.4%} in fp32 (bound 1 %)")
    print(
        f"held-out loss {loss:+.4f} nats (bound 0.01); of plain bf16 to fp32 {means['plain'] - means['plain fp32']:+.4f}"
    )
    return int(not (max(norms, exact) < NORM_BOUND and abs(loss) < LOSS_BOUND))


if __name__ == "__main__":
    sys.exit(main())
