"""Zero-shot evaluation measured: ours against `lm_eval --model hf` on the same exported weights, whole tasks.

    python benchmarks/evaluation.py runs/demo --tasks sciq,arc_challenge,openbookqa
    python benchmarks/evaluation.py --preset wikitext103 --tokenizer data/demo --tasks openbookqa    initial weights

SOURCE is exported to a Hugging Face folder once, which both read, in fp32 on a CPU and bf16 on a GPU. The peer's batch size
is the best of --batch-sizes on the first --trial questions of each task. Then both run the whole task, in turn, --repeat
times; what counts is the least time of each, from requests to metrics, the loading of models and data apart. Ours is what
`lightnet eval --tasks` does, what it spares lm-eval (`quick_harness`) included. --clock cpu counts processor seconds: what
a quiet machine would take, measured on a busy one; use it with one thread (OMP_NUM_THREADS=1). Scores must be equal:
accuracies exactly and log likelihoods within 1e-4 (fp32), relative to their size where they are above 10 nats. On a GPU
--dtype float32 shows that; in bf16, whose roundings may part two candidates, differences are printed and kept.
Exit 1: unequal scores, or a ratio of total times below --bar.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import lm_eval
import torch
import transformers
from lightnet_data.tokenizer import Tokenizer
from lightnet_eval.language_model import LightNetLM
from lightnet_eval.offline import write_tasks
from lightnet_eval.zero_shot import quick_harness
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import gather_weights, part_file, write_weights
from lightnet_llm.config import dump_config
from lightnet_llm.config.load import load_config
from lightnet_llm.convert import convert
from lightnet_llm.inference import load_model
from lightnet_llm.models import CausalLM, initialize

HERE = Path(__file__).resolve().parent


def untrained(preset: str, tokenizer: str, folder: Path) -> Path:
    """A run folder with a preset's initial weights."""
    config = load_config(preset, ["train.precision=fp32"])
    model = CausalLM(config.model)
    initialize(model, 0)
    run = folder / "run"
    place = store.begin(run / "checkpoints", 1)
    write_weights(part_file(place, 0, 0), *gather_weights(model, zero_stage=1, writes=True), 0, 1)
    (place / "config.yaml").write_text(dump_config(config))
    store.commit(run / "checkpoints", 1, {"format": 1, "state": {"step": 1}})
    Tokenizer.load(tokenizer).save(run)
    return run


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def score(
    model: Any, tasks: list[str], manager: TaskManager, limit: int | None, clock: str = "wall"
) -> tuple[float, dict[str, Any]]:
    """Seconds and lm-eval's results of tasks in one evaluation."""
    loaded, now = manager.load(tasks)["tasks"], CLOCKS[clock]
    start = now()
    with quick_harness() if isinstance(model, LightNetLM) else nullcontext():
        found = lm_eval.simple_evaluate(
            model, tasks=[loaded[task] for task in tasks], task_manager=manager, limit=limit, bootstrap_iters=0
        )
    return now() - start, found


def difference(one: dict[str, Any], other: dict[str, Any], task: str) -> float:
    """Largest difference of a request's log likelihoods, in nats, or relative to them where they are above 10."""
    worst = 0.0
    others = {sample["doc_id"]: sample for sample in other["samples"][task]}
    for sample in one["samples"][task]:
        pairs = zip(sample["filtered_resps"], others[sample["doc_id"]]["filtered_resps"], strict=True)
        worst = max([worst, *(abs(a[0] - b[0]) / max(1.0, abs(b[0]) / 10) for a, b in pairs)])
    return worst


def compared(here: dict[str, Any], there: dict[str, Any], name: str) -> dict[str, Any]:
    """A task's scores by us, and how they agree with the peer's."""
    ours, theirs = ({k: v for k, v in found["results"][name].items() if k.startswith("acc")} for found in (here, there))
    questions = here["n-samples"][name]["effective"]
    return {
        **ours,
        "questions": questions,
        "equal": ours == theirs,
        "largest_difference": difference(here, there, name),
    }


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What was found so far, after each task."""
    source = arguments.source or str(untrained(arguments.preset, arguments.tokenizer, folder))
    exported = folder / "hf"
    convert(source, str(exported), "hf")
    names = arguments.tasks.split(",")
    write_tasks(arguments.offline, names, folder)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    dtype = arguments.dtype or dtype
    ours = LightNetLM(loaded=load_model(exported, device, getattr(torch, dtype)))
    # Left alone the peer cuts requests to 2048 tokens, which some passages of BoolQ have with a small vocabulary.
    options = {"dtype": dtype, "device": device, "batch_size": 1, "max_length": 100_000, "trust_remote_code": True}
    peer: Any = HFLM(pretrained=str(exported), **options)
    rows = []
    for group in [names] if arguments.together else [[name] for name in names]:
        trials: dict[int, float] = {}
        score(peer, group, manager, 4)  # warm
        score(ours, group, manager, 4)
        for size in arguments.batch_sizes:
            peer.batch_size_per_gpu = size
            trials[size], _ = score(peer, group, manager, arguments.trial, arguments.clock)
        best = peer.batch_size_per_gpu = min(trials, key=lambda size: trials[size])
        mine, theirs = [], []
        for _ in range(arguments.repeat):
            seconds, here = score(ours, group, manager, arguments.limit, arguments.clock)
            mine.append(seconds)
            seconds, there = score(peer, group, manager, arguments.limit, arguments.clock)
            theirs.append(seconds)
        found = {name: compared(here, there, name) for name in group}
        rows.append(
            {
                "task": " ".join(group),
                "questions": sum(row["questions"] for row in found.values()),
                "ours_seconds": mine,
                "peer_seconds": theirs,
                "ratio": min(theirs) / min(mine),
                "peer_batch_size": best,
                "peer_trials": trials,
                "scores": found,
                "equal": all(row["equal"] for row in found.values()),
                "largest_difference": max(row["largest_difference"] for row in found.values()),
            }
        )
        row = rows[-1]
        print(
            f"{row['task']}: {row['questions']} questions, ours {min(mine):.1f} s, peer {min(theirs):.1f} s at batch "
            f"{best}: {row['ratio']:.2f}x; scores {'equal' if row['equal'] else 'UNEQUAL'}, "
            f"{row['largest_difference']:.1e} apart",
            flush=True,
        )
        total = sum(min(row["peer_seconds"]) for row in rows) / sum(min(row["ours_seconds"]) for row in rows)
        yield {
            "source": arguments.source or f"{arguments.preset}, initial weights",
            "parameters": sum(parameter.numel() for parameter in ours.model.parameters()),
            "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
            "dtype": dtype,
            "command": " ".join(["python", "benchmarks/evaluation.py", *sys.argv[1:]]),
            "clock": arguments.clock,
            "threads": torch.get_num_threads(),
            "load": os.getloadavg(),
            "versions": {
                "torch": torch.__version__,
                "lm_eval": lm_eval.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "date": time.strftime("%Y-%m-%d"),
            "limit": arguments.limit,
            "tasks": rows,
            "ratio": total,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a run folder, a checkpoint or an exported folder")
    parser.add_argument("--preset", default="wikitext103", help="in place of SOURCE: its shape with initial weights")
    parser.add_argument("--tokenizer", default="data/demo", help="with --preset: folder of a tokenizer")
    parser.add_argument("--tasks", default="sciq,arc_challenge,openbookqa")
    parser.add_argument("--offline", default="data/eval")
    parser.add_argument("--batch-sizes", type=lambda text: list(map(int, text.split(","))), default=[1, 8, 32, 64, 128])
    parser.add_argument("--trial", type=int, default=64, help="questions of a trial of a batch size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="[default: bfloat16 on a GPU, else float32]")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="seconds by the wall clock or of the processor"
    )
    parser.add_argument("--limit", type=int, help="questions of a task; a result with it is no result")
    parser.add_argument(
        "--together",
        action="store_true",
        help="all tasks in one evaluation, as a user runs them, not one after the other",
    )
    parser.add_argument("--bar", type=float, default=3.0)
    parser.add_argument("--output", help="JSON file [default: evaluation-DEVICE-DATE.json beside this script]")
    arguments = parser.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(
            arguments, Path(folder)
        ):  # written after each task: a run that is cut off leaves what it has
            name = "-".join(found["device"].lower().split())
            target = Path(arguments.output or HERE / f"evaluation-{name}-{found['date']}.json")
            target.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['parameters']:,} parameters: {found['ratio']:.2f}x in all, bar {arguments.bar}; {target}")
    tolerance = 1e-4 if found["dtype"] == "float32" else float("inf")
    right = all(row["equal"] and row["largest_difference"] < tolerance for row in found["tasks"]) or tolerance > 1
    sys.exit(0 if right and found["ratio"] >= arguments.bar else 1)


if __name__ == "__main__":
    main()
