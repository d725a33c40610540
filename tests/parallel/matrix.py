"""The parity matrix: every layout gives the run of one process (law 3 of a run).

    python -m tests.parallel.matrix [--ranks N] [--only TEXT ...] [--random N [--seed S]] [--jobs N]
                                  [--output FILE]

trains each layout for 20 steps beside one process and prints losses' and gradient norms' differences, the largest layouts
first; exit status 1 on a miss. On GPUs (NCCL) layouts that need more of them than there are (or than ``--ranks``) are left
out. ``--random`` draws layouts from all that are legal instead. When it is stopped (Ctrl-C, SIGTERM) it writes the page of
what has run, marked as incomplete.

The tiny model's norms use eps 1e-2: the norm after the scan divides by |o|, which passes through zero at
initialisation; with 1e-5 a rounding difference there is amplified tenfold a step, in one process under another
micro-batch just as between layouts.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from tests.conftest import ROOT, Ranks, steps_of, write_tiny
from tests.parallel.shards import SEEN

FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")  # the checksum is of ids and tokens that were read
STEPS, FALL, CLIP = 20, 1.0, 0.3
# Nats, and relative. bf16 rounds to 2^-8 at every operation, and layouts round in other places.
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-2)}

# Variants of the model; the base is causal, with TPE and LRPE, tied embeddings and a vocabulary of 251 ids.
VARIANTS: dict[str, list[str]] = {
    "": [],
    "dropout": ["model.dropout=0.2"],
    "independent decay": ["model.decay=independent", "optimizer.learning_rate=2e-3"],
    "layer norm, untied": ["model.norm=layer", "model.tie_embeddings=false"],
    "rms norm": ["model.norm=rms"],
    "no TPE": ["model.tpe=false"],
    "no LRPE": ["model.lrpe=false"],
    "bidirectional": ["model.causal=false"],
    "bidirectional, no TPE": ["model.causal=false", "model.tpe=false"],
    "masked": [
        "model.head=masked_lm",
        "model.causal=false",
        "model.vocab_size=252",
        "optimizer.learning_rate=1.5e-3",
    ],
}


@dataclass(frozen=True)
class Case:
    """One layout of one variant. ``every`` is recompute_every, ``shared`` tensor sequence parallelism."""

    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    data: int = 1
    zero: int = 1
    shared: bool = False
    every: int = 0
    variant: str = ""
    precision: str = "fp32"
    further: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.sequence * self.data

    @property
    def model(self) -> list[str]:
        """What one process trains as well."""
        return [
            f"optimizer.clip={CLIP}",
            *VARIANTS[self.variant],
            *(["train.precision=bf16"] if self.precision == "bf16" else []),
        ]

    @property
    def overrides(self) -> list[str]:
        values: dict[str, Any] = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "sequence": self.sequence,
            "zero_stage": self.zero,
            "recompute_every": self.every,
            "tensor_sequence_parallel": str(self.shared).lower(),
        }
        return [*self.model, *(f"parallel.{key}={value}" for key, value in values.items()), *self.further]

    @property
    def name(self) -> str:
        axes = {"tp": self.tensor, "pp": self.pipeline, "sp": self.sequence, "dp": self.data}
        parts = [f"{axis}{size}" for axis, size in axes.items() if size > 1] or ["one"]
        parts += [f"zero{self.zero}"] if self.zero != 1 else []
        parts += ["shared"] if self.shared else []
        parts += [f"recompute{self.every}"] if self.every else []
        parts += [self.variant.replace(", ", "_").replace(" ", "_")] if self.variant else []
        parts += ["bf16"] if self.precision == "bf16" else []
        return "-".join([*parts, *(item.split("=")[-1] for item in self.further)])


PREFIX, TIMED = ("parallel.sequence_exchange=prefix",), ("parallel.pipeline_partition=time",)
UNIFORM, MICRO, ODD = ("parallel.pipeline_partition=uniform",), ("train.micro_batch=4",), ("train.micro_batch=1",)

# In `make test`: one of each axis, and what is easily broken.
QUICK = [
    Case(tensor=2, shared=True, variant="dropout"),
    Case(tensor=2, pipeline=2),
    Case(pipeline=2, every=2, variant="layer norm, untied"),
    Case(sequence=3, variant="bidirectional"),
    Case(data=2, zero=3),
    Case(tensor=2, pipeline=2, sequence=2, shared=True, every=1, variant="rms norm"),
]
CASES = [
    *QUICK,
    Case(further=MICRO),
    Case(every=2),
    Case(data=2, zero=0),
    Case(data=2),
    Case(data=2, zero=2, variant="dropout"),
    Case(data=4, zero=3, every=1, further=ODD),
    Case(tensor=2),
    Case(tensor=4, every=1),
    Case(tensor=2, variant="dropout"),
    Case(tensor=2, variant="independent decay"),
    Case(tensor=2, variant="layer norm, untied"),
    Case(tensor=2, data=2, zero=0),
    Case(tensor=2, data=2, zero=2),
    Case(tensor=2, data=2, zero=3),
    Case(tensor=2, shared=True),
    Case(tensor=4, shared=True, variant="layer norm, untied"),
    Case(tensor=2, shared=True, every=2, variant="independent decay"),
    Case(tensor=2, data=2, zero=0, shared=True, variant="rms norm"),
    Case(tensor=2, data=2, zero=2, shared=True, variant="layer norm, untied"),
    Case(tensor=2, data=2, zero=3, shared=True, every=1, variant="rms norm"),
    Case(tensor=2, pipeline=2, shared=True, variant="dropout"),
    Case(tensor=2, sequence=2, shared=True, variant="dropout"),
    Case(tensor=4, pipeline=2, shared=True),
    Case(tensor=2, shared=True, variant="bidirectional"),
    Case(pipeline=2),
    Case(pipeline=4),
    Case(pipeline=4, every=1, variant="dropout"),
    Case(pipeline=2, data=2, variant="independent decay"),
    Case(pipeline=2, variant="no LRPE"),
    Case(pipeline=2, further=UNIFORM),
    Case(pipeline=4, further=TIMED),
    Case(pipeline=2, variant="bidirectional"),
    Case(sequence=2),
    Case(sequence=4, every=1),
    Case(sequence=4, further=PREFIX),
    Case(sequence=3),
    Case(sequence=2, variant="no TPE"),
    Case(sequence=2, variant="no LRPE"),
    Case(sequence=2, variant="independent decay"),
    Case(sequence=4, variant="bidirectional"),
    Case(sequence=2, variant="bidirectional, no TPE"),
    Case(sequence=2, zero=3, variant="dropout"),
    Case(sequence=2, data=2),
    Case(sequence=2, pipeline=2, variant="layer norm, untied"),
    Case(sequence=2, tensor=2, zero=3),
    Case(sequence=4, pipeline=2, variant="bidirectional", further=PREFIX),
    Case(tensor=2, pipeline=2, sequence=2),
    Case(tensor=2, pipeline=2, data=2, shared=True, variant="dropout"),
    Case(tensor=2, pipeline=4, every=2),
    Case(data=2, zero=3, variant="masked"),
    Case(tensor=2, pipeline=2, variant="masked"),
    Case(tensor=2, sequence=2, shared=True, variant="masked"),
    Case(data=2, zero=3, precision="bf16"),
    Case(data=2, precision="bf16"),
    Case(data=2, zero=2, precision="bf16"),
    Case(tensor=2, precision="bf16"),
    Case(tensor=2, shared=True, variant="rms norm", precision="bf16"),
    Case(pipeline=2, precision="bf16"),
    Case(sequence=2, precision="bf16"),
    Case(sequence=2, zero=3, precision="bf16"),
    Case(tensor=2, sequence=2, zero=3, shared=True, every=1, variant="bidirectional", precision="bf16"),
    Case(pipeline=2, data=2, precision="bf16"),
    Case(tensor=2, data=2, zero=3, precision="bf16"),
    Case(tensor=2, data=2, zero=3, shared=True, precision="bf16"),
]

# Faults and where they must be seen.
FAULTS = {
    "drop_row_reduction": Case(tensor=2),
    "drop_input_gradient_sum": Case(tensor=2),
    "double_replicated_norm": Case(tensor=2, variant="layer norm, untied"),
    "drop_state_merge": Case(sequence=2),
    "drop_shared_sum": Case(tensor=2, shared=True, variant="rms norm"),
    "drop_shared_reduction": Case(tensor=2, shared=True),
    "drop_masks_of_shards": Case(tensor=2, shared=True, variant="dropout"),
    "cut_shared_activations": Case(tensor=2, pipeline=2, shared=True),
}


def drawn(config: Path, count: int, seed: int, most: int) -> list[Case]:
    """Layouts drawn from all that are legal on 2 to ``most`` ranks, with what goes beside them."""
    from lightnet_llm.config import load_config
    from lightnet_llm.parallel.legality import choices, problem

    random = Random(seed)
    plain, sharing = (load_config(str(config), [f"parallel.tensor_sequence_parallel={x}"]) for x in ("false", "true"))
    legal = []
    for world in range(2, most + 1):
        for choice in choices(sharing, world):
            if problem(plain, choice, world) is None and (choice.tensor > 1 or not choice.tensor_sequence_parallel):
                legal.append((choice, world // choice.model))
    found = []
    for choice, data in random.sample(sorted(legal, key=str), min(count, len(legal))):
        further = [("parallel.sequence_exchange=prefix",)] if choice.sequence > 1 else []
        further += [TIMED, UNIFORM] if choice.pipeline > 1 else []
        found.append(
            Case(
                *(choice.tensor, choice.pipeline, choice.sequence, data, choice.zero_stage),
                shared=choice.tensor_sequence_parallel,
                every=random.choice([0, 0, 1, 2, 3]),
                variant=random.choice(list(VARIANTS)),
                precision=random.choice(["fp32", "fp32", "bf16"]),
                further=random.choice([(), *further]),
            )
        )
    return found


@dataclass(frozen=True)
class Result:
    """What a case gave. ``problem`` is why it misses, or empty."""

    case: Case
    loss: float
    norm: float
    fall: float
    seconds: float
    problem: str


class Matrix:
    """Trains cases and compares; one process's runs are trained once per variant and precision."""

    def __init__(self, ranks: Ranks, config: Path, folder: Path):
        self.ranks, self.config, self.folder = ranks, config, folder
        self.known: dict[tuple[str, ...], dict[int, tuple[Any, ...]]] = {}
        self.locks: defaultdict[tuple[str, ...], threading.Lock] = defaultdict(threading.Lock)
        self.count = itertools.count(1)

    def get(self, overrides: list[str]) -> dict[int, tuple[Any, ...]]:
        """One process's loss, gradient norm and what it read, by step."""
        key = tuple(overrides)
        with self.locks[key]:
            if key not in self.known:
                rows = self.ranks.train(1, self.config, list(key), self.folder, f"base{next(self.count)}")
                self.known[key] = steps_of(rows, *FIELDS)
            return self.known[key]

    def run(self, case: Case, fault: str = "") -> Result:
        """Train a case, with a fault planted if one is named."""
        began = time.perf_counter()
        name = f"run{next(self.count)}"
        plant = f"check_shards,{fault}" if fault else "check_shards"
        run = steps_of(self.ranks.train(case.ranks, self.config, case.overrides, self.folder, name, plant), *FIELDS)
        base = self.get(case.model)
        logs = [(self.folder / f"{name}.log.rank{rank}").read_text() for rank in range(case.ranks)]
        loss, norm = differences(run, base)
        fall = base[1][0] - base[STEPS][0]
        return Result(case, loss, norm, fall, time.perf_counter() - began, _problem(case, base, logs, loss, norm, fall))


def differences(run: dict[int, tuple[Any, ...]], base: dict[int, tuple[Any, ...]]) -> tuple[float, float]:
    """Largest difference of losses, and relative of gradient norms."""
    assert list(run) == list(base) == list(range(1, STEPS + 1))
    assert all(run[step][2:] == base[step][2:] for step in base), "other samples were read"
    loss = max(abs(run[step][0] - base[step][0]) for step in base)
    norm = max(abs(run[step][1] / base[step][1] - 1) for step in base)
    return loss, norm


def _problem(case: Case, base: dict[int, Any], logs: list[str], loss: float, norm: float, fall: float) -> str:
    bound, norm_bound = BOUNDS[case.precision]
    if not fall > FALL:
        return "the loss must fall by a nat, or equality means little"
    if not all(row[1] > CLIP for row in base.values()):
        return "clipping must be active"
    silent = [rank for rank, text in enumerate(logs) if SEEN not in text]
    if silent:
        return f"ranks {silent} did not assert their shards"
    if not (loss < bound and norm < norm_bound):
        return f"loss {loss:.1e} (bound {bound:.0e}), gradient norm {norm:.1e} (bound {norm_bound:.0e})"
    return ""


# The table ---------------------------------------------------------------------------------------------------------
HEADER = (
    "| layout | ranks | TP | PP | SP | DP | ZeRO | shared | recompute | variant | dtype | loss | grad norm | falls | |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def line(result: Result) -> str:
    """One row of the table."""
    case = result.case
    axes = " | ".join(
        str(size) for size in (case.ranks, case.tensor, case.pipeline, case.sequence, case.data, case.zero)
    )
    variant = ", ".join(filter(None, (case.variant, *case.further)))
    options = f"{'yes' if case.shared else ''} | {case.every or ''} | {variant} | {case.precision}"
    figures = f"{result.loss:.1e} | {result.norm:.1e} | {result.fall:.2f} | {result.problem or 'ok'}"
    return f"| {case.name} | {axes} | {options} | {figures} |"


def page(rows: list[str], faults: list[str], where: str, seconds: float, command: str, left: int = 0) -> str:
    """The generated page. ``left`` counts what was not run."""
    import torch

    versions = f"torch {torch.__version__}, " + ", ".join(f"{x} {version(x)}" for x in ("deepspeed", "megatron-core"))
    text = [
        "# Parity of layouts",
        "",
        f"Made by `{command}`; do not edit. {datetime.date.today()}, {where}, Python {platform.python_version()}, "
        f"{versions}; {seconds / 60:.0f} minutes.",
        "",
        f"Each row trains the tiny model of the tests (4 blocks, width 64, 4 heads, vocabulary 251, GLU width 90, packed "
        f"documents) for {STEPS} steps under a layout and in one process. `loss` is the largest difference of a step's "
        "loss in nats, `grad norm` the largest relative one of its gradient norm, `falls` by how many nats the loss falls "
        f"in one process; clipping acts at every step. Bounds: fp32 {BOUNDS['fp32'][0]:.0e} nats and "
        f"{BOUNDS['fp32'][1]:.0e}, bf16 {BOUNDS['bf16'][0]:.0e} nats and {BOUNDS['bf16'][1]:.0e} (against one process in "
        "bf16). All ranks read the same samples as one process does, and assert the shapes of their parameters, "
        "optimiser states and activations, and the sizes of their groups. `shared` is "
        "`parallel.tensor_sequence_parallel`, `recompute` is `parallel.recompute_every`.",
        "",
        *([f"**Incomplete**: stopped before {left} of its layouts and faults had run.", ""] if left else []),
        *HEADER,
        *rows,
        "",
    ]
    if faults:
        text += [
            "Faults planted, which must be seen:",
            "",
            "| fault | layout | loss | grad norm | |",
            "|---|---|---|---|---|",
        ]
        text += [*faults, ""]
    return "\n".join(text)


def fault_line(fault: str, result: Result) -> str:
    """One row of the table of faults."""
    seen = "seen" if result.problem else "NOT SEEN"
    return f"| {fault} | {result.case.name} | {result.loss:.1e} | {result.norm:.1e} | {seen} |"


def train_case(matrix: Matrix, case: Case) -> str:
    """The row of a case, printed."""
    began = time.perf_counter()
    try:
        text = line(matrix.run(case))
    except AssertionError as error:
        text = f"| {case.name} | {case.ranks} | | | | | | | | | | | | | did not train |"
        print(error, file=sys.stderr, flush=True)
    print(f"{text} {time.perf_counter() - began:.0f} s", flush=True)
    return text


def train_fault(matrix: Matrix, fault: str) -> str:
    """The row of a planted fault, printed."""
    try:
        text = fault_line(fault, matrix.run(FAULTS[fault], fault))
    except AssertionError as error:
        text = f"| {fault} | {FAULTS[fault].name} | | | did not train |"
        print(error, file=sys.stderr, flush=True)
    print(text, flush=True)
    return text


def train_all(matrix: Matrix, cases: list[Case], faults: list[str], jobs: int) -> tuple[list[str], list[str]]:
    """Rows of cases and of faults, ``jobs`` at a time; those that have run when SIGTERM or Ctrl-C comes."""
    with ThreadPoolExecutor(jobs) as pool:
        for model in dict.fromkeys(tuple(case.model) for case in cases):
            # First, as kernels are compiled then: cases that start together would each compile the same ones.
            pool.submit(matrix.get, list(model))
        runs = {case: pool.submit(train_case, matrix, case) for case in sorted(cases, key=lambda case: -case.ranks)}
        planted = {fault: pool.submit(train_fault, matrix, fault) for fault in faults}
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        try:
            wait([*runs.values(), *planted.values()])
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
        rows, seen = ([x for x in found.values() if x.done() and not x.cancelled()] for found in (runs, planted))
        matrix.ranks.close()  # and so what runs yet
    order = [runs[case] for case in cases]
    return [x.result() for x in sorted(rows, key=order.index)], [x.result() for x in seen]


def _stop(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # `timeout` sends it twice
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """Run, print, write; returns the exit status."""
    import torch

    parser = argparse.ArgumentParser(description="Every layout against one process.")
    parser.add_argument("--ranks", type=int, help="leave out layouts of more ranks")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="layouts and faults whose name has one of these"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="so many drawn from all legal layouts instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--output", type=Path, help="write the page here")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, which share cores or GPUs")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    most = given.ranks or (torch.cuda.device_count() if gpu else 8)

    def wanted(case: Case, name: str = "") -> bool:
        named = (text in case.name or text in name for text in given.only)
        return case.ranks <= most and (not given.only or any(named))

    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, NCCL" if gpu else "CPU, gloo"
    ranks, began = Ranks(), time.perf_counter()
    print("\n".join(HEADER), flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        matrix = Matrix(ranks, write_tiny(folder), folder)
        cases = drawn(matrix.config, given.random, given.seed, most) if given.random else CASES
        cases = list(filter(wanted, cases))
        chosen = [] if given.random else [fault for fault, case in FAULTS.items() if wanted(case, fault)]
        rows, faults = train_all(matrix, cases, chosen, given.jobs)
    left = len(cases) + len(chosen) - len(rows) - len(faults)
    misses = sum(not text.endswith("| ok |") for text in rows) + sum(not text.endswith("| seen |") for text in faults)
    seconds = time.perf_counter() - began
    more = f", {left} not run" if left else ""
    print(f"{len(rows)} layouts and {len(faults)} faults, {misses} missed{more}, {seconds:.0f} s", flush=True)
    if given.output:
        command = (
            "make parity"
            if not (given.ranks or given.only or given.random or gpu)
            else "python -m tests.parallel.matrix"
        )
        (ROOT / given.output).write_text(page(rows, faults, where, seconds, command, left))
    return int(misses > 0 or left > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
