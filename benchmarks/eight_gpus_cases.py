"""What `eight_gpus.py` runs on two, four or eight cards."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import planner  # benchmarks/planner.py, beside this file

from tests.parallel.matrix import Case

MOST = 4  # micro-batches of a timed step among pipeline stages, elsewhere one: a preset's own batch takes a quarter of a minute
LIMIT = 540.0  # seconds in which the longest sequence is looked for
MICRO = ("train.micro_batch=1",)  # eight samples a step over eight ranks


def layouts(gpus: int) -> list[Case]:
    """The layouts that are checked against one GPU."""
    data = [Case(data=gpus, zero=zero, further=MICRO) for zero in (1, 2, 3)]
    if gpus >= 8:
        mixed = [
            Case(tensor=2, pipeline=2, data=2),
            Case(tensor=2, sequence=2, data=2),
            Case(tensor=4, pipeline=2),
            Case(sequence=8),
        ]
    elif gpus >= 4:
        mixed = [Case(tensor=2, pipeline=2), Case(tensor=2, sequence=2), Case(pipeline=2, data=2), Case(sequence=4)]
    else:
        mixed = [Case(tensor=2), Case(pipeline=2), Case(sequence=2)]
    return [*mixed, *data]


def timed(preset: str, given: argparse.Namespace, others: int = 2) -> dict[str, planner.Case]:
    """The layout that the planner recommends and ``others`` of other axes that fit, the fastest of each first."""
    from lightnet_llm.config import load_config
    from lightnet_llm.plan import load_hardware, plan

    gpus = given.gpus
    found = plan(load_config(preset), gpus, load_hardware(given.gpu, given.figures))
    rows, axes = [found.recommended], {_axes(found.recommended)}
    for row in found.fitting:
        if len(rows) <= others and _axes(row) not in axes:
            rows.append(row)
            axes.add(_axes(row))
    return {
        f"{preset} {row.name()}": planner.Case(
            preset, gpus, row.micro_batch * row.data * _accumulation(row), row.micro_batch, more=_options(row)
        )
        for row in rows
    }


def _accumulation(row: Any) -> int:
    return min(row.accumulation, MOST) if row.choice.pipeline > 1 else 1


def _axes(row: Any) -> tuple[bool, ...]:
    return row.choice.tensor > 1, row.choice.pipeline > 1, row.choice.sequence > 1, row.choice.zero_stage > 2


def _options(row: Any) -> tuple[str, ...]:
    choice = row.choice
    fields = {
        "tensor": choice.tensor, "pipeline": choice.pipeline, "sequence": choice.sequence,
        "zero_stage": choice.zero_stage, "recompute_every": row.recompute_every,
        "tensor_sequence_parallel": str(choice.tensor_sequence_parallel).lower(),
    }  # fmt: skip
    return tuple(f"parallel.{key}={value}" for key, value in fields.items())


def bucketed(preset: str, gpus: int) -> dict[str, planner.Case]:
    """ZeRO 2 and 3 with DeepSpeed's buckets of several sizes, sent beside the backward pass and after it."""
    found = {}
    for zero, size, beside in itertools.product((2, 3), (5_000_000, 50_000_000, 500_000_000), ("true", "false")):
        name = f"{preset} ZeRO {zero}, buckets of {size:,}, overlap_comm {beside}"
        more = (
            f"parallel.zero_stage={zero}", f"deepspeed.zero_optimization.overlap_comm={beside}",
            f"deepspeed.zero_optimization.reduce_bucket_size={size}",
            f"deepspeed.zero_optimization.allgather_bucket_size={size}",
        )  # fmt: skip
        found[name] = planner.Case(preset, gpus, 4 * gpus, 4, more=more)
    return found


def growing(gpus: int) -> dict[str, planner.Case]:
    """Data parallelism of the 379M preset: the same samples a rank, and the same samples in all."""
    counts = [count for count in (1, 2, 4, 8) if count <= gpus]
    weak = {f"weak {count}": planner.Case("pile_379m", count, 8 * count, 8) for count in counts}
    strong = {f"strong {count}": planner.Case("pile_379m", count, 8 * gpus, 8) for count in counts}
    return {**weak, **strong}


def search(gpus: int) -> argparse.Namespace:
    """How the longest sequence is looked for."""
    return argparse.Namespace(
        tokens=[2**19 * gpus], ranks=[gpus], steps=2, warm_up=1, recompute=1, exchange="auto",
        preset="lm/pile_379m", override=[], seconds=150, limit=LIMIT,
    )  # fmt: skip


def moved(gpus: int) -> list[tuple[list[str], int, list[str]]]:
    """Overrides of the run on all cards; ranks and overrides of the one that goes on."""
    start = ["parallel.zero_stage=3"] if gpus < 4 else ["parallel.tensor=2", "parallel.pipeline=2"]
    one, more = ["parallel.zero_stage=2"], ["parallel.tensor=2", "parallel.zero_stage=1"]
    return [(start, count, one if count == 1 else more) for count in (gpus // 2, gpus // 4) if count]


def show(given: argparse.Namespace) -> None:
    """What would run."""
    for checked in layouts(given.gpus):
        print(f"parity  {checked.name}: {checked.ranks} ranks")
    cases = {k: v for preset in given.presets for k, v in timed(preset, given).items()}
    most = {k: v for preset in given.presets for k, v in timed(preset, given, others=99).items()}
    sizes = {k: v for preset in given.presets for k, v in bucketed(preset, given.gpus).items()}
    for part, chosen in (("speed", cases), ("layouts", most), ("buckets", sizes), ("scaling", growing(given.gpus))):
        for name, case in chosen.items():
            predicted = planner.predict(case, given.figures, given.gpu)
            memory, seconds = predicted["allocated_bytes"] / 1e9, predicted["step_seconds"]
            rate = case.batch * case.length / seconds
            print(f"{part:7} {name}: {memory:.1f} GB, {1e3 * seconds:.0f} ms, {rate:,.0f} tokens/s predicted")
    begun = search(given.gpus)
    print(
        f"longest {begun.preset} over {given.gpus} ranks, from {begun.tokens[0]:,} tokens, for {begun.limit:.0f} s at most"
    )
    for start, count, after in moved(given.gpus):
        print(f"moves   {given.gpus} ranks {' '.join(start)} -> {count} ranks {' '.join(after)}")
