"""The fast path against the plain one: the same run with this package's kernels and without any.

    python benchmarks/fast_and_plain.py --output FILE           one GPU or more, a job a card; some minutes
    python benchmarks/fast_and_plain.py --tiny                  the same path on a CPU, where both are the plain one

For each seed a model is trained twice from the same weights on the same bytes of Python's standard library, in bf16 by the
training engine: as it is, and with LIGHTNET_KERNELS=torch, by which every operator is PyTorch's and no block is recorded.
Exit 1 where a gradient norm of the first 20 steps differs by more than 1 %, or the mean over seeds of the held-out loss
after all steps by more than 0.01 nats.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import run_job, side_by_side  # benchmarks/jobs.py, beside this file
from sequence_parallel import text

FIRST, NORM_BOUND, LOSS_BOUND = 20, 0.01, 0.01
WARM_UP, HELD_OUT = 40, 16  # steps; micro-batches
TINY = ("model.layers=2", "model.width=64", "model.heads=4", "model.glu_width=90", "model.vocab_size=300")
PATHS = {"fast": "auto", "plain": "torch"}


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
    tokens = text((steps + HELD_OUT) * rows * length + 1) % config.model.vocab_size

    def batches(first: int, last: int) -> Iterator[dict[str, Any]]:
        for index in range(first, last):
            window = tokens[index * rows * length : (index + 1) * rows * length + 1]
            yield {
                "input_ids": window[:-1].view(rows, length),
                "labels": window[1:].view(rows, length),
                "cu_seqlens": torch.arange(0, rows * length + 1, length, dtype=torch.int32),
                "sample_ids": torch.arange(rows) + index * rows,
            }

    source, losses, norms = batches(0, steps), [], []
    began = time.perf_counter()
    for step in range(steps):
        engine.set_rate(min(1.0, (step + 1) / WARM_UP))
        losses.append(engine.train_step(source, step, rows))
        norms.append(engine.gradient_norm() if step < FIRST else None)
    trained = [float(loss) for loss in losses]
    seconds = time.perf_counter() - began
    held = float(engine.evaluate(batches(steps, steps + HELD_OUT), HELD_OUT)[0])
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "card": card, "torch": torch.__version__, "losses": trained, "norms": norms[:FIRST], "held_out": held,
        "seconds": seconds,
    }  # fmt: skip


def compare(found: dict[str, dict[str, Any]], seeds: list[int]) -> tuple[float, float]:
    """(largest relative difference of a norm, difference of the mean held-out losses in nats)."""
    norms = max(
        abs(a / b - 1)
        for seed in seeds
        for a, b in zip(found[f"fast {seed}"]["norms"], found[f"plain {seed}"]["norms"], strict=True)
    )
    means = {path: statistics.mean(found[f"{path} {seed}"]["held_out"] for seed in seeds) for path in PATHS}
    return norms, means["fast"] - means["plain"]


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
        "train.tokens=null", f"train.steps={given.steps}", "train.precision=bf16", "model.dropout=0",
        "optimizer.learning_rate=1e-3", *given.override,
    ]  # fmt: skip
    found: dict[str, dict[str, Any]] = {}

    def one(name: str, cards: list[int]) -> None:
        path, seed = name.split()
        request = {
            "preset": given.preset, "steps": given.steps, "overrides": [*overrides, f"train.seed={seed}"],
        }  # fmt: skip
        found[name] = run_job(rank_main, request, cards, given.seconds, LIGHTNET_KERNELS=PATHS[path])
        row = found[name]
        told = row.get("failed") or f"{row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}, held out {row['held_out']:.4f}"
        print(f"{name}: {told}" + (f", {row['seconds']:.0f} s" if "seconds" in row else ""), flush=True)
        if given.output:
            facts = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "arguments": sys.argv[1:],
            }
            given.output.write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")

    side_by_side({f"{path} {seed}": 1 for seed in given.seeds for path in ("plain", "fast")}, one)
    if any("failed" in row for row in found.values()):
        return 1
    norms, loss = compare(found, given.seeds)
    print(f"norms of {FIRST} steps within {norms:.2%} (bound 1 %); held-out loss {loss:+.4f} nats (bound 0.01)")
    return int(not (norms < NORM_BOUND and abs(loss) < LOSS_BOUND))


if __name__ == "__main__":
    sys.exit(main())
