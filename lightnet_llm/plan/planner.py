"""Every legal layout of a run on so many cards: does it fit, how long does a step take, and which to choose."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from tqdm import tqdm

from ..config.run import RunConfig
from ..errors import UserError
from ..parallel.legality import Choice, choice_of, choices, legal_layout, problem
from ..training.metrics import flops_per_token
from .hardware import Hardware
from .memory import Memory, Part, Parts, distinct, with_choice
from .step_time import StepTime, computing, step_time
from .traffic import Moved, traffic

GIB = 2**30
CLOSE = 0.05  # of a card's memory: who leaves less may not fit after all, because the prediction is off by as much
ALIKE = 1.02  # step times that differ by less are taken as equal, and the simpler layout is preferred


@dataclass(frozen=True)
class Row:
    """One layout with the micro-batch and recomputation that make its step shortest, or that come nearest to fitting.

    Attributes:
        parameters: on each pipeline stage's ranks, padding included.
        stage: the pipeline stage that needs most memory; ``memory`` is its.
        moved: of the stage that sends most.
        refused: the limit that is passed, None where the layout fits.
        close: whether it fits with less than ``CLOSE`` of the memory to spare.
        block, block_again: bytes that a block keeps of a micro-batch, and one that is computed again.
        held, ways, hardware: what :attr:`largest_micro_batch` is worked out from.
    """

    choice: Choice
    data: int
    micro_batch: int
    recompute_every: int
    accumulation: int
    parameters: list[int]
    stage: int
    memory: Memory
    moved: list[Moved]
    time: StepTime
    refused: str | None
    close: bool
    block: int
    block_again: int
    held: list[Part] = field(repr=False, compare=False)
    ways: list[int] = field(repr=False, compare=False)
    hardware: Hardware = field(repr=False, compare=False)

    @cached_property
    def largest_micro_batch(self) -> dict[int, int]:
        """By ``parallel.recompute_every``; whatever the batch, and with a full pipeline: with fewer micro-batches than
        stages ``micro_batch`` may be more. 0: none fits."""
        return {every: largest_micro_batch(self.held, every, self.hardware) for every in self.ways}

    def name(self) -> str:
        """In words, such as ``tensor 2 x data 4, ZeRO 1``."""
        sizes = {key: getattr(self.choice, key) for key in ("tensor", "pipeline", "sequence")} | {"data": self.data}
        axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
        shared = " with shared tokens" if self.choice.tensor_sequence_parallel and self.choice.tensor > 1 else ""
        return f"{axes}{shared}, ZeRO {self.choice.zero_stage}"


@dataclass(frozen=True)
class Plan:
    """What was found for one number of cards.

    Attributes:
        rows: every legal layout, those that fit first, shortest step first.
        configured: the configuration's own, with its micro-batch and recomputation; None where it is not legal.
        problem: why not.
    """

    config: RunConfig
    hardware: Hardware
    world: int
    model_parameters: int
    rows: list[Row]
    configured: Row | None
    problem: str | None

    @cached_property
    def fitting(self) -> list[Row]:
        """Rows that fit."""
        return [row for row in self.rows if row.refused is None]

    @property
    def recommended(self) -> Row:
        """The simplest of the fastest that leave some memory, or of all where none does.

        Raises:
            UserError: none fits; names the limit.
        """
        if not self.fitting:
            raise UserError(self._none_fits())
        return min((row for row in self.roomy if row.time.total <= ALIKE * self.roomy[0].time.total), key=_simplicity)

    @cached_property
    def roomy(self) -> list[Row]:
        """Rows that fit with some memory to spare, all that fit where there is none."""
        return [row for row in self.fitting if not row.close] or self.fitting

    def tokens_per_second(self, row: Row) -> float:
        """Of the whole run."""
        return self.config.train.global_batch * self.config.data.sequence_length / row.time.total

    def utilisation(self, row: Row) -> float:
        """Model FLOP over the data sheet's, 0 to 1."""
        flops = flops_per_token(self.config.model, self.model_parameters) * self.tokens_per_second(row)
        return flops / (self.world * self.hardware.peak_flop_s)

    @property
    def hours(self) -> float | None:
        """Budget of a run that has one of time alone (``train.hours``), else None."""
        train = self.config.train
        return None if train.tokens or train.steps else train.hours

    def tokens(self, row: Row) -> int:
        """Budget of the run, or what a layout comes to in its hours."""
        train, hours = self.config.train, self.hours
        if hours is not None:
            return int(3600 * hours * self.tokens_per_second(row))
        return train.tokens or (train.steps or 0) * train.global_batch * self.config.data.sequence_length

    def days(self, row: Row) -> float:
        """To the end of the budget, without saving and validation."""
        return self.tokens(row) / self.tokens_per_second(row) / 86400 if self.hours is None else self.hours / 24

    def overrides(self, row: Row) -> list[str]:
        """What of the configuration has to change for a layout, as arguments of ``lightnet train``."""
        config = self.config
        now = {f"parallel.{key}": value for key, value in vars(choice_of(config)).items()}
        now |= {
            "parallel.recompute_every": config.parallel.recompute_every,
            "train.micro_batch": config.train.micro_batch,
        }
        new = {f"parallel.{key}": value for key, value in vars(row.choice).items()}
        new |= {"parallel.recompute_every": row.recompute_every, "train.micro_batch": row.micro_batch}
        return [f"{key}={str(value).lower()}" for key, value in new.items() if value != now[key]]

    def reason(self) -> str:
        """Why the recommended layout, in one sentence."""
        row = self.recommended
        others = [other for other in self.roomy if _sizes(other) != _sizes(row)]
        room = f" with {100 * CLOSE:.0f} % of the memory to spare" if not row.close else ""
        start = f"of {len(self.roomy)} layouts that fit{room} ({len(self.rows)} are legal) {row.name()} has the shortest step"
        if self.roomy[0] is not row:
            start = (
                f"{row.name()} is the simplest of those within 2 % of the shortest step ({len(self.roomy)} fit{room})"
            )
        if row.close:
            start = f"no layout leaves {100 * CLOSE:.0f} % of the memory free, so try it before you trust it; {start}"
        if not others:
            return f"{start}, {row.time.total:.3g} s."
        other = others[0]
        more = other.time.total / row.time.total - 1
        what, seconds = max(_differences(row, other).items(), key=lambda item: item[1], default=("", 0.0))
        why = f", most of it {what} (+{seconds:.2g} s)" if seconds > 0 and more > 0 else ""
        longer = (
            f"{100 * more:.1f} % longer{why}"
            if more >= 5e-4
            else "as long"
            if more > -5e-4
            else f"{-100 * more:.1f} % less"
        )
        return f"{start}, {row.time.total:.3g} s; {other.name()}, the next in other sizes, takes {longer}."

    def _none_fits(self) -> str:
        least = min(self.rows, key=lambda row: row.memory.total)
        text = f"no layout of this run fits {self.world} x {self.hardware.key}: the smallest, {least.name()}, {least.refused}"
        parts = Parts(self.config)
        for times in (2, 4, 8, 16, 32, 64):
            more = find(self.config, self.world * times, self.hardware, parts)
            if more is not None and more.fitting:
                return f"{text}; it fits from --gpus {self.world * times} on, as {more.recommended.name()}"
        return f"{text}; use a smaller data.sequence_length or a card with more memory"


def find(
    config: RunConfig,
    world: int,
    hardware: Hardware,
    parts: Parts | None = None,
    wanted: Callable[[Choice], bool] | None = None,
) -> Plan | None:
    """The plan on ``world`` cards, or None where no layout is legal.

    Args:
        parts: of the same model, to share what was worked out for another number of cards.
        wanted: may leave choices out.
    """
    parts, hardware = parts or Parts(config), hardware.in_hosts_of(per_host(config, world, hardware))
    legal = list(legal_choices(config, world, wanted))
    rows = [
        _row(config, parts, choice, micros, world, hardware)
        for choice, micros in tqdm(
            legal, f"layouts on {world} cards", leave=False, delay=3, disable=None, file=sys.stderr
        )
    ]
    if not rows:
        return None
    rows.sort(
        key=lambda row: (
            row.refused is not None, row.time.total if row.refused is None else row.memory.total, _simplicity(row)
        )
    )  # fmt: skip
    own = choice_of(config)
    wrong = problem(config, own, world)
    configured = None
    if wrong is None:
        micro, every = config.train.micro_batch, config.parallel.recompute_every
        configured = _row(config, parts, own, [micro], world, hardware, [every])
    return Plan(config, hardware, world, parts.model_parameters, rows, configured, wrong)


def plan(config: RunConfig, world: int, hardware: Hardware) -> Plan:
    """As :func:`find`.

    Raises:
        UserError: no layout is legal, or none fits.
    """
    if config.model.head not in ("causal_lm", "masked_lm"):
        raise UserError(
            f"model.head: {config.model.head}: lightnet plan knows the memory and time of head: causal_lm and masked_lm"
        )
    zero = config.deepspeed.get("zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        given = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(given, dict) and given.get("device", "none") != "none":
            field = f"deepspeed.zero_optimization.{key}"
            raise UserError(
                f"{field}: lightnet plan does not know what lies outside the card, nor how long the way there takes; plan "
                f"without it ({field}=null), or try the run"
            )
    found = find(config, world, hardware)
    if found is None:
        legal_layout(config, world)
        raise AssertionError("a legal layout was not found")
    _ = found.recommended
    return found


def per_host(config: RunConfig, world: int, hardware: Hardware) -> int:
    """GPUs of a host: as many as the configuration and the card have, of several hosts all the same number."""
    most = min(config.launch.gpus_per_node, hardware.per_node)
    return most if world <= most else max(size for size in range(1, most + 1) if world % size == 0)


def legal_choices(
    config: RunConfig, world: int, wanted: Callable[[Choice], bool] | None = None
) -> Iterator[tuple[Choice, list[int]]]:
    """Layouts that are legal with some micro-batch, and these micro-batches, ascending.

    Sharing tokens is left out where there is nothing to share.
    """
    both = with_choice(config, replace(choice_of(config), tensor_sequence_parallel=True))
    batches = [config.train.global_batch, *(point.batch for point in config.train.batch_ramp)]
    common = math.gcd(*batches)
    trials = {micro: _with_micro(config, micro) for micro in _divisors(common)}
    for choice in choices(both, world):
        if choice.tensor == 1 and choice.tensor_sequence_parallel:
            continue
        if world % choice.model or common % (world // choice.model) or (wanted is not None and not wanted(choice)):
            continue
        micros = [m for m in _divisors(common // (world // choice.model)) if problem(trials[m], choice, world) is None]
        if micros:
            yield choice, micros


def _with_micro(config: RunConfig, micro_batch: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": micro_batch})})


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _best(
    held: list[Part], micros: list[int], every_way: list[int], samples: int, hardware: Hardware
) -> tuple[int, int, StepTime]:
    """Micro-batch, recomputation and step: the shortest of those that leave some memory, else that fit, else the smallest.
    A larger micro-batch needs more memory (in pipelines of very short rows up to 0.2 % less, which is not looked for)."""

    def needed(micro: int, every: int) -> int:
        return worst(held, micro, every, samples // micro, hardware)[1].total

    for limit in (_roomy(hardware), hardware.memory_bytes):
        fit = {every: bisect_right(micros, limit, key=lambda micro: needed(micro, every)) for every in every_way}
        ways = [(micro, every) for every, count in fit.items() for micro in micros[:count]]
        if ways:
            break
    else:
        ways = [(micros[0], min(every_way, key=lambda every: needed(micros[0], every)))]
    best: tuple[float, int, int] | None = None
    for micro, every in sorted(ways, key=lambda way: (-way[0], way[1])):  # most often the largest is the fastest
        if best is None or computing(held, micro, every, samples // micro, hardware) <= best[0]:
            score = step_time(held, micro, every, samples // micro, hardware).total, micro, every
            best = score if best is None else min(best, score)
    assert best is not None
    _, micro, every = best
    return micro, every, step_time(held, micro, every, samples // micro, hardware)


def _row(
    config: RunConfig,
    parts: Parts,
    choice: Choice,
    micros: list[int],
    world: int,
    hardware: Hardware,
    recomputes: list[int] | None = None,
) -> Row:
    """The best way to run one layout."""
    held, data = parts.of(choice, world), world // choice.model
    every_way = recomputes if recomputes is not None else sorted({0, 1, config.parallel.recompute_every})
    samples = config.train.global_batch // data
    micro, every, time = _best(held, micros, every_way, samples, hardware)
    accumulation = samples // micro
    stage, memory = worst(held, micro, every, accumulation, hardware)
    over = memory.total > hardware.memory_bytes
    moved = [traffic(part, micro, every, accumulation, hardware) for part in distinct(held)]
    refused = None
    if over:
        kind = memory.largest()
        refused = (
            f"needs {memory.total / GIB:.1f} GiB a card, which has {hardware.memory_bytes / GIB:.1f} GiB, with micro_batch "
            f"{micro} and recompute_every {every} ({kind} {memory.kinds()[kind] / GIB:.1f} GiB, peak in {memory.peak})"
        )
    return Row(
        choice, data, micro, every, accumulation, [part.parameters for part in held], stage, memory,
        max(moved, key=lambda stage: sum(one.bytes for one in stage)), time, refused,
        not over and memory.total > _roomy(hardware),
        held[0].sizes(micro).block.total, held[0].sizes(micro).again.total, held, every_way, hardware,
    )  # fmt: skip


def _roomy(hardware: Hardware) -> float:
    """Bytes up to which a layout leaves some memory."""
    return (1 - CLOSE) * hardware.memory_bytes


def worst(held: list[Part], micro_batch: int, every: int, accumulation: int, hardware: Hardware) -> tuple[int, Memory]:
    """The pipeline stage that needs most, and what it needs."""
    found = [(part.stage, part.memory(micro_batch, every, accumulation, hardware)) for part in distinct(held)]
    return max(found, key=lambda one: one[1].total)


def largest_micro_batch(held: list[Part], every: int, hardware: Hardware) -> int:
    """The largest that fits when the pipeline is full; 0 where not even 1 does."""

    def fits(micro_batch: int) -> bool:
        return worst(held, micro_batch, every, len(held), hardware)[1].total <= hardware.memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sizes(row: Row) -> tuple[int, ...]:
    return row.choice.tensor, row.choice.pipeline, row.choice.sequence, row.data


def _simplicity(row: Row) -> tuple[object, ...]:
    """Fewest axes beside data, no recomputation, ZeRO 1, then the faster."""
    axes = sum(size > 1 for size in _sizes(row)[:3])
    stage = row.choice.zero_stage
    return axes, row.recompute_every > 0, abs(stage - 1), stage, row.choice.tensor_sequence_parallel, row.time.total


def _differences(row: Row, other: Row) -> dict[str, float]:
    """Seconds that another layout's parts take more."""

    def named(one: Row) -> dict[str, float]:
        return {**one.time.computation(), **{f"{axis} traffic": t for axis, t in one.time.communication.items()}}

    mine, theirs = named(row), named(other)
    return {key: theirs.get(key, 0.0) - mine.get(key, 0.0) for key in {*mine, *theirs}}
