"""Seconds of a training step, from what a card was measured to do.

Device time of a micro-batch is the sum of its products (each at the rate of its size), scans, companions and passes over the
residual stream, each as measured alone, times what they take more together on a card under load; the host needs its own time
for every block, more of it with ZeRO-3's hooks, and the slower of the two counts. Pipeline stages run
accumulation + stages - 1 rounds of the slowest. Communication is added whole: the engines of this project do not overlap it
but for the scan's states.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from .activations import Work
from .hardware import Hardware
from .memory import Part, distinct
from .traffic import Moved, traffic

# Bytes read and written. Of a parameter's part: AdamW, norm with clipping, zeroing, new weights. Of each parameter and
# micro-batch: gradients added in float32, narrow ones zeroed.
UPDATE_BYTES, GATHERED_BYTES = 28 + 12 + 8, 16
# Where bf16's own optimiser steps: AdamW that clips, norm, new weights; a first gradient is copied, further ones are added.
BF16_UPDATE_BYTES, COPIED_BYTES, ADDED_BYTES = 32 + 4 + 6, 6, 10
PASSES = 12  # over the residual stream in a block: residual sums forward and backward, gradients that are added up
LANE = 64  # features of a head are padded to a multiple


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part, of the slowest pipeline stage.

    Attributes:
        products, scan, elementwise, loss, recompute: of the device over all micro-batches.
        waiting: for the host, where it is slower than the device.
        bubble: of the pipeline.
        optimizer: update, norm, clipping.
        communication: by axis.
    """

    products: float
    scan: float
    elementwise: float
    loss: float
    recompute: float
    waiting: float
    bubble: float
    optimizer: float
    communication: dict[str, float]

    @cached_property
    def total(self) -> float:
        """Of the step."""
        return sum(self.computation().values()) + sum(self.communication.values())

    def computation(self) -> dict[str, float]:
        """All but communication."""
        return {name: getattr(self, name) for name in COMPUTATION}

    def largest(self) -> tuple[str, float]:
        """The part, an axis's communication among them, that costs most beside the products."""
        parts = {**self.computation(), **{f"{axis} traffic": value for axis, value in self.communication.items()}}
        parts.pop("products")
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name]


COMPUTATION = [field.name for field in fields(StepTime) if field.name != "communication"]


def products_of_block(work: Work) -> list[tuple[int, int, int]]:
    """(tokens, in, out) of a block's products, forward."""
    model, tokens, width = work.model, work.tokens, work.model.width
    found = [
        (tokens, width, 3 * work.features), (work.own, width, model.gate_rank), (tokens, model.gate_rank, work.features),
        (tokens, work.features, width), (tokens, width, work.glu), (tokens, width, work.glu), (tokens, work.glu, width),
    ]  # fmt: skip
    if model.decay == "independent":
        found += [(work.own, width, model.decay_rank), (tokens, model.decay_rank, work.features)]
    return found


def _products(work: Work, hardware: Hardware) -> float:
    total = 0.0
    for tokens, width, out in products_of_block(work):
        flop = 2.0 * tokens * width * out
        total += flop / hardware.gemm_flop_s(flop)
    return total * (1.0 if work.element == 2 else 8.0)  # float32 without tensor cores: an eighth of bf16 or less


def _scan(work: Work, hardware: Hardware) -> float:
    model = work.model
    if model.mixer == "softmax":  # two products over half of all pairs, forward, and 2.5 times that backward
        flop = 3.5 * 2 * work.tokens * work.length * work.features * (1 if model.causal else 2)
        return flop / (0.5 * hardware.gemm_flop_s(flop))
    width = -(-model.head_width // LANE) * LANE if work.fused else model.head_width
    rate = (hardware.scan_lrpe_s if model.lrpe else hardware.scan_s) if work.fused else hardware.scan_torch_s
    # Sequence parallelism reads keys and values once more each way, but for the causal kernels.
    extra = 0.25 if work.states and not (work.fused and model.causal) else 0.0
    return rate * work.tokens * work.heads * width * (1.0 + extra)


def _elementwise(work: Work, hardware: Hardware) -> float:
    own, width = work.own, work.model.width
    stretch = work.residual / (own * width * work.element)
    norms = 2 * stretch * hardware.norm_s * own * width + hardware.gated_norm_s * work.tokens * work.features
    passes = PASSES * work.residual / hardware.copy_bytes_s
    if (
        work.wide
    ):  # 4 products' inputs and all weights, in both passes, and the weights' gradients: 4 bytes there, 2 here
        weights = sum(entering * out for _, entering, out in products_of_block(work))
        passes += 6 * (4 * 2 * own * width + 3 * weights) / hardware.copy_bytes_s
    dropout = 2 * 24 * own * width / hardware.copy_bytes_s if work.model.dropout else 0.0
    return norms + hardware.swiglu_s * work.tokens * work.glu + passes + dropout


def block_seconds(work: Work, hardware: Hardware) -> tuple[float, float, float]:
    """Products, scan and the rest of a block, forward and backward, on a card that is not under load."""
    return 3 * _products(work, hardware), _scan(work, hardware), _elementwise(work, hardware)


def computing(parts: list[Part], micro_batch: int, every: int, accumulation: int, hardware: Hardware) -> float:
    """Seconds that a step takes at least: what the slowest stage computes, and the pipeline's bubble."""
    slowest = max(_Stage(part, micro_batch, every, hardware).seconds for part in distinct(parts))
    return (accumulation + len(parts) - 1) * slowest


def step_time(parts: list[Part], micro_batch: int, every: int, accumulation: int, hardware: Hardware) -> StepTime:
    """Of all stages of a layout together."""
    count, parts = len(parts), distinct(parts)
    slowest = max((_Stage(part, micro_batch, every, hardware) for part in parts), key=lambda stage: stage.seconds)
    moved = [traffic(part, micro_batch, every, accumulation, hardware) for part in parts]
    update = max(_update(part, accumulation, hardware) for part in parts)
    return StepTime(
        products=accumulation * slowest.products,
        scan=accumulation * slowest.scan,
        elementwise=accumulation * slowest.elementwise,
        loss=accumulation * slowest.loss,
        recompute=accumulation * slowest.recompute,
        waiting=accumulation * slowest.waiting,
        bubble=(count - 1) * slowest.seconds,
        optimizer=update if _ahead(parts[0]) else max(update, hardware.host_step_s),
        communication=communication(moved),
    )


def communication(moved: list[list[Moved]]) -> dict[str, float]:
    """Seconds by axis, of the stage that has most."""
    found: dict[str, float] = {}
    for stage in moved:
        for one in stage:
            found[one.axis] = max(found.get(one.axis, 0.0), one.seconds)
    return found


class _Stage:
    """Seconds of one micro-batch, forward and backward, on one stage."""

    def __init__(self, part: Part, micro_batch: int, every: int, hardware: Hardware):
        sizes, blocks, again = part.sizes(micro_batch), len(part.blocks), part.recomputes[every]
        work, known = sizes.work, sizes.seconds
        if hardware not in known:
            known[hardware] = block_seconds(work, hardware)
        products, scan, elementwise = (hardware.sustained * seconds for seconds in known[hardware])
        self.products, self.scan, self.elementwise = blocks * products, blocks * scan, blocks * elementwise
        self.recompute = again * (products / 3 + 0.3 * scan + 0.35 * elementwise)
        if part.first and part.model.tpe:
            mirrored = 1 if part.model.causal else 2
            share = part.model.tpe_rank / 64
            toeplitz = mirrored * share * hardware.toeplitz_s * work.tokens * part.model.width
            self.elementwise += hardware.sustained * toeplitz
        self.loss = 0.0
        if part.last:
            flop = 6.0 * work.tokens * part.model.width * work.vocabulary
            self.loss = hardware.sustained * flop / hardware.loss_flop_s * (1.0 if work.element == 2 else 8.0)
        device = self.products + self.scan + self.elementwise + self.loss + self.recompute
        host = _host_block(part, hardware) * (blocks + 0.4 * again)
        self.waiting = max(0.0, host - device)
        self.seconds = device + self.waiting


def _host_block(part: Part, hardware: Hardware) -> float:
    """Seconds of the host for a block's passes: with ZeRO-3 no block is recorded, with sequence parallelism its exchange is
    not, and every collective takes a while to start."""
    alone, more = hardware.host_block_s, 0.0
    if part.choice.tensor > 1:
        shared = part.choice.tensor_sequence_parallel
        more += (hardware.host_shared_s if shared else hardware.host_tensor_s) - alone
    more += hardware.host_sequence_s - alone if part.choice.sequence > 1 else 0.0
    return (hardware.host_stage_3_s if part.zero == 3 else alone) + max(0.0, more)


def _update(part: Part, accumulation: int, hardware: Hardware) -> float:
    """Of the optimiser, and of adding up gradients."""
    own = part.trained / (part.ranks if part.zero else 1)
    if _ahead(part):
        moved = BF16_UPDATE_BYTES * own + (COPIED_BYTES + ADDED_BYTES * (accumulation - 1)) * part.trained
    else:
        moved = UPDATE_BYTES * own + GATHERED_BYTES * accumulation * part.trained
    return moved / hardware.copy_bytes_s


def _ahead(part: Part) -> bool:
    """Whether the host does not wait for a step's norm: ZeRO 1 in bf16 (`training.bf16`)."""
    return part.bf16 and part.zero == 1
