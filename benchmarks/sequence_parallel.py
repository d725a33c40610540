"""Sequence parallelism measured: weak scaling, bytes between ranks, the longest sequence on a card, a million tokens on two.

    python benchmarks/sequence_parallel.py weak --tokens 32768 65536 --ranks 1 2 4
    python benchmarks/sequence_parallel.py longest
    python benchmarks/sequence_parallel.py train --tokens 1048576 --ranks 2
    python benchmarks/sequence_parallel.py equal --tokens 524288 --ranks 1 2     the same losses on one card and on two

The whole 379M preset through the training engine, one sample a step, the bytes of Python's standard library as tokens.
Each number of ranks is a job of its own on this machine's first cards. Results are printed and written to --output. Steps of
``weak`` are timed as those of `training.py`: nothing waits between them, and three more are profiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs import facts, run_job  # benchmarks/jobs.py, beside this file

LEARNING_RATE = 3e-4


def job(arguments: argparse.Namespace, tokens: int, ranks: int, steps: int, seconds: float) -> dict[str, Any]:
    """Train ``steps`` steps of one sample of ``tokens`` on so many ranks; what rank 0 found, or its failure."""
    request = {
        "preset": arguments.preset, "overrides": overrides(arguments, tokens, ranks), "tokens": tokens, "steps": steps,
        "exchange": arguments.exchange, "warm_up": arguments.warm_up,
    }  # fmt: skip
    result: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "recompute": arguments.recompute}
    return {**result, **run_job(rank_main, request, list(range(ranks)), seconds)}


def timed_job(arguments: argparse.Namespace, tokens: int, ranks: int) -> dict[str, Any]:
    """The same, with steps that nothing waits for, and kernels by kind."""
    from steps import run_engine  # benchmarks/steps.py, which takes its text from here

    from lightnet_llm.config import load_config

    changed = overrides(arguments, tokens, ranks)
    request = {"preset": arguments.preset, "overrides": changed, "warm": 6, "steps": arguments.steps, "profile": True}
    row: dict[str, Any] = {"tokens": tokens, "ranks": ranks, "recompute": arguments.recompute}
    row |= run_job(run_engine, request, list(range(ranks)), arguments.seconds)
    if "step_seconds" in row:
        memory = row["allocated_bytes"]
        row["ms"], row["memory_gb"] = 1e3 * row["step_seconds"], memory and max(memory) / 1e9
        row["bytes_sent_per_layer"] = row["bytes_sent_per_step"] // load_config(arguments.preset, changed).model.layers
    return row


def overrides(arguments: argparse.Namespace, tokens: int, ranks: int) -> list[str]:
    """One sample of so many tokens a step, over so many ranks."""
    return [
        f"data.sequence_length={tokens}", "train.global_batch=1", "train.micro_batch=1", "train.tokens=null",
        "train.steps=1000", f"parallel.sequence={ranks}", f"parallel.recompute_every={arguments.recompute}",
        f"parallel.sequence_exchange={arguments.exchange}", f"optimizer.learning_rate={LEARNING_RATE}",
        *arguments.override,
    ]  # fmt: skip


def text(length: int) -> Any:
    """int64 [length]: bytes of the standard library's files, in order of name, from the start again where they end."""
    import torch

    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= length:
            break
    data = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).long()
    return data.repeat(-(-length // len(data)))[:length]


def rank_main(request: dict[str, Any]) -> dict[str, Any]:
    """One rank of one job."""
    import torch

    from lightnet_llm.config.load import load_config
    from lightnet_llm.parallel.layout import Groups, prepare_backend
    from lightnet_llm.parallel.legality import legal_layout
    from lightnet_llm.training.engine import build_engine

    tokens, ranks = request["tokens"], int(os.environ["WORLD_SIZE"])
    config = load_config(request["preset"], request["overrides"])
    device = prepare_backend()
    cuda = device.type == "cuda"
    engine = build_engine(config, Groups(legal_layout(config, ranks)), device)
    data = text(tokens * request["steps"] + 1)

    def batches() -> Iterator[dict[str, Any]]:
        for step in range(request["steps"]):
            window = data[step * tokens : (step + 1) * tokens + 1]
            yield {
                "input_ids": window[None, :-1],
                "labels": window[None, 1:],
                "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32),
                "sample_ids": torch.tensor([step]),
            }

    source, times, losses, norms, sent = batches(), [], [], [], []
    traffic = None if engine.clock.place is None else engine.clock.place.traffic
    for step in range(request["steps"]):
        engine.set_rate(min(1.0, (step + 1) / (request["warm_up"] or config.schedule.warmup_steps)))
        before = 0 if traffic is None else traffic.bytes
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = engine.train_step(source, step, 1)
        losses.append(float(engine.reduce_mean(loss)))
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        norms.append(engine.gradient_norm())
        sent.append(0 if traffic is None else traffic.bytes - before)
    assert all(math.isfinite(x) for x in losses), losses
    return {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "exchange": request["exchange"],
        "losses": losses,
        "grad_norms": norms,
        "seconds": times,
        "ms": 1e3 * statistics.median(times[min(3, len(times) - 1) :]),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "bytes_sent_per_step": sent[-1],  # of this rank, MD-TPE's one exchange included
        "bytes_sent_per_layer": sent[-1] // config.model.layers,
    }


def keep(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """What is known so far: a run that is killed leaves it."""
    if getattr(arguments, "kept", None):
        arguments.kept(rows)
    elif getattr(arguments, "output", None):
        found = {**facts(), "kind": arguments.kind, "rows": rows}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    """One line a job."""
    head = f"{row['ranks']} ranks x {row['tokens'] // row['ranks']:,} tokens = {row['tokens']:,}"
    if "failed" in row:
        print(f"{head}: {row['failed']}", flush=True)
        return
    memory = "" if row["memory_gb"] is None else f", {row['memory_gb']:.1f} GB"
    print(
        f"{head}: {row['ms']:.0f} ms a step{memory}, {row['bytes_sent_per_layer']:,} bytes a layer, "
        f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}",
        flush=True,
    )


def weak(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same tokens a rank on more ranks: time per step, and bytes that depend on neither."""
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens or [32768]:
        first: dict[str, Any] = {}
        for ranks in arguments.ranks:
            row = timed_job(arguments, tokens * ranks, ranks)
            rows.append(row)
            first = first or row
            if "ms" in row and "ms" in first:
                row["times_first"] = row["ms"] / first["ms"]
            keep(arguments, rows)
            show(row)
            if "breakdown" in row:
                print("    " + ", ".join(f"{name} {value:.1f}" for name, value in row["breakdown"].items()), flush=True)
            if "times_first" in row:
                print(f"    {row['times_first']:.3f} of the time on {first['ranks']}", flush=True)
    for ranks in arguments.ranks:
        bytes_ = {row["bytes_sent_per_layer"] for row in rows if row["ranks"] == ranks and "ms" in row}
        print(f"{ranks} ranks: bytes a layer {sorted(bytes_)}", flush=True)
    return rows


class Unclear(Exception):
    """A length neither trained nor ran out of memory, or time is up."""


def longest(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Longer and longer sequences on one card (or on --ranks) until one does not fit, to a sixteenth of the last step.

    What it finds is a row of its own, the last: ``longest``, and ``too_long``, the least that ran out of memory; each None
    where that is not known when the search ends, which ``failed`` then explains.
    """
    rows: list[dict[str, Any]] = []
    ranks, began = arguments.ranks[0], time.monotonic()
    found: dict[str, Any] = {"ranks": ranks, "longest": None, "too_long": None}

    def fits(tokens: int) -> bool:
        left = arguments.limit - (time.monotonic() - began)
        if left < min(60.0, arguments.seconds):
            raise Unclear(f"time is up before {tokens:,} tokens")
        rows.append(job(arguments, tokens, ranks, 2, min(arguments.seconds, left)))
        keep(arguments, rows)
        show(rows[-1])
        why = rows[-1].get("failed")
        if why not in (None, "out of memory"):
            raise Unclear(f"{tokens:,} tokens: {why}")
        found["too_long" if why else "longest"] = tokens
        return why is None

    size = (arguments.tokens or [524288])[0]
    try:
        if fits(size):
            while fits(2 * size):
                size *= 2
            low, high = size, 2 * size
        else:
            low, high = 0, size
        while high - low > max(size // 8, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    except Unclear as error:
        found["failed"] = str(error)
        print(f"the search ends: {error}", flush=True)
    shown = {key: "not known" if found[key] is None else f"{found[key]:,} tokens" for key in ("longest", "too_long")}
    print(f"longest on {ranks} cards: {shown['longest']}; does not fit: {shown['too_long']}", flush=True)
    rows.append(found)
    keep(arguments, rows)
    return rows


def train(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ten steps: the loss is finite and falls."""
    rows = []
    for tokens in arguments.tokens or [2**20]:
        for ranks in arguments.ranks:
            rows.append(job(arguments, tokens, ranks, arguments.steps or 10, arguments.seconds))
            keep(arguments, rows)
            show(rows[-1])
    return rows


def equal(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same steps on different numbers of ranks: the largest difference of losses and of norms."""
    rows = train(arguments)
    for row in rows[1:]:
        if "ms" in row and "ms" in rows[0]:
            row["loss_difference"] = max(abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True))
            pairs = zip(row["grad_norms"], rows[0]["grad_norms"], strict=True)
            row["norm_difference"] = max(abs(a / b - 1) for a, b in pairs)
            print(
                f"    losses within {row['loss_difference']:.1e}, norms within {row['norm_difference']:.1e}", flush=True
            )
    return rows


def main() -> int:
    """Run one kind of measurement; 1 if a job failed that was not meant to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["weak", "longest", "train", "equal"])
    parser.add_argument("--tokens", type=int, nargs="*", help="a rank (weak) or in all")
    parser.add_argument("--ranks", type=int, nargs="*", default=None)
    parser.add_argument("--steps", type=int, default=None, help="steps of each job (10; weak: 20)")
    parser.add_argument(
        "--warm-up", type=int, help="steps in which the rate rises to 3e-4 (1; for equal the preset's own: Adam's first steps "
        "are of the gradients' signs, and at a higher rate turn rounding of the smallest ones into differences of the loss)"
    )  # fmt: skip
    parser.add_argument("--recompute", type=int, default=1, help="parallel.recompute_every (1)")
    parser.add_argument("--exchange", default="auto", help="parallel.sequence_exchange")
    parser.add_argument("--preset", default="lm/pile_379m")
    parser.add_argument("--override", nargs="*", default=[], help="further key=value")
    parser.add_argument("--seconds", type=float, default=400, help="limit of one job")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds in which the search for the longest ends"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or {"weak": [1, 2], "equal": [1, 2], "train": [2]}.get(arguments.kind, [1])
    if arguments.kind == "weak":
        arguments.steps = arguments.steps or 20
    arguments.warm_up = arguments.warm_up or (0 if arguments.kind == "equal" else 1)
    rows = {"weak": weak, "longest": longest, "train": train, "equal": equal}[arguments.kind](arguments)
    keep(arguments, rows)  # with the comparisons that follow
    return int(any("failed" in row for row in (rows[-1:] if arguments.kind == "longest" else rows)))


if __name__ == "__main__":
    sys.exit(main())
