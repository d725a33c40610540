"""Three-dimensional parallelism on the GPUs of one host: parity, speed beside the plan, scaling, the longest sequence, moves.

    python benchmarks/eight_gpus.py show                       what each part would run, without a GPU
    python benchmarks/eight_gpus.py parity                     twenty steps of each layout against one GPU
    python benchmarks/eight_gpus.py speed --presets pile_1b pile_2.9b
    python benchmarks/eight_gpus.py layouts --presets pile_1b  every kind of axes that fits: what to choose
    python benchmarks/eight_gpus.py buckets --presets pile_1b  ZeRO 2 and 3 by sizes of buckets
    python benchmarks/eight_gpus.py scaling | longest | moves

Each part takes at most ten minutes (layouts and buckets with one preset). ``--gpus`` (all of this machine's; 8, 4 or 2) sets the
layouts; ``--output FOLDER`` keeps a JSON file a part, with date, cards and versions. Exit status 1 where a layout differs, a
job fails or a move is not exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import planner  # noqa: E402  (benchmarks/planner.py, beside this file)
import sequence_parallel  # noqa: E402
from jobs import facts, side_by_side  # noqa: E402

from tests.parallel.matrix import HEADER, Case, Matrix, line  # noqa: E402

MOST = 4  # micro-batches of a timed step among pipeline stages, elsewhere one: a preset's own batch takes a quarter of a minute
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


def timed(preset: str, gpus: int, gpu: str, others: int = 2) -> dict[str, planner.Case]:
    """The layout that the planner recommends and ``others`` of other axes that fit, the fastest of each first."""
    from lightnet_llm.config import load_config
    from lightnet_llm.plan import load_hardware, plan

    found = plan(load_config(preset), gpus, load_hardware(gpu))
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


def keep(given: argparse.Namespace, rows: list[Any], good: bool | None = None) -> None:
    """What is known so far: a part that is cut off leaves it; ``good`` is None until it ends."""
    if not (given.output and rows):
        return
    given.output.mkdir(parents=True, exist_ok=True)
    found = {**facts(), "part": given.part, "gpus": given.gpus, "good": good, "rows": rows}
    (given.output / f"eight-gpus-{given.part}.json").write_text(json.dumps(found, indent=1) + "\n")


def parity(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """Losses and gradient norms of every layout within the matrix's bounds, four layouts at a time."""
    from tests.conftest import Ranks, write_tiny

    rows: list[dict[str, Any]] = []
    print("\n".join(HEADER), flush=True)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(4) as pool:
        matrix = Matrix(Ranks(), write_tiny(Path(temporary)), Path(temporary))
        for found in pool.map(matrix.run, layouts(given.gpus)):
            print(line(found), flush=True)
            row = {"layout": found.case.name, "loss": found.loss, "grad_norm": found.norm, "problem": found.problem}
            rows.append(row)
            keep(given, rows)
    return rows, not any(row["problem"] for row in rows)


def jobs(given: argparse.Namespace, cases: dict[str, planner.Case]) -> tuple[list[Any], bool]:
    """Run each beside what the planner says of it, as many at a time as there are cards for."""
    rows: dict[str, dict[str, Any]] = {}

    def one(name: str, cards: list[int]) -> None:
        case = cases[name]
        predicted, measured = planner.predict(case, given.figures, given.gpu), planner.measure(case, cards)
        row = {"name": name, "ranks": case.ranks, "overrides": case.overrides(), "predicted": predicted}
        rows[name] = {**row, "measured": measured}
        if "failed" in measured:
            print(f"{name}: {measured['failed']}", flush=True)
        else:
            seconds, most = measured["step_seconds"], max(measured["allocated_bytes"])
            rows[name]["tokens_per_second"] = case.batch * case.length / seconds
            print(
                f"{name}: {rows[name]['tokens_per_second']:,.0f} tokens/s, {1e3 * seconds:.0f} ms a step "
                f"(predicted {1e3 * predicted['step_seconds']:.0f}), {most / 1e9:.1f} GB (predicted "
                f"{predicted['allocated_bytes'] / 1e9:.1f})",
                flush=True,
            )
        keep(given, list(rows.values()))

    side_by_side({name: case.ranks for name, case in cases.items()}, one)
    return [rows[name] for name in cases], not any("failed" in row["measured"] for row in rows.values())


def speed(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """Tokens a second and memory of each preset."""
    return jobs(given, {k: v for preset in given.presets for k, v in timed(preset, given.gpus, given.gpu).items()})


def layouts_beside(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """The same of the fastest layout of every kind of axes that fits: what to choose."""
    cases = {k: v for preset in given.presets for k, v in timed(preset, given.gpus, given.gpu, others=99).items()}
    return jobs(given, cases)


def buckets(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """Tokens a second by sizes of DeepSpeed's buckets."""
    return jobs(given, {k: v for preset in given.presets for k, v in bucketed(preset, given.gpus).items()})


def scaling(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """Tokens a second from one card to all."""
    rows, good = jobs(given, growing(given.gpus))
    first = {
        row["name"].split()[0]: row["tokens_per_second"]
        for row in rows
        if row["ranks"] == 1 and "tokens_per_second" in row
    }
    for row in rows:
        kind = row["name"].split()[0]
        if "tokens_per_second" in row and kind in first:
            row["times_one"] = row["tokens_per_second"] / first[kind]
            print(f"{row['name']}: {row['times_one']:.2f} times one card", flush=True)
    return rows, good


def longest(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """The longest sequence that the 379M preset trains on with sequence parallelism over all cards."""
    arguments = argparse.Namespace(
        tokens=[2**19 * given.gpus], ranks=[given.gpus], steps=2, recompute=1, exchange="auto",
        preset="lm/pile_379m", override=[], seconds=150,
    )  # fmt: skip
    rows = sequence_parallel.longest(arguments)
    return rows, any("failed" not in row for row in rows)


def moves(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """Saved on all cards, resumed on a half and on a quarter: the losses of the run that never moved."""
    from tests.conftest import Ranks, steps_of, write_tiny

    ranks = Ranks()
    rows: list[dict[str, Any]] = []
    common = ["train.resume=auto", "validation.interval=0", *MICRO]
    start = ["parallel.zero_stage=3"] if given.gpus < 4 else ["parallel.tensor=2", "parallel.pipeline=2"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = write_tiny(folder)
        still = steps_of(ranks.train(1, tiny, common, folder, "still"), "loss", "samples")
        for count in [count for count in (given.gpus // 2, given.gpus // 4) if count]:
            name = f"run{count}"
            ranks.train(given.gpus, tiny, [*common, *start, "train.stop_at_step=7"], folder, name)
            after = ["parallel.zero_stage=2"] if count == 1 else ["parallel.tensor=2", "parallel.zero_stage=1"]
            moved = steps_of(ranks.train(count, tiny, [*common, *after], folder, name), "loss", "samples")
            same = list(moved) == list(still) and all(moved[step][1] == still[step][1] for step in still)
            off = max(abs(moved[step][0] - still[step][0]) for step in still) if same else None
            rows.append({"from": [given.gpus, *start], "to": [count, *after], "same_samples": same, "loss": off})
            print(f"{given.gpus} {start} -> {count} {after}: losses within {off}, same samples: {same}", flush=True)
    return rows, all(row["same_samples"] and row["loss"] < 1e-5 for row in rows)


def show(given: argparse.Namespace) -> tuple[list[Any], bool]:
    """What would run."""
    for checked in layouts(given.gpus):
        print(f"parity  {checked.name}: {checked.ranks} ranks")
    cases = {k: v for preset in given.presets for k, v in timed(preset, given.gpus, given.gpu).items()}
    most = {k: v for preset in given.presets for k, v in timed(preset, given.gpus, given.gpu, others=99).items()}
    sizes = {k: v for preset in given.presets for k, v in bucketed(preset, given.gpus).items()}
    for part, chosen in (("speed", cases), ("layouts", most), ("buckets", sizes), ("scaling", growing(given.gpus))):
        for name, case in chosen.items():
            predicted = planner.predict(case, given.figures, given.gpu)
            memory, seconds = predicted["allocated_bytes"] / 1e9, predicted["step_seconds"]
            rate = case.batch * case.length / seconds
            print(f"{part:7} {name}: {memory:.1f} GB, {1e3 * seconds:.0f} ms, {rate:,.0f} tokens/s predicted")
    return [], True


PARTS = {
    "show": show, "parity": parity, "speed": speed, "layouts": layouts_beside, "buckets": buckets, "scaling": scaling,
    "longest": longest, "moves": moves,
}  # fmt: skip


def main() -> int:
    """Run one part."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gpus", type=int, help="how many to use (all)")
    parser.add_argument("--gpu", default="h100", help="kind of card, for the predictions")
    parser.add_argument("--presets", nargs="+", default=["pile_1b", "pile_2.9b"])
    parser.add_argument("--figures", type=Path, help="file of lightnet plan --calibrate")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    have = torch.cuda.device_count()
    given.gpus = given.gpus or have or 8
    if given.part != "show" and given.gpus > have:
        parser.error(f"{given.part} needs {given.gpus} GPUs and this machine has {have}; pass --gpus, or the part show")
    if given.gpus not in (2, 4, 8):
        parser.error(f"--gpus {given.gpus}: there are layouts for 2, 4 and 8")
    rows, good = PARTS[given.part](given)
    keep(given, rows, good)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
