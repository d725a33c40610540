"""Training steps measured: tokens a second of the presets, what a step consists of, and the time to the first one; peers beside.

    python benchmarks/training.py --output benchmarks/training-CARD-DATE.json        one GPU, some six minutes
    python benchmarks/training.py --only 379m 379m-packed start
    python benchmarks/training.py --only 379m --peers llama llama-compiled fla       peers of equal size, in the same call
    python benchmarks/training.py --smoke                                            tiny, on a CPU if need be

Ours: the training engine (DeepSpeed ZeRO-1, bf16, AdamW) on 16,384 tokens a step of Python's standard library: rows of 2,048,
``-packed`` with documents of 700 tokens in the mean, cut anew in each micro-batch, ``-long`` as one sequence; after six steps the
median of 20 that nothing waits for, and of three more under a profiler kernels by kind, and where the device pauses. ``start``:
from ``lightnet train`` of the 379M preset to its first step's line in the log, part by part, with empty caches of kernels. Peers,
with weights in bf16 and fused AdamW: Hugging Face's Llama with SDPA, the same compiled, and flash-linear-attention's LightNet,
which tunes itself first, its candidates compiled in threads; as large as ours within 1 %. Every job is
a process of its own, with --seconds of time, peers --peer-seconds.
Exit 1 where a job failed, or on an H100 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ROOT, facts, run_job, side_by_side  # benchmarks/jobs.py, beside this file
from sequence_parallel import text
from steps import run_engine, timed

WARM, STEPS, TOKENS = 6, 20, 16_384
TINY = [
    "model.layers=2", "model.width=64", "model.heads=4", "model.glu_width=90", "model.gate_rank=8", "model.tpe_rank=4",
    "model.vocab_size=300",
]  # fmt: skip
FIRST_STEP = 60.0  # seconds


@dataclass(frozen=True)
class Case:
    """A run: its micro-batch, the tokens of a sample, and the bar on an H100 in tokens a second."""

    preset: str
    micro: int
    bar: float | None = None
    length: int = 2048
    packed: bool = False
    more: tuple[str, ...] = ()


CASES = {
    "150m": Case("pile_150m", 8, 280_000),
    "150m-packed": Case("pile_150m", 8, 280_000, packed=True),
    "379m": Case("pile_379m", 8, 150_000),
    "379m-packed": Case("pile_379m", 8, 150_000, packed=True),
    "379m-long": Case("pile_379m", 1, length=TOKENS),
    "1b": Case("pile_1b", 8, 72_000),
    "1b-packed": Case("pile_1b", 8, 72_000, packed=True),
    "2.9b": Case("pile_2.9b", 2, 20_000),  # fits 80 GB without computing activations again
    "2.9b-packed": Case("pile_2.9b", 2, 20_000, packed=True),
}
PEERS = ("llama", "llama-compiled", "fla")


def overrides(case: Case, smoke: bool) -> tuple[list[str], int]:
    """And tokens a step."""
    length = case.length // 32 if smoke else case.length
    rows = TOKENS // case.length
    return [
        f"data.sequence_length={length}", f"train.global_batch={rows}", f"train.micro_batch={case.micro}", "train.steps=1000",
        "optimizer.learning_rate=1e-4", *case.more, *(TINY if smoke else []),
    ], rows * length  # fmt: skip


def peer_main(request: dict[str, Any]) -> dict[str, Any]:
    """A step of another library's model of ``parameters``, on as many tokens."""
    import torch
    from decoding import llama, wait

    from lightnet_llm.config import load_config
    from lightnet_llm.parallel.layout import prepare_backend

    config, device = load_config(request["preset"], request["overrides"]), prepare_backend()
    cuda, rows, length = device.type == "cuda", config.train.global_batch, config.data.sequence_length
    if request["peer"] == "fla":
        if cuda:
            from lightnet_kernels.bench.tuned import compile_candidates_together

            compile_candidates_together()
        model: Any = fla_lightnet(config, request["parameters"]).to(device, torch.bfloat16)
    else:
        model = llama(config, request["parameters"], length, device, torch.bfloat16)
    model = model.train().requires_grad_(True)
    parameters = sum(p.numel() for p in model.parameters())
    if not cuda:  # what compiles there takes longer than it saves
        request["peer"] = request["peer"].removesuffix("-compiled")
    run = torch.compile(model) if request["peer"].endswith("compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    ids = (text(rows * length) % config.model.vocab_size).view(rows, length).to(device)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = timed(step, request["warm"], request["steps"], request["profile"], cuda)
    wait(device)
    return {**found, "card": torch.cuda.get_device_name() if cuda else "cpu", "parameters": parameters}


def fla_lightnet(config: Any, parameters: int) -> Any:
    """flash-linear-attention's LightNet of our layers and width, its gated width such that parameters are ours."""
    import torch
    from fla.models import LightNetConfig, LightNetForCausalLM

    model = config.model

    def made(intermediate: int) -> Any:
        settings = LightNetConfig(
            vocab_size=model.vocab_size, hidden_size=model.width, num_hidden_layers=model.layers,
            intermediate_size=intermediate, tie_word_embeddings=model.tie_embeddings,
            max_position_embeddings=config.data.sequence_length,
        )  # fmt: skip
        return LightNetForCausalLM(settings)

    with torch.device("meta"):
        few, many = (sum(p.numel() for p in made(width).parameters()) for width in (64, 128))
    return made(max(64, 64 + 8 * round(64 * (parameters - few) / (many - few) / 8)))


def start(smoke: bool, seconds: float) -> dict[str, Any]:
    """Seconds from the command to the end of the first step, nothing compiled before."""
    import numpy as np
    from lightnet_data import manifest
    from lightnet_data.storage import indexed_dataset

    given, _ = overrides(CASES["379m"], smoke)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "data").mkdir()
        tokens = text(4 * TOKENS).numpy().astype(np.uint16)
        builder = indexed_dataset().IndexedDatasetBuilder(str(folder / "data" / "train.bin"), dtype=np.uint16)
        for document in np.array_split(tokens, 64):
            document[-1] = 0
            builder.add_document(document, [len(document)])
        builder.finalize(str(folder / "data" / "train.idx"))
        split = {"documents": 64, "tokens": len(tokens), "bytes": len(tokens)}
        head = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION}
        manifest.save(
            folder / "data", {**head, "tokenizer": {"vocab_size": 256, "eod_id": 0}, "splits": {"train": split}}
        )
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR")
        environment = {**os.environ, **{name: str(folder / name) for name in caches}, "CUDA_CACHE_DISABLE": "1"}
        command = [
            sys.executable, "-m", "lightnet_llm.cli", "train", CASES["379m"].preset, *given, f"data.path={folder / 'data'}",
            "train.steps=2", "train.tokens=null", "schedule.warmup_steps=1", f"train.output={folder / 'runs'}",
            "train.name=start", "validation.interval=0", "checkpoint.interval=0", "logging.interval=1",
            *(["--gpus", "1"] if _cards() else []),
        ]  # fmt: skip
        log, lines = folder / "log", folder / "runs" / "start" / "metrics.jsonl"
        began = time.perf_counter()
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
            took = None
            while took is None and process.poll() is None and time.perf_counter() - began < seconds:
                time.sleep(0.05)
                if lines.is_file() and any('"step": 1,' in line for line in lines.read_text().splitlines()):
                    took = time.perf_counter() - began
            if took is None:
                process.kill()
            process.wait()
        if took is None or process.returncode:
            said = log.read_text(errors="replace").splitlines()
            return {"failed": " | ".join(said[-3:])[-400:] or "time is up"}
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        parts = next((row["launch_seconds"] for row in rows if "launch_seconds" in row), None)
        return {"first_step_seconds": took, "launch_seconds": parts}


def _cards() -> int:
    import torch

    return torch.cuda.device_count()


def told(name: str, row: dict[str, Any]) -> str:
    """A line about a job."""
    if "failed" in row:
        return f"{name}: {row['failed']}"
    if name == "start":
        return f"start: {row['first_step_seconds']:.1f} s from the command to the end of the first step (bar {FIRST_STEP:.0f})"
    bar = f" (bar on an H100 {row['bar']:,.0f})" if row.get("bar") else ""
    line = f"{name}: {row['tokens_per_second']:,.0f} tokens/s{bar}, {1e3 * row['step_seconds']:.1f} ms"
    if row.get("utilisation"):
        line += f", {row['utilisation']:.1%} of the card's products"
    if row.get("breakdown"):
        line += "; " + ", ".join(f"{kind} {value:.1f}" for kind, value in row["breakdown"].items())
    return line


def missed(rows: dict[str, dict[str, Any]], card: str) -> list[str]:
    """Names of the jobs that failed or, on an H100, are below their bars; of a peer's failure nothing follows."""
    ours = {name: row for name, row in rows.items() if "@" not in name}
    found = [name for name, row in ours.items() if "failed" in row]
    if "H100" not in card:
        return found
    found += [name for name, row in ours.items() if row.get("bar") and row.get("tokens_per_second", 0.0) < row["bar"]]
    if "start" in ours and ours["start"].get("first_step_seconds", 0.0) > FIRST_STEP:
        found.append("start")
    both = [ours.get(name, {}).get("tokens_per_second") for name in ("379m", "379m-long")]
    if all(both) and abs(both[1] / both[0] - 1) > 0.05:
        found.append("379m-long, more than 5 % from 379m")
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, "start"], default=[*CASES, "start"], metavar="CASE")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="beside each case that is measured")
    parser.add_argument("--seconds", type=float, default=150, help="limit of one of our jobs")
    parser.add_argument("--peer-seconds", type=float, default=300, help="limit of a peer's")
    parser.add_argument("--smoke", action="store_true", help="tiny models; the figures mean nothing")
    parser.add_argument("--output", type=Path, metavar="FILE")
    given = parser.parse_args()
    from lightnet_llm.training.metrics import PEAK_FLOPS

    rows: dict[str, dict[str, Any]] = {}
    steps = {"warm": 1, "steps": 2} if given.smoke else {"warm": WARM, "steps": STEPS}

    def keep(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        print(told(name, row), flush=True)
        if given.output:
            given.output.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")

    def one(name: str, cards: list[int]) -> None:
        case = CASES[name]
        settings, tokens = overrides(case, given.smoke)
        request = {"preset": case.preset, "overrides": settings, "packed": case.packed, "profile": True, **steps}
        found = run_job(run_engine, request, cards, given.seconds)
        if "failed" not in found:
            found["tokens_per_second"] = tokens / found["step_seconds"]
            peak = next((rate for key, rate in PEAK_FLOPS.items() if key in found["card"]), None)
            found["utilisation"] = peak and found["flops_per_token"] * found["tokens_per_second"] / peak
        keep(name, {"bar": case.bar, **found})
        for peer in given.peers if "failed" not in found and not case.packed else []:
            asked = {**request, "peer": peer, "parameters": found["parameters"]}
            beside = run_job(peer_main, asked, cards, given.peer_seconds)
            if "failed" not in beside:
                beside["tokens_per_second"] = tokens / beside["step_seconds"]
            keep(f"{name} @ {peer}", beside)

    if "start" in given.only:
        keep("start", start(given.smoke, given.seconds))
    side_by_side({name: 1 for name in given.only if name != "start"}, one)
    card = next((row["card"] for row in rows.values() if "card" in row), "cpu")
    below = missed(rows, card)
    checked = "no bar missed" if "H100" in card else f"the bars are an H100's: not checked on {card}"
    print("missed: " + ", ".join(below) if below else f"nothing failed, {checked}")
    return int(bool(below))


if __name__ == "__main__":
    sys.exit(main())
