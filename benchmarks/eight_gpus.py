"""Three-dimensional parallelism on the GPUs of one host: parity, speed beside the plan, scaling, the longest sequence, moves.

    python benchmarks/eight_gpus.py show                       what each part would run, without a GPU
    python benchmarks/eight_gpus.py parity                     twenty steps of each layout against one GPU
    python benchmarks/eight_gpus.py speed                      tokens/s and memory of 1.0B and 2.9B, planned and measured
    python benchmarks/eight_gpus.py scaling                    379M on one card to all, weak and strong
    python benchmarks/eight_gpus.py longest                    longest sequence of 379M over all cards
    python benchmarks/eight_gpus.py moves                      saved on all cards, resumed on a half and on a quarter
    python benchmarks/eight_gpus.py layouts --presets pile_1b  every kind of axes that fits: what to choose
    python benchmarks/eight_gpus.py buckets --presets pile_1b  ZeRO 2 and 3 by sizes of buckets
    python benchmarks/eight_gpus.py all                        the first five of these, one after the other

Each part takes at most ten minutes (layouts and buckets with one preset). ``--gpus`` (all of this machine's; 8, 4 or 2) sets the
layouts. Each part keeps a JSON file in ``--output`` (benchmarks), named by part, presets, cards and time, with date, cards and
versions, after every row: a run that is cut off leaves what it had. Exit status 1 where a layout differs, a job fails or a move
is not exact.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import planner  # noqa: E402  (benchmarks/planner.py, beside this file)
import sequence_parallel  # noqa: E402
from eight_gpus_cases import MICRO, bucketed, growing, layouts, moved, search, show, timed  # noqa: E402
from jobs import facts, side_by_side  # noqa: E402

from tests.parallel.matrix import HEADER, Case, Matrix, line  # noqa: E402

MOVED = 1e-5  # nats


class Kept:
    """The file of a part, whole at any time.

    Args:
        name: of the part, with its presets where it has some.
    """

    def __init__(self, given: argparse.Namespace, name: str):
        self.head, self.given, self.lock = facts(), given, threading.Lock()
        card = re.sub("[^a-z0-9]+", "-", self.head["cards"][0].lower()).strip("-")
        when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S")
        self.path = given.output / f"eight-gpus-{name}-{card}-x{given.gpus}-{when}.json"

    def __call__(self, rows: list[Any], good: bool | None = None) -> None:
        """Write what is known; ``good`` is None until the part ends."""
        if not rows:
            return
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            found = {**self.head, "part": self.given.part, "gpus": self.given.gpus, "gpu": self.given.gpu, "good": good}
            beside = self.path.with_suffix(".partial")
            beside.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
            beside.replace(self.path)


def parity(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """Losses and gradient norms of every layout within the matrix's bounds; one that does not train is a row too."""
    from tests.conftest import Ranks, write_tiny

    rows: list[dict[str, Any]] = []
    print("\n".join(HEADER), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, ThreadPoolExecutor(given.jobs) as pool:
        matrix = Matrix(Ranks(), write_tiny(Path(temporary)), Path(temporary))

        def one(case: Case) -> None:
            row: dict[str, Any] = {"layout": case.name, "ranks": case.ranks}
            try:
                found = matrix.run(case)
            except (AssertionError, RuntimeError, OSError) as error:
                row["problem"] = f"did not train: {str(error)[-2000:]}"
                print(f"{case.name}: {row['problem']}", flush=True)
            else:
                row |= {"loss": found.loss, "grad_norm": found.norm, "seconds": found.seconds, "problem": found.problem}
                print(line(found), flush=True)
            rows.append(row)
            keep([*rows])

        matrix.get(layouts(given.gpus)[0].model)  # before all others: kernels are compiled once
        list(pool.map(one, layouts(given.gpus)))
    return rows, not any(row["problem"] for row in rows)


def jobs(given: argparse.Namespace, keep: Kept, cases: dict[str, planner.Case]) -> tuple[list[Any], bool]:
    """Run each beside what the planner says of it, as many at a time as there are cards for."""
    rows: dict[str, dict[str, Any]] = {}

    def one(name: str, cards: list[int]) -> None:
        case = cases[name]
        predicted = planner.predict(case, given.figures, given.gpu)
        measured = planner.measure(case, cards, predicted["step_seconds"])
        row = {"name": name, "ranks": case.ranks, "overrides": case.overrides(), "predicted": predicted}
        row |= {"measured": measured}
        if "failed" in measured:
            print(f"{name}: {measured['failed']}", flush=True)
        else:
            seconds, most = measured["step_seconds"], max(measured["allocated_bytes"])
            row["tokens_per_second"] = case.batch * case.length / seconds
            print(
                f"{name}: {row['tokens_per_second']:,.0f} tokens/s, {1e3 * seconds:.0f} ms a step "
                f"(predicted {1e3 * predicted['step_seconds']:.0f}), {most / 1e9:.1f} GB (predicted "
                f"{predicted['allocated_bytes'] / 1e9:.1f})",
                flush=True,
            )
        rows[name] = row
        keep(list(rows.values()))

    side_by_side({name: case.ranks for name, case in cases.items()}, one)
    return [rows[name] for name in cases], not any("failed" in row["measured"] for row in rows.values())


def speed(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """Tokens a second and memory of each preset."""
    return jobs(given, keep, {k: v for preset in given.presets for k, v in timed(preset, given).items()})


def layouts_beside(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """The same of the fastest layout of every kind of axes that fits: what to choose."""
    return jobs(given, keep, {k: v for preset in given.presets for k, v in timed(preset, given, others=99).items()})


def buckets(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """Tokens a second by sizes of DeepSpeed's buckets."""
    return jobs(given, keep, {k: v for preset in given.presets for k, v in bucketed(preset, given.gpus).items()})


def scaling(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """Tokens a second from one card to all."""
    rows, good = jobs(given, keep, growing(given.gpus))
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


def longest(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """The longest sequence that the 379M preset trains on with sequence parallelism over all cards."""
    arguments = search(given.gpus)
    arguments.kept = keep
    rows = sequence_parallel.longest(arguments)
    return rows, rows[-1]["longest"] is not None and "failed" not in rows[-1]


def moves(given: argparse.Namespace, keep: Kept) -> tuple[list[Any], bool]:
    """Saved on all cards, resumed on a half and on a quarter: the losses of the run that never moved."""
    from tests.conftest import Ranks, steps_of, write_tiny

    ranks = Ranks()
    rows: list[dict[str, Any]] = []
    common = ["train.resume=auto", "validation.interval=0", *MICRO]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        tiny = write_tiny(folder)
        still = steps_of(ranks.train(1, tiny, common, folder, "still"), "loss", "samples")
        for start, count, after in moved(given.gpus):
            name = f"run{count}"
            row: dict[str, Any] = {"from": [given.gpus, *start], "to": [count, *after]}
            try:
                ranks.train(given.gpus, tiny, [*common, *start, "train.stop_at_step=7"], folder, name)
                found = steps_of(ranks.train(count, tiny, [*common, *after], folder, name), "loss", "samples")
            except (AssertionError, RuntimeError, OSError) as error:
                row["problem"] = f"did not train: {str(error)[-2000:]}"
            else:
                same = list(found) == list(still) and all(found[step][1] == still[step][1] for step in still)
                off = max(abs(found[step][0] - still[step][0]) for step in still) if same else None
                row |= {"same_samples": same, "loss": off}
                row["problem"] = "" if off is not None and off < MOVED else "not the run that never moved"
            rows.append(row)
            keep(rows)
            print(f"{given.gpus} {start} -> {count} {after}: {row}", flush=True)
    return rows, not any(row["problem"] for row in rows)


PARTS = {
    "parity": parity, "speed": speed, "scaling": scaling, "longest": longest, "moves": moves, "layouts": layouts_beside,
    "buckets": buckets,
}  # fmt: skip
ALL = ("parity", "speed", "scaling", "longest", "moves")
OF_PRESETS = ("speed", "layouts", "buckets")


def run(part: str, given: argparse.Namespace) -> bool:
    """One part, with its file; whether all was good."""
    given.part = part
    presets = "-".join(Path(preset).name for preset in given.presets) if part in OF_PRESETS else ""
    keep = Kept(given, f"{part}-{presets}".strip("-"))
    rows, good = PARTS[part](given, keep)
    keep(rows, good)
    print(f"{part}: {'good' if good else 'NOT good'}; {keep.path}", flush=True)
    return good


def main() -> int:
    """Run one part, or all."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["show", *PARTS, "all"])
    parser.add_argument("--gpus", type=int, help="how many to use (all)")
    parser.add_argument("--gpu", help="kind of card, for the predictions (this machine's; elsewhere h100)")
    parser.add_argument("--presets", nargs="+", default=["pile_1b", "pile_2.9b"])
    parser.add_argument("--jobs", type=int, default=2, help="layouts of parity at a time, which share the cards (2)")
    parser.add_argument("--figures", type=Path, help="file of lightnet plan --calibrate")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks", metavar="FOLDER", help="(benchmarks)")
    given = parser.parse_args()
    have = torch.cuda.device_count()
    given.gpus, given.gpu = given.gpus or have or 8, given.gpu or planner.card_here()
    if given.part != "show" and given.gpus > have:
        parser.error(f"{given.part} needs {given.gpus} GPUs and this machine has {have}; pass --gpus, or the part show")
    if given.gpus not in (2, 4, 8):
        parser.error(f"--gpus {given.gpus}: there are layouts for 2, 4 and 8")
    if given.part == "show":
        show(given)
        return 0
    good = [run(part, given) for part in (ALL if given.part == "all" else (given.part,))]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
