"""`lightnet plan` held against real runs: memory and step time, predicted beside measured.

    python benchmarks/planner.py predict                      what is predicted, without a GPU; --output FILE keeps it
    python benchmarks/planner.py run --output FILE            every case that this machine has cards for
    python benchmarks/planner.py run --only 1b 1b-tensor      some of them
    python benchmarks/planner.py run --ranks 2                those of two cards
    python benchmarks/planner.py run --figures calibration.json --against benchmarks/planner-predicted-DATE.json
    python benchmarks/planner.py run --smoke                  two tiny cases, on a CPU if need be; the figures mean nothing

Each case is a few steps of the training engine on bytes of Python's standard library, in processes of its own; as many
at a time as there are cards for. Memory is the highest of `torch.cuda.max_memory_allocated` over the ranks, held
against the prediction without its reserve; time is the median of 20 steps (fewer where one takes more than a second and
a half) after the first six, which nothing waits for, and what a step consists of on the device is kept beside it.
`--against` adds what was predicted and committed before. Cases marked * are those of which that is asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from jobs import facts, run_job, side_by_side  # benchmarks/jobs.py, beside this file
from steps import PROFILED, run_engine

WARM, STEPS, FEWEST = 6, 20, 8
STEADY = 30.0  # seconds of timed steps that are enough: steps of more than a second and a half are timed less often
START = 90.0  # seconds in which a job is at its first step


@dataclass(frozen=True)
class Case:
    """One run: samples a step and of a micro-batch, tokens of a sample."""

    preset: str
    ranks: int
    batch: int
    micro: int
    length: int = 2048
    more: tuple[str, ...] = ()
    committed: bool = False

    def overrides(self) -> list[str]:
        return [
            f"data.sequence_length={self.length}", f"train.global_batch={self.batch}", f"train.micro_batch={self.micro}",
            "train.steps=1000", "optimizer.learning_rate=1e-4", *self.more,
        ]  # fmt: skip


def _parallel(**fields: object) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={str(value).lower()}" for key, value in fields.items())


CASES = {
    "150m": Case("pile_150m", 1, 8, 8),
    "379m": Case("pile_379m", 1, 8, 8),
    "379m-accumulated": Case("pile_379m", 1, 32, 16),
    "379m-long": Case("pile_379m", 1, 1, 1, 16384),
    "379m-no-lrpe": Case("lm/ablations/pile_379m_no_lrpe", 1, 12, 12, committed=True),
    "1b": Case("pile_1b", 1, 8, 8),
    "1b-recomputed": Case("pile_1b", 1, 16, 16, more=_parallel(recompute_every=1)),
    "2.9b-recomputed": Case("pile_2.9b", 1, 2, 2, more=_parallel(recompute_every=1)),
    "1b-data": Case("pile_1b", 2, 16, 8),
    "1b-zero3": Case("pile_1b", 2, 8, 4, more=_parallel(zero_stage=3)),
    "1b-tensor": Case("pile_1b", 2, 12, 12, more=_parallel(tensor=2), committed=True),
    "1b-pipeline": Case("pile_1b", 2, 16, 4, more=_parallel(pipeline=2)),
    "2.9b-shared": Case("pile_2.9b", 2, 4, 4, more=_parallel(tensor=2, tensor_sequence_parallel=True), committed=True),
    "2.9b-zero2": Case("pile_2.9b", 2, 4, 2, more=_parallel(zero_stage=2, recompute_every=1)),
    "379m-sequence": Case("pile_379m", 2, 1, 1, 32768, more=_parallel(sequence=2)),
    "379m-shared": Case("pile_379m", 2, 8, 8, more=_parallel(tensor=2, tensor_sequence_parallel=True), committed=True),
    "150m-tensor": Case("pile_150m", 2, 8, 8, more=_parallel(tensor=2), committed=True),
    "1b-sequence": Case("pile_1b", 2, 1, 1, 32768, more=_parallel(sequence=2), committed=True),
    "150m-sequence": Case("pile_150m", 2, 1, 1, 65536, more=_parallel(sequence=2), committed=True),
}
_TINY = ("model.layers=2", "model.width=64", "model.heads=4", "model.glu_width=90", "model.vocab_size=300")
SMOKE = {
    "tiny": Case("pile_150m", 1, 4, 2, 64, _TINY),
    "tiny-data": Case("pile_150m", 2, 4, 2, 64, _TINY, committed=True),
}


def predict(case: Case, figures: Path | None, gpu: str) -> dict[str, Any]:
    """{"allocated_bytes", "total_bytes", "step_seconds", ..} of the case's own layout and micro-batch."""
    from lightnet_llm.config import load_config
    from lightnet_llm.parallel.legality import choice_of, legal_layout
    from lightnet_llm.plan import load_hardware
    from lightnet_llm.plan.memory import Parts
    from lightnet_llm.plan.rows import worst
    from lightnet_llm.plan.step_time import step_time

    config, hardware = load_config(case.preset, case.overrides()), load_hardware(gpu, figures)
    layout, every = legal_layout(config, case.ranks), config.parallel.recompute_every
    parts, accumulation = Parts(config).of(choice_of(config), case.ranks), case.batch // (case.micro * layout.data)
    stage, memory = worst(parts, case.micro, every, accumulation, hardware)
    seconds = step_time(parts, case.micro, every, accumulation, hardware)
    return {
        "allocated_bytes": memory.allocated,
        "total_bytes": memory.total,
        "memory": {**memory.kinds(), "stage": stage, "peak": memory.peak},
        "step_seconds": seconds.total,
        "time": {**seconds.computation(), **{f"{axis} traffic": t for axis, t in seconds.communication.items()}},
    }


def measure(case: Case, cards: list[int], seconds: float = 0.0) -> dict[str, Any]:
    """Run a case, whose step is said to take so many seconds, on these cards; what was measured, or {"failed": why}."""
    steps = min(STEPS, max(FEWEST, int(STEADY / seconds))) if seconds else STEPS
    request = {"preset": case.preset, "overrides": case.overrides(), "warm": WARM, "steps": steps, "profile": True}
    return run_job(run_engine, request, cards, START + 3 * seconds * (WARM + steps + PROFILED))


def card_here(others: str = "h100") -> str:
    """Name of this machine's kind of card among the planner's; of ``others`` where it has none that is known."""
    import torch

    from lightnet_llm.plan.hardware import cards, load_hardware

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((key for key in cards() if load_hardware(key).card == name), others)


def run(arguments: argparse.Namespace, cases: dict[str, Case]) -> int:
    """Measure and compare; 1 where a case failed."""
    import torch

    have = torch.cuda.device_count()
    gpu = arguments.gpu
    before = json.loads(arguments.against.read_text())["cases"] if arguments.against else {}
    kept: dict[str, Any] = {}
    writing = Lock()
    possible = {name: case for name, case in cases.items() if case.ranks <= have or (not have and arguments.smoke)}
    began = time.time()

    def one(name: str, cards: list[int]) -> None:
        case = cases[name]
        predicted = predict(case, arguments.figures, gpu)
        measured = measure(case, cards, predicted["step_seconds"])
        with writing:
            kept[name] = {
                "case": vars(case) | {"more": list(case.more)},
                "predicted": predicted,
                "before": before.get(name),
                "measured": measured,
            }
            print(_row(name, kept[name]), flush=True)
            left = sorted({*cases} - {*kept})
            _write(arguments, {"cases": kept, "seconds": round(time.time() - began, 1), "left_out": left})

    print(HEAD, flush=True)
    side_by_side({name: case.ranks for name, case in possible.items()}, one)
    return int(any("failed" in row["measured"] for row in kept.values()))


def _write(arguments: argparse.Namespace, values: dict[str, Any]) -> None:
    if arguments.output:
        head = {**facts(), "gpu": arguments.gpu, "figures": str(arguments.figures or "shipped")}
        arguments.output.write_text(json.dumps({**head, **values}, indent=1) + "\n")


def _off(predicted: float, measured: float | None) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %" if measured else "-"


HEAD = """| case | ranks | GB predicted | measured | off | ms predicted | measured | off | committed before: GB, ms off |
|---|---|---|---|---|---|---|---|---|"""


def _row(name: str, row: dict[str, Any]) -> str:
    case, predicted, measured, before = row["case"], row["predicted"], row["measured"], row["before"]
    label = f"{name}{' *' if case['committed'] else ''} | {case['ranks']}"
    if "failed" in measured:
        return f"| {label} | {predicted['allocated_bytes'] / 1e9:.1f} | {measured['failed']} | | | | | |"
    memory, seconds = measured["allocated_bytes"] and max(measured["allocated_bytes"]), measured["step_seconds"]
    earlier = "-"
    if before:
        earlier = f"{_off(before['allocated_bytes'], memory)}, {_off(before['step_seconds'], seconds)}"
    return (
        f"| {label} | {predicted['allocated_bytes'] / 1e9:.1f} | {memory / 1e9 if memory else 0:.1f} | "
        f"{_off(predicted['allocated_bytes'], memory)} | {1e3 * predicted['step_seconds']:.0f} | {1e3 * seconds:.0f} | "
        f"{_off(predicted['step_seconds'], seconds)} | {earlier} |"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["predict", "run"])
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="only cases of so many ranks")
    parser.add_argument("--gpu", help="card to predict for (this machine's; elsewhere h100)")
    parser.add_argument("--figures", type=Path, help="file of lightnet plan --calibrate")
    parser.add_argument("--against", type=Path, help="file of an earlier predict")
    parser.add_argument("--smoke", action="store_true", help="two tiny cases")
    parser.add_argument("--output", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.gpu = arguments.gpu or card_here()
    cases = SMOKE if arguments.smoke else CASES
    unknown = [name for name in arguments.only or [] if name not in cases]
    if unknown:
        parser.error(f"no case '{unknown[0]}'; there are {', '.join(cases)}")
    cases = {
        name: case
        for name, case in cases.items()
        if (not arguments.only or name in arguments.only) and (not arguments.ranks or case.ranks in arguments.ranks)
    }
    if arguments.part == "run":
        return run(arguments, cases)
    predicted = {name: predict(case, arguments.figures, arguments.gpu) for name, case in cases.items()}
    _write(arguments, {"cases": predicted, "committed": [name for name, case in cases.items() if case.committed]})
    for name, one in predicted.items():
        mark = " *" if cases[name].committed else ""
        print(f"{name + mark:20} {one['allocated_bytes'] / 1e9:6.1f} GB  {1e3 * one['step_seconds']:7.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
