"""One layout of a run as well as it can be run: micro-batch, recomputation, memory and step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

from ..config.run import RunConfig
from ..parallel.legality import Choice
from .hardware import Hardware
from .memory import Memory, Part, Parts, distinct
from .step_time import StepTime, computing, step_time
from .traffic import Moved, traffic

GIB = 2**30
CLOSE = 0.05  # of a card's memory: who leaves less may not fit after all, because the prediction is off by as much


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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks by axis: tensor, pipeline, sequence, data."""
        return self.choice.tensor, self.choice.pipeline, self.choice.sequence, self.data

    @property
    def simplicity(self) -> tuple[object, ...]:
        """Fewest axes beside data, no recomputation, ZeRO 1, then the faster."""
        axes, stage = sum(size > 1 for size in self.sizes[:3]), self.choice.zero_stage
        shared = self.choice.tensor_sequence_parallel
        return axes, self.recompute_every > 0, abs(stage - 1), stage, shared, self.time.total


def best_way(
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
    best: tuple[float, int, int, StepTime] | None = None
    for micro, every in sorted(ways, key=lambda way: (-way[0], way[1])):  # most often the largest is the fastest
        if best is None or computing(held, micro, every, samples // micro, hardware) <= best[0]:
            time = step_time(held, micro, every, samples // micro, hardware)
            if best is None or (time.total, micro, every) < best[:3]:
                best = time.total, micro, every, time
    assert best is not None
    return best[1:]


def row_of(
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
    micro, every, time = best_way(held, micros, every_way, samples, hardware)
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

    def needed(micro_batch: int) -> int:
        return worst(held, micro_batch, every, len(held), hardware)[1].total

    if needed(1) > hardware.memory_bytes:
        return 0
    low = 1
    while needed(2 * low) <= hardware.memory_bytes:
        low *= 2
    return low + bisect_right(range(low + 1, 2 * low), hardware.memory_bytes, key=needed)
